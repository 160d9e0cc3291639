"""Whether a micro-batch fits into memory: tried before the first step, and said when it does not fit later.

The estimate of memory_estimate.py cannot know everything that a GPU keeps. So a new run tries a micro-batch
of made-up tokens, and takes a smaller one if memory runs out. Weights, optimizer state and random numbers
stay as they are. No GPU was there to try this on; the tests run it on a CPU with a model that raises.
"""

import contextlib
import gc
import sys

import torch

from nanochat import UserError
from nanochat.machine import precision, runtime
from nanochat.machine.transfers import to_device
from nanochat.plan import memory_advice


def fit_micro_batch(
    plan, machine, model, compute_dtype: torch.dtype, resolved: dict, boundaries=None, reduction: str = "mean"
):
    """The plan, with fewer rows a micro-batch if its own do not fit into a GPU's memory; same batch.

    Nothing is tried on a CPU: its system promises more memory than it has. A run that goes on with the
    micro-batch of its checkpoint (`resolved`) keeps it, so that it computes the same bits. boundaries (None:
    rows are not divided) and reduction are those of the training: so the trial needs the same memory, and
    the training uses the code that the trial has compiled. Raises UserError, on every process, if not even
    one row fits.
    """
    if machine.device.type != "cpu" and plan.device_batch_size != resolved.get("device_batch_size"):
        plan = shrink(plan, machine, model, compute_dtype, boundaries, reduction)
    explain(plan)  # the plan may have fewer rows by now
    return plan


def shrink(plan, machine, model, compute_dtype: torch.dtype, boundaries=None, reduction: str = "mean"):
    """The plan with the first number of rows that fits on all processes: its own, about half of it, and so
    on, as far as they divide the rows of a process."""
    while not all(machine.all_gather(_fits(plan, machine, model, compute_dtype, boundaries, reduction))):
        gc.collect()  # the failed step's tensors hang on its exception
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(machine.device)  # the run's peak is not that of this failure
        if not (rows := smaller(plan)):
            raise UserError(_sentence(plan))
        machine.print(
            f"out of memory with {plan.device_batch_size} rows a micro-batch; going on with {rows} and the "
            "same batch"
        )
        plan = plan.with_rows(rows)
    return plan


def smaller(plan) -> int:
    """The largest number of rows, at most half of the plan's, that divides those of a process; 0 if none."""
    rows = plan.device_batch_size * plan.grad_accum_steps
    return next((n for n in range(plan.device_batch_size // 2, 0, -1) if rows % n == 0), 0)


def _fits(plan, machine, model, compute_dtype, boundaries, reduction) -> bool:
    """Whether the first micro-steps of a step fit. Only their memory counts, and they leave no trace."""
    before = runtime.random_state(machine.device)
    step = torch.compile(model, dynamic=False) if plan.compiled else model
    try:
        # Several processes have the gradients a second time, in DDP's buckets
        buckets = [torch.empty_like(p) for p in model.parameters() if machine.world_size > 1]
        inputs, targets, documents = made_up_batch(plan, machine, boundaries)
        for _ in range(min(2, plan.grad_accum_steps)):  # the second one finds the gradients of the first
            with precision.autocast(machine.device, compute_dtype):
                loss = step(inputs, targets, reduction, documents=documents)
            loss.backward()
        machine.synchronize()
        del buckets
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
        runtime.set_random_state(before, machine.device)


def made_up_batch(plan, machine, boundaries) -> tuple:
    """(inputs, targets, documents) of a micro-batch, as the loader would give them."""
    shape = plan.device_batch_size, plan.config.max_seq_len
    inputs = torch.arange(shape[0] * shape[1]).view(shape) % plan.config.vocab_size
    documents = None if boundaries is None else to_device(boundaries(inputs, 0), machine.device)
    # Not the same tensor twice: torch.compile would compile code for that, and later other code
    return to_device(inputs, machine.device), to_device(inputs.clone(), machine.device), documents


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch says that a device, or the CPU, has no more memory."""
    said = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    )


def check_plan(plan, accept: str):
    """Raise UserError if the run must not begin. While it is built, lack of memory is one sentence, too.
    accept: the setting of that name."""
    plan.check(accept)
    explain(plan, in_training=False)


def explain(plan, in_training: bool = True):
    """From here on an error that ends the process for lack of memory is one sentence, with status 2.

    in_training: else it is being built, and fewer rows may not help.
    """
    hook = getattr(sys.excepthook, "without_memory_sentence", sys.excepthook)

    def end(kind, error, trace):
        if is_out_of_memory(error):
            with contextlib.suppress(Exception):
                _report(error)
            kind, error = UserError, UserError(_sentence(plan, in_training))
        hook(kind, error, trace)

    end.without_memory_sentence = hook
    sys.excepthook = end


def _report(error):
    print(str(error).strip().splitlines()[0], file=sys.stderr, flush=True)


def _sentence(plan, in_training: bool = True) -> str:
    if in_training and (rows := smaller(plan)):
        return (
            f"out of memory with {plan.device_batch_size} rows a micro-batch; give the same command with "
            f"--device_batch_size={rows}: it goes on from the newest checkpoint, with the same batch"
        )
    # The estimate was wrong, or the memory is not free: what to lower to need three quarters of it
    when = "with one row a micro-batch" if in_training else "before the first step"
    return f"out of memory {when}; {memory_advice.advice(plan, plan.expected_bytes * 3 // 4)}"
