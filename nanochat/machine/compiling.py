"""Compiled code, from the first call on or after some eager ones."""

import gc

import torch

from nanochat.machine import memory


def compile_after(function, calls: int | None):
    """`function`, eager for its first `calls` calls and compiled from then on (None: never compiled).

    The first results are there at once, and what fails in a call fails before the wait for the compiler.
    A module is called like the module. What the compiler leaves behind is frozen after the second compiled
    call: by then the backward pass of the first one is compiled too.
    """
    if calls is None:
        return function
    if calls == 0:
        return torch.compile(function, dynamic=False)
    compiled, done = None, 0

    def call(*args, **options):
        nonlocal compiled, done
        done += 1
        if done == calls + 1:  # not before: torch.compile loads the compiler, which takes a second or two
            compiled = torch.compile(function, dynamic=False)
        result = (compiled or function)(*args, **options)
        if done == calls + 2:
            freeze_garbage()
        return result

    return call


def freeze_garbage():
    """Freeze what exists now, so that the garbage collector skips it, and give freed memory to the system.

    What the set-up and the compiler have made lives to the end; to look at it again takes time in each step.
    """
    gc.collect()
    gc.freeze()
    memory.give_back()
