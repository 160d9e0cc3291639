"""Whether a micro-batch fits into a GPU's memory: tried before the run begins.

The estimate of memory.py cannot know all that a GPU keeps. So a new run tries a micro-batch of made-up
tokens, and takes fewer rows if memory runs out. The trial has a model of its own, and restores the random
numbers.
"""

import gc

import torch

from nanochat import UserError
from nanochat.gpt import GPT
from nanochat.machine import precision, runtime
from nanochat.machine.compiling import compile_parts
from nanochat.machine.transfers import to_device
from nanochat.optim import PARAMETER_TABLE, table_row
from nanochat.plan import memory
from nanochat.zero import is_shared_out


def with_tried_micro_batch(plan, machine, divided_rows: bool, reduction: str):
    """The plan, with fewer rows a micro-batch if its rows do not fit into memory on every process. The rows
    are about halved until they fit; the batch stays.

    divided_rows: a token sees its own document only. reduction: of the loss. Both as in training, so that the
    trial needs the same memory. Raises UserError where the weights do not fit, and on every process if not
    even one row fits.
    """
    with torch.device("meta"):
        model = GPT(plan.config)
    try:
        runtime.materialize(model, machine.device, seed=0)
    except torch.OutOfMemoryError as error:  # fewer rows would not help
        raise UserError(memory.refusal(plan) or out_of_memory(plan.with_rows(1))) from error
    plan.apply_to(model)
    boundaries = plan.attention.boundaries if divided_rows else None
    while not all(machine.all_gather(_fits(plan, machine, model, boundaries, reduction))):
        _give_back(machine)
        if not (rows := plan.most_rows(plan.device_batch_size // 2)):
            raise UserError(out_of_memory(plan))
        machine.print(
            f"out of memory with {plan.device_batch_size} rows a micro-batch; going on with {rows} and the "
            "same batch"
        )
        plan = plan.with_rows(rows)
    del model
    _give_back(machine)
    return plan


def _give_back(machine):
    """Free what only cycles keep: a failed step's tensors, by its exception; weights, by compiled code."""
    gc.collect()
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(machine.device)  # the run's peak is not that of the trial


def _fits(plan, machine, model, boundaries, reduction) -> bool:
    """Whether two micro-steps fit into memory. They leave no trace."""
    before = runtime.random_state(machine.device)
    step = compile_parts(model) if plan.compiled else model
    try:
        # The optimizer is made later. Several processes have the gradients a second time, in DDP's buckets
        state = torch.empty(plan.expected_memory["optimizer state"], dtype=torch.uint8, device=machine.device)
        buckets = [torch.empty_like(p) for p in model.parameters() if machine.world_size > 1]
        for name, p in model.named_parameters():  # MuonAdamW keeps those of tables from step to step
            if PARAMETER_TABLE[table_row(name, p)][2] != "muon" and is_shared_out(p.shape):
                p.grad = torch.zeros_like(p)
        inputs, targets, documents = _made_up_batch(plan, machine, boundaries)
        for _ in range(min(2, plan.grad_accum_steps)):  # the second one finds the gradients of the first
            with precision.autocast(machine.device, plan.hardware.dtype):
                loss = step(inputs, targets, reduction, documents=documents)
            loss.backward()
        machine.synchronize()
        del state, buckets
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
        runtime.set_random_state(before, machine.device)


def _made_up_batch(plan, machine, boundaries) -> tuple:
    """(inputs, targets, documents) of a micro-batch, as the loader would give them."""
    shape = plan.device_batch_size, plan.config.max_seq_len
    inputs = torch.arange(shape[0] * shape[1]).view(shape) % plan.config.vocab_size
    documents = None if boundaries is None else to_device(boundaries(inputs, 0), machine.device)
    # Two tensors: torch.compile would compile other code for one that is both
    return to_device(inputs, machine.device), to_device(inputs.clone(), machine.device), documents


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch says that a device, or the CPU, has no more memory."""
    said = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    )


def explanation(plan):
    """A function for `explain_errors`: the sentence for an error that means memory ran out, else None."""
    return lambda error: out_of_memory(plan) if is_out_of_memory(error) else None


def out_of_memory(plan) -> str:
    """What to do when memory runs out in a run with that plan, in one sentence."""
    if rows := plan.most_rows(plan.device_batch_size // 2):
        return (
            f"out of memory with {plan.device_batch_size} rows a micro-batch; give the same command with "
            f"--device_batch_size={rows}: it goes on from the newest checkpoint, with the same batch"
        )
    # The estimate was wrong, or the memory is not free: what to lower to need three quarters of it
    return f"out of memory with one row a micro-batch; {memory.advice(plan, plan.expected_bytes * 3 // 4)}"
