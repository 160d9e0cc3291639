"""Pretrain a GPT from --depth, on whatever machine this is. Reads from top to bottom.

    python -m scripts.base_train runs/laptop.py                    # five minutes on two CPU cores
    python -m scripts.base_train --depth=12 --data=climbmix        # one GPU
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train --depth=20 --data=climbmix
    python -m scripts.base_train --depth=20 --plan                 # print what it would do, and exit

docs/walkthrough.md explains each section; `python -m scripts.download --name=climbmix` gets public text.
"""

import contextlib
import math
import time
from collections import deque
from typing import Literal

import torch

import configurator
from nanochat import checkpoint, explain_errors, optim
from nanochat.data.dataset import sample_prompts as sample_prompts_for
from nanochat.data.loader import TrainLoader, merge_states
from nanochat.data.sources import open_dataset
from nanochat.data.validation import open_validation
from nanochat.engine import continuations
from nanochat.evals.bits_per_byte import validate
from nanochat.evals.tasks import open_tasks, score_tasks
from nanochat.files import user_path
from nanochat.gpt import GPT
from nanochat.gradients import clip_grad_norm_, wrap_in_ddp
from nanochat.machine import precision, runtime, signals
from nanochat.machine.compiling import compile_after, freeze_garbage
from nanochat.machine.hardware import survey
from nanochat.machine.profiler import StepProfiler
from nanochat.ops.subword import register_subwords
from nanochat.plan import planning, scaling, simulation, trial, wording
from nanochat.run import loggers
from nanochat.run.output import RunOutput, begin, restore

# Settings. --help shows those with a *, --help=all shows all

# Model
depth = 20  # * Transformer layers; every other size follows from it [1..512]
aspect_ratio = -1  # width = depth * aspect_ratio (-1 = 64, less if FLOPs or minutes are few) [-1, 1..4096]
head_dim = 128  # channels of an attention head [2..1024]
max_seq_len = 2048  # * tokens of a row; a longer document continues in later rows [2..2**20]
window_pattern = "L"  # one letter a layer, repeated: L attends to everything before, S to the last quarter
vocab_size = -1  # tokens (-1 = to suit the amount of text, 4096 to 32768) [-1, 265..2**20]
spelling: Literal["auto", "on", "off"] = "auto"  # tokens spelled alike learn together (auto = in short runs)
bigrams = -1  # rows of pairs and of triples of tokens, for each token (-1 = by tokens, 0 = none) [-1..1024]
copying: Literal["auto", "on", "off"] = "auto"  # add what followed the same tokens before (auto = on)

# Data
data = "embedded"  # * embedded (Python's library), a file or folder, climbmix, fineweb-edu, hf:OWNER/NAME
val_data: str | None = None  # validate on these; a.txt,b.txt have a curve each (none = the data set's own)
document_mask = False  # a token attends to its own document only, not to all that its row holds
text_field = "text"  # the field of JSON objects or column of parquet files that holds the text
download: Literal["off", "on"] = "off"  # on = get the shards of public data while training goes on
tokenizer_name = "auto"  # * auto (trained on the data at the first use), a JSON file, or gpt2, cl100k_base

# Horizon: exactly one decides, in this order
num_iterations = -1  # * optimizer steps (-1 = off) [-1, 1..1e9]
target_flops = -1.0  # FLOPs to spend (-1 = off) [-1, 1..1e30]
target_minutes = -1.0  # * minutes from the command to its end, with evaluations (-1 = off) [-1, 0.01..1e6]
target_param_data_ratio = 12.0  # * tokens a parameter of blocks and head (-1 = off) [-1, 1e-6..1e6]

