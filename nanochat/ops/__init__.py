"""What the model computes with: attention and its backends, loss, element-wise parts, fp8, sub-word rows."""
