"""How to make operators of PyTorch from functions, which compiled code calls as they are.

torch.library.custom_op does the same, but its first call in eager mode loads torch's compiler, which takes
two seconds.
"""

import torch

LIBRARY = torch.library.Library("nanochat", "DEF")


def register(name: str, types: str, function, shapes, kernel=None):
    """Make torch.ops.nanochat.<name> of a function, for tensors on a CPU, and of a kernel for those on CUDA.

    types: its arguments and results, as "(Tensor x) -> Tensor"; an argument that it writes to is a
    Tensor(a!). shapes: a function of the same arguments that returns empty results.
    """
    LIBRARY.define(name + types, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, function, "CPU")
    LIBRARY.impl(name, shapes, "Meta")
    if kernel:
        LIBRARY.impl(name, kernel, "CUDA")


def register_autograd(name: str, keep, gradients):
    """Give an operator its backward pass: setup_context and backward of torch.library.register_autograd.

    Not a torch.autograd.Function: torch.compile would look inside.
    """
    torch.library.register_autograd(f"nanochat::{name}", gradients, setup_context=keep, lib=LIBRARY)


def triton_kernels():
    """The module of the kernels by hand. Its import takes seconds, so it waits for the first call on CUDA."""
    from nanochat.ops import triton_kernels

    return triton_kernels


def compute_dtype(x) -> torch.dtype:
    """Autocast's dtype on the device of x, without autocast that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
