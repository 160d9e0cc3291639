"""Which of the kernels written by hand are in use. `choose` decides once, at start.

- "loss": losses of rows of logits, and their gradient, with one read (loss.py)
- "head": the gradient of the head's weight is added to inside of the product (loss.py)
- "mlp": the products of the MLP with its activation (mlp.py)

Nothing is in use on a CPU, or without Triton: then loss.py and gpt.py compute the same in their plain way.
"""

IN_USE = set()