# Optimization
device_batch_size = -1  # * rows of a micro-batch on a device (-1 = as many as fit) [-1, 1..2**20]
total_batch_size = -1  # * tokens a step, over all devices (-1 = derived from the horizon) [-1, 1..2**32]
embedding_lr = 0.6  # AdamW's learning rate for embeddings [0..1e6]
unembedding_lr = 0.004  # AdamW's learning rate for the head (the unembedding) [0..1e6]
matrix_lr = 0.02  # * Muon's learning rate [0..1e6]
scalar_lr = 0.1  # AdamW's learning rate for the scalars [0..1e6]
weight_decay = 0.28  # cautious weight decay of Muon's matrices (0 = off) [0..1e6]
table_decay = -1.0  # times optim.py's decay of embeddings and head (-1 = epochs - 1, 0 to 1) [-1, 0..1e6]
grad_clip = 1.0  # largest norm of the gradient (-1 = off) [-1, 1e-6..1e6]
warmup_steps = 40  # steps of linear warm-up, at most a tenth of the run (0 = off) [0..1e9]
warmdown_ratio = 0.8  # share of the run in which the rate falls linearly [0..1]
final_lr_frac = 0.05  # what the rate falls to, as a share of the full rate [0..1]

# Evaluation
eval_every = 250  # * steps between validations, in bits per byte (-1 = only at the end) [-1, 1..1e9]
eval_tokens = 41_943_040  # validation tokens to score (-1 = all) [-1, 1..1e12]
core_metric_every = 2000  # steps between evaluations of tasks, and at the end (-1 = off) [-1, 1..1e9]
core_metric_max_per_task = 500  # examples of each of CORE's tasks (-1 = all) [-1, 1..1e9]
core_bundle: str | None = None  # folder or zip file of CORE's tasks (none = <base_dir>/eval_bundle.zip)
sample_every = 2000  # steps between samples (-1 = only at the end) [-1, 1..1e9]
sample_prompts = "auto"  # texts to continue, separated by |; may be empty (auto = to suit the data)

# Checkpoints
save_every = 1000  # * steps between checkpoints (-1 = only at the end) [-1, 1..1e9]
save_minutes = 5.0  # minutes between further checkpoints (-1 = off) [-1, 1e-4..1e6]
keep_checkpoints = 2  # how many of the newest are kept (-1 = all) [-1, 1..1e6]
permanent_every = -1  # steps between checkpoints that are never deleted (-1 = off) [-1, 1..1e9]
resume = "auto"  # * auto (newest good checkpoint), never (set the old run aside), a step, or a folder
accept = ""  # changes to allow: data,document_mask,seed,tokenizer,total_batch_size; refusals: epochs,memory
init_from: str | None = None  # a folder whose weights a new run starts from: a checkpoint, a run, an export
base_dir = "~/.cache/nanochat"  # where data, tokenizers and runs live (environment: NANOCHAT_BASE_DIR)
out_dir: str | None = None  # the run's folder (none = <base_dir>/base_checkpoints/<model_tag>)
model_tag: str | None = None  # * the run's name (none = d<depth>)

# Machine
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # * auto = the best that the device has
fp8 = False  # train the blocks' large products in 8 bits, on GPUs that can (docs/precision.md)
compile: Literal["auto", "on", "off"] = "auto"  # auto = if it saves more time than it takes
kernels: Literal["auto", "off"] = "auto"  # written by hand, for GPUs: auto = those that are right and faster
gradient_dtype: Literal["float32", "bfloat16"] = "float32"  # in which processes exchange gradients
seed = 42  # of initial weights, order of the data, and samples [0..2**62]
price_per_hour = -1.0  # price of all machines of the run together (-1 = do not show its cost) [-1, 0..1e9]
process_timeout = 600.0  # seconds to wait for a process that does not answer; then all end [1..1e6]
profile = -1  # write a trace of this step by torch.profiler into the run's folder (-1 = off) [-1, 0..1e9]
logger: str | None = None  # * wandb,tensorboard,trackio or some (none = no logger; with --run=NAME wandb)
run = "dummy"  # the name of the run in the loggers (dummy = its folder)
plan_only = False  # * print the plan and exit
plan_device: str | None = None  # with --plan: plan for this GPU, such as H100 (none = this machine)
plan_world_size = -1  # with --plan and --device: the number of processes, one a GPU (-1 = one) [-1, 1..1e6]

