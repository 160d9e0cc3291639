"""Functions as operators of PyTorch: compiled code calls them as they are and does not look inside.

torch.library.custom_op would do this, too, but at its first call in eager mode it loads torch's compiler,
which takes two seconds.
"""

import torch

LIBRARY = torch.library.Library("nanochat", "DEF")


def register(name: str, types: str, function, shapes):
    """Make torch.ops.nanochat.<name> of a function, for tensors on a CPU.

    types: its arguments and results, as "(Tensor x) -> Tensor"; shapes: makes the empty results from the
    arguments.
    """
    LIBRARY.define(name + types, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, function, "CPU")
    LIBRARY.impl(name, shapes, "Meta")


def register_autograd(name: str, keep, gradients):
    """Give an operator its backward pass: setup_context and backward of torch.library.register_autograd.

    Not by a torch.autograd.Function: torch keeps no compiled code that has one, and would make the graphs of
    the backward pass at each start.
    """
    torch.library.register_autograd(f"nanochat::{name}", gradients, setup_context=keep, lib=LIBRARY)