settings = configurator.configure(globals(), aliases={  # people type --plan, --device and so on
    "plan": "plan_only", "device": "plan_device", "world_size": "plan_world_size",
    "tokenizer": "tokenizer_name",
})  # fmt: skip
if plan_device or plan_world_size != -1:  # the plan for GPUs that are not here
    print(simulation.page(settings.values))
    raise SystemExit(0)

# ------------------------------------------------------------------------------------------------------
# Set up: machine, text, tokenizer

machine = runtime.start(device_type, seed, process_timeout)
say, device, world_size = machine.print, machine.device, machine.world_size
compute_dtype, dtype_reason = precision.resolve_dtype(dtype, device)
stop = signals.StopSignal()  # ends the set-up; later the loop saves and stops after its step
machine.check_same_settings(settings.values)
log_to = loggers.choose(logger, run)  # a missing package is told before any work
hardware = survey(machine, compute_dtype, dtype_reason)

base_path = user_path("base_dir", base_dir)
run_path = user_path("out_dir", out_dir or base_path / "base_checkpoints" / (model_tag or f"d{depth}"))
with machine.main_first("data", stop):  # the first process builds what is missing; then the others find it
    dataset = open_dataset(
        data, val_data, base_dir=base_path, text_field=text_field, download=download, plan_only=plan_only,
        tokens=lambda *size: scaling.horizon_tokens(settings.values, hardware, *size),
    )  # fmt: skip
    tokenizer = dataset.open_tokenizer(tokenizer_name, vocab_size, base_path, network=not plan_only)
    folder = dataset.tokenizer_folder(base_path)  # of what is made from this text

# Lock the folder and find the checkpoint to continue. What the run resolved at its first start stays, such as
# the rows of a micro-batch, so that it computes the same numbers
resumed, run_id = (None, "") if plan_only else checkpoint.enter(run_path, resume, machine, init_from)
resolved = resumed.resolved if resumed else {}
weights = checkpoint.find_weights(init_from, say) if init_from and not resumed else None
dataset = dataset.for_run(tokenizer, resumed, machine)  # public data: the shards that the horizon needs

# ------------------------------------------------------------------------------------------------------
# Plan: everything that follows from the settings, the text and the machine, with its reason

plan = planning.decide(settings.values, tokenizer, dataset, hardware, machine, resolved, weights)
sections = wording.sections(plan, dataset, tokenizer, run_path)
say(wording.text(sections, plan.warnings(accept), whole=plan_only))
if plan_only:
    machine.exit()
plan.check(accept)  # a run that must not begin ends here
explain_errors(trial.explanation(plan))  # if memory runs out, say what to lower

identity = plan.identity(dataset, tokenizer, seed) | {"document_mask": document_mask}
step, last_eval_step, changed, loop, clock = begin(resumed, identity, settings, plan, machine, accept)

# ------------------------------------------------------------------------------------------------------
# Build: model, optimizer, batches

with torch.device("meta"):  # shapes first, then memory and initial weights
    model = GPT(plan.config)
runtime.materialize(model, device, seed)
precision.check_dtypes(model, compute_dtype)  # delete this line if a part is to compute in another dtype
register_subwords(model, tokenizer)  # does nothing if the model has no sub-word embeddings
plan.apply_to(model)  # its attention backends, kernels, and fp8
eager_left = plan.eager_left(step)  # first steps that run eager, so that their losses come soon (None: all)
groups = optim.parameter_groups(model, plan.rates, plan.weight_decay, plan.table_decay)
optimizer = optim.MuonAdamW(groups, compute_dtype, eager_left, machine.rank, world_size)
scaler = precision.make_scaler(device, compute_dtype)
dataset.begin(machine, stop, process_timeout)  # --download=on: begin to get missing shards
# For batches of your own replace the loader. It yields (inputs, targets) and has documents (None: a token
# sees all of its row), wait_s, epoch, state(), close()
rows, share = plan.total_batch_size // max_seq_len, (machine.rank, world_size)
position = resumed.state["loader"] if resumed and not changed else None  # None: from the start of the text
loader = TrainLoader(
    dataset.train_shards, tokenizer, rows, max_seq_len, plan.device_batch_size, *share, seed, device,
    position, plan.attention.boundaries if document_mask else None,
)  # fmt: skip
with machine.main_first("validation", stop):  # the first process makes the files; the others find them
    val_sets = open_validation(
        dataset, tokenizer, eval_tokens, folder, max_seq_len, plan.device_batch_size, *share, device
    )
    tasks = [], []  # made from the validation text, and CORE's
    if core_metric_every > 0:
        tasks = open_tasks(dataset, folder, core_bundle, base_path, core_metric_max_per_task, say)
token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(device)
prompts = sample_prompts_for(sample_prompts, dataset)
clock.expect_evaluation(sum(batches.tokens for batches in val_sets.values()) * world_size, *tasks)

if resumed:
    restore(resumed, model, optimizer, scaler, machine)
elif weights:
    checkpoint.start_from(weights, identity, model)

train_model = compile_after(model, eager_left, plan.grad_accum_steps, say)
train_model = wrap_in_ddp(train_model, optimizer, gradient_dtype)  # unchanged in a single process

# ------------------------------------------------------------------------------------------------------
# Log, save, evaluate

output = RunOutput(
    run_path, run_id, machine, plan, settings, sections, identity, tokenizer, resumed, loop, clock,
    log_to, run, keep_checkpoints, permanent_every,
)  # fmt: skip
console = output.console
profiler = StepProfiler(profile, clock.most_steps, run_path, machine, console.print)


def is_due(every: int) -> bool:
    """Whether what is done every so many steps is due after `step` updates. At the end all is."""
    return finished or (every > 0 and step > 0 and step % every == 0)


def log_step(step, progress, started, data_wait_s, epoch, micro_losses, numbers) -> tuple[bool, bool]:
    """Log a step when its numbers are there; returns whether to stop, and whether to save."""
    loss_sum, stops, saves, *clock_reading, grad_norm, loss_scale = numbers.result()
    record = {
        "step": step,  # the number of this update, from 0
        "loss": loss_sum / world_size,
        "progress": progress,
        "lr_multiplier": lr_multiplier(progress),
        "grad_norm": grad_norm,
        "data_wait_s": data_wait_s,
        "epoch": epoch,
    }  # add your own numbers here; output adds times, totals, tokens/s and MFU
    output.log_step(record, started, loss_scale, clock_reading, micro_losses)
    return stops > 0, saves > 0


def evaluate():
    """Score and sample what is due after `step` updates, as one record of metrics.jsonl."""
    record, began = {"step": step}, time.monotonic()
    if is_due(eval_every):
        record |= validate(model, val_sets, token_bytes, compute_dtype, machine, plan.compiled, console.over)
    if core_metric_every > 0 and is_due(core_metric_every):
        record |= score_tasks(model, tokenizer, *tasks, compute_dtype, machine, console.bar)
    if is_due(sample_every) and machine.is_main:
        record["samples"] = continuations(model, tokenizer, prompts, compute_dtype, seed)
    output.log_evaluation(record, began, final=finished)


# ------------------------------------------------------------------------------------------------------
# Schedules: functions of progress, the share of the run that is done, from 0 to 1


def lr_multiplier(progress: float) -> float:
    """Linear warm-up, then constant, then linear warm-down over the last `warmdown_ratio` of the run."""
    warmup = plan.warmup_steps / plan.num_iterations
    # One step more than progress, so that the first step has a rate
    up = min(1.0, (progress + 1 / plan.num_iterations) / warmup) if warmup > 0 else 1.0
    down = min(1.0, (1 - progress) / warmdown_ratio) if warmdown_ratio > 0 else 1.0
    return up * (final_lr_frac + (1 - final_lr_frac) * down)


def muon_momentum(progress: float) -> float:
    """From 0.85 towards 0.95 over 300 steps, or a third of a shorter run; then down with the learning rate.

    Early gradients change direction fast; a low momentum at the end gives a better model (docs/ablations.md).
    """
    rise = min(1.0, progress / min(300 / plan.num_iterations, 1 / 3))
    return 0.85 + 0.10 * min(rise, lr_multiplier(progress))


def weight_decay_multiplier(progress: float) -> float:
    """For Muon's matrices: linear to zero over the run."""
    return 1 - progress


# ------------------------------------------------------------------------------------------------------
# The loop: what is due (log, save, evaluate), then one optimizer step over its micro-steps

first_step, stopping, save_now = step, False, False
pending_logs = deque()  # steps whose numbers are on their way from the device
while True:
    finished = clock.progress(step) >= 1  # no update is left
    save_due = is_due(save_every) or is_due(permanent_every)
    evaluation_due = any(map(is_due, (eval_every, core_metric_every, sample_every)))

    # Log. A GPU gets step n + 1 before step n is logged (machine.steps_ahead): it need not wait for Python.
    # A save or an evaluation comes after the log of all steps
    due = save_due or evaluation_due
    while pending_logs and (len(pending_logs) > machine.steps_ahead or due or stopping or save_now):
        stopping, save_now = log_step(*pending_logs.popleft())
    profiler.end()

    # Save first: after a stop signal there may be little time
    if step != first_step and (stopping or save_now or save_due):
        position = merge_states(machine.all_gather(loader.state()))
        output.save(step, model, optimizer, loader=position, scaler=scaler.state_dict())
        save_now = False
    if evaluation_due and not stopping and last_eval_step != step and (finished or not clock.ends_soon):
        evaluate()
        last_eval_step = step
    if finished or stopping:
        break

    # One optimizer step: the gradient of the whole batch, gathered over micro-steps, then one update
    profiler.begin(step)
    started, waited, progress = time.perf_counter(), loader.wait_s, clock.progress(step)
    rate, decay = plan.factors_for(clock.expected_steps(step))  # 1, 1 unless minutes decide the horizon
    for group in optimizer.param_groups:
        # Shared rows, of which a step uses few, follow half of the schedule; all of it in text read twice
        follows = 0.5 + 0.5 * min(1.0, plan.table_share) if group.get("method") == "rowwise" else 1.0
        multiplier = 1 - follows * (1 - lr_multiplier(progress))
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * rate * multiplier
        if group.get("method") == "muon":
            group["betas"] = (muon_momentum(progress), group["betas"][1])
            group["weight_decay"] = group["initial_weight_decay"] * decay * weight_decay_multiplier(progress)
    micro_losses = torch.zeros(plan.grad_accum_steps, device=device)
    for micro_step in range(plan.grad_accum_steps):
        inputs, targets = next(loader)
        last_micro_step = micro_step == plan.grad_accum_steps - 1
        with contextlib.nullcontext() if world_size == 1 or last_micro_step else train_model.no_sync():
            with precision.autocast(device, compute_dtype):
                # Divided, so gradients add up to the mean
                loss = train_model(inputs, targets, documents=loader.documents) / plan.grad_accum_steps
            scaler.scale(loss).backward()
        micro_losses[micro_step] = loss.detach()
    scaler.unscale_(optimizer)
    grad_norm = clip_grad_norm_(model, optimizer, grad_clip if grad_clip > 0 else math.inf)
    optim.skip_if_not_finite(optimizer, grad_norm)  # the update of a bad step changes nothing
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=world_size == 1)  # DDP keeps them: they are views of its buckets

    # What the log needs comes to Python in one transfer, added up over the processes
    sums = micro_losses.sum(), stop.asked, output.save_is_overdue(save_minutes), *clock.now(step + 1)
    numbers = machine.read(sums, same=(grad_norm, precision.loss_scale(scaler, device)))
    data_wait_s = loader.wait_s - waited
    pending_logs.append((step, progress, started, data_wait_s, loader.epoch, micro_losses, numbers))
    if step == first_step:
        stop.set_up_done(output.what_is_lost)
        output.prepare_to_save(model, optimizer)
        freeze_garbage()
    step += 1

# ------------------------------------------------------------------------------------------------------
# Finish

loader.close()
output.finish(step, (stop.name or "another process") if stopping else "", resume)
dataset.close(machine)  # UserError if the run ended because a shard was missing
machine.close()
