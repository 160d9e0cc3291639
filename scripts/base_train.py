"""Pretrain a GPT from --depth, on whatever machine this is. Reads from top to bottom.

    python -m scripts.base_train runs/laptop.py                                 # minutes on two CPU cores
    python -m scripts.base_train --depth=12                                     # one GPU
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train --depth=20   # eight GPUs
    python -m scripts.base_train --depth=20 --plan                              # say what it would do; exit

Settings stand below, one line each. A bare argument is a file of settings, --key=value goes over it.
docs/walkthrough.md explains this script section by section.
"""

import contextlib
import gc
import json
import math
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

import configurator
from nanochat import UserError, checkpoint, distributed, metrics, optim, precision, runtime, scaling
from nanochat.data.dataset import open_dataset
from nanochat.data.loader import TrainLoader, merge_states, validation_batches
from nanochat.data.tokenizer import open_tokenizer
from nanochat.engine import continuations
from nanochat.evaluate import bits_per_byte
from nanochat.gpt import GPT
from nanochat.report import write_report

# Model
depth = 20  # Transformer layers; every other size follows from it
aspect_ratio = 64  # width = depth * aspect_ratio
head_dim = 128  # channels of an attention head
max_seq_len = 2048  # positions a row
window_pattern = "L"  # one letter a layer, repeated: L attends to everything before, S to the last quarter
vocab_size = -1  # tokens (-1 = 4096 for the embedded text, 32768 for other data)

# Data
data = "embedded"  # embedded (Python's standard library), a file or folder of text, climbmix or fineweb-edu
val_data: str | None = None  # a file or folder that is the validation split (none = what the data set pins)
text_field = "text"  # the field of JSON objects or column of parquet files that holds the text
tokenizer = "auto"  # auto (trained on the data at the first use), a JSON file, or gpt2, cl100k_base

# Horizon: exactly one decides, in this order
num_iterations = -1  # optimizer steps (-1 = off)
target_flops = -1.0  # FLOPs to spend (-1 = off)
target_param_data_ratio = 12.0  # tokens for each parameter of matrices and head (-1 = off)

# Optimization
device_batch_size = -1  # rows of a micro-batch on a device (-1 = as many as fit)
total_batch_size = -1  # tokens an optimizer step, over all devices (-1 = derived from the horizon)
embedding_lr = 0.3  # AdamW's rate for embeddings
unembedding_lr = 0.004  # AdamW's rate for the head
matrix_lr = 0.02  # Muon's rate
scalar_lr = 0.1  # AdamW's rate for the scalars
weight_decay = 0.28  # cautious weight decay of Muon's matrices (0 = off)
grad_clip = 1.0  # the most the gradient's norm may be (-1 = off)
warmup_steps = 40  # steps of linear warm-up, at most a tenth of the run (0 = off)
warmdown_ratio = 0.65  # share of the run in which the rate falls linearly
final_lr_frac = 0.05  # the rate at the end, as a share of the full one

# Evaluation
eval_every = 250  # steps between evaluations of validation bits per byte (-1 = only at the end)
eval_tokens = 41_943_040  # the first so many validation tokens are scored (-1 = all)
core_metric_every = -1  # steps between evaluations of CORE (-1 = off)
core_metric_max_per_task = 500  # examples a task of CORE
sample_every = 2000  # steps between samples (-1 = only at the end)
sample_prompts = "def|class|import"  # beginnings to continue, separated by |

# Checkpoints
save_every = 1000  # steps between checkpoints (-1 = off; there is one at the end anyway)
save_minutes = 5.0  # minutes between checkpoints, beside those of save_every (-1 = off)
keep_checkpoints = 2  # the newest so many are kept (-1 = all)
permanent_every = -1  # steps between checkpoints that are kept for ever, beside those (-1 = off)
resume = "auto"  # auto (the newest good checkpoint), never (the old run is set aside), a step, or a folder
accept = ""  # changes to go on with all the same: any of data,tokenizer,seed,total_batch_size
init_from: str | None = None  # a checkpoint folder whose weights a new run starts from
base_dir = "~/.cache/nanochat"  # where data, tokenizers and runs live (environment: NANOCHAT_BASE_DIR)
out_dir: str | None = None  # the run's folder (none = <base_dir>/base_checkpoints/<model_tag>)
model_tag: str | None = None  # the run's name (none = d<depth>)

# Machine
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # to compute in; auto = by the device
compile: Literal["auto", "on", "off"] = "auto"  # auto = where it saves more time than it takes
seed = 42  # of initial weights, order of the data, and samples
process_timeout = 600.0  # seconds that processes wait for one that does not answer, then all end
run = "dummy"  # wandb run name (dummy = no wandb)
plan = False  # print the plan and exit

settings = configurator.configure(globals())

# ------------------------------------------------------------------------------------------------------
# Set up: device and processes, text, tokenizer, the run's folder

machine = runtime.start(device_type, seed, process_timeout)
say, device, world_size = machine.print, machine.device, machine.world_size
compute_dtype, dtype_reason = precision.resolve_dtype(dtype, device)
stop = runtime.StopSignal()
places = {"data", "val_data", "tokenizer", "init_from", "base_dir", "out_dir"}  # another machine has its own
machine.check_same({name: value for name, value in settings.values.items() if name not in places})

base_path = Path(base_dir).expanduser()
run_path = Path(out_dir or base_path / "base_checkpoints" / (model_tag or f"d{depth}")).expanduser()
with machine.main_first("data", stop):  # the first process builds what is missing, the others find it
    dataset = open_dataset(data, val_data, base_dir=base_path, text_field=text_field)
    wanted = vocab_size if vocab_size != -1 else 4096 if data == "embedded" else 32768
    place = dataset.tokenizer_folder(base_path)
    encoding = open_tokenizer(tokenizer, wanted, place, dataset.train_texts, exact=vocab_size != -1)

found = None  # the checkpoint this run goes on from
if not plan:
    if machine.is_main:
        lock = checkpoint.lock_folder(run_path, say)  # held until this process ends
        found = checkpoint.find(run_path, resume, say)
    path = machine.all_gather(str(found.path) if found else None)[0]  # all processes take the same one
    token = checkpoint.check_shared(run_path, machine)
    if path and not machine.is_main:
        found = checkpoint.open_checkpoint(path, verify=False)
resolved = found.state["resolved"] if found else {}  # what was found out at the run's first start, not again

# ------------------------------------------------------------------------------------------------------
# Derive everything from depth; each line of the plan says why

config = scaling.model_config(depth, aspect_ratio, head_dim, max_seq_len, encoding.vocab_size, window_pattern)
counts = scaling.on_meta(config).parameter_counts()
flops_per_token = scaling.on_meta(config).flops_per_token()
horizon = scaling.derive_horizon(
    config, num_iterations, target_flops, target_param_data_ratio, total_batch_size, flops_per_token
)
num_iterations, total_batch_size = horizon.num_iterations, horizon.total_batch_size
total_tokens = horizon.tokens

# The global batch is total_batch_size / max_seq_len rows; a process works through its share in micro-steps
rows = scaling.rows_per_process(total_batch_size, max_seq_len, device_batch_size, world_size)
if device_batch_size == -1:
    device_batch_size = resolved.get("device_batch_size", -1)
memory = min(machine.all_gather(machine.free_memory()))  # bytes: what is decided here is the same everywhere
sharing = {"world_size": world_size, "saves_here": device.type == "cpu"}  # who else needs memory for what
if device_batch_size == -1 or rows % device_batch_size:
    most = 2**16 if device.type == "cuda" else 2**12  # tokens: more is not faster (docs/benchmarks.md)
    device_batch_size = scaling.pick_device_batch_size(rows, config, compute_dtype, memory, most, **sharing)
grad_accum_steps = rows // device_batch_size

rate_scale = scaling.rate_scale(total_batch_size, total_tokens, horizon.d12_tokens)
adam_scale = rate_scale * scaling.adam_width_scale(config.width)
rates = {
    "embedding_lr": embedding_lr * adam_scale,
    "unembedding_lr": unembedding_lr * adam_scale,
    "scalar_lr": scalar_lr * rate_scale,
    "matrix_lr": matrix_lr * rate_scale,
}
scaled_decay = scaling.scaled_weight_decay(
    weight_decay, rate_scale, total_batch_size, total_tokens, horizon.d12_tokens
)
warmup_steps = min(warmup_steps, num_iterations // 10)

peak_per_process, peak_source = runtime.peak_flops(device, compute_dtype)
peak = sum(machine.all_gather(peak_per_process))  # FLOP/s of all processes
expected_seconds = flops_per_token * total_tokens / (0.3 * peak)
micro_batch_tokens = device_batch_size * max_seq_len
expected_bytes = scaling.check_memory(config, micro_batch_tokens, compute_dtype, memory, **sharing)
decision = runtime.decide_compile(compile, device, expected_seconds, before=resolved.get("compiled"))
compiled, compile_reason = min(machine.all_gather(decision))  # only if every process can

plan_lines = [
    f"device: {device.type} x {world_size}, {peak / 1e12:.3g} TFLOP/s in all ({peak_source})",
    f"compute dtype: {str(compute_dtype).removeprefix('torch.')} ({dtype_reason}); "
    "weights, gradients, optimizer: float32",
    f"compiled: {'yes' if compiled else 'no'} ({compile_reason})",
    f"data: {dataset.name}, {dataset.note}, fingerprint {dataset.fingerprint[:12]}",
    f"tokenizer: {encoding.name}, {encoding.vocab_size:,} tokens, fingerprint {encoding.fingerprint[:12]}",
    f"model: depth {depth}, width {config.width} (depth x {aspect_ratio}, in heads of {head_dim}), "
    f"{config.num_heads} heads, {counts['total']:,} parameters ({counts['matrices']:,} in matrices, "
    f"{counts['head']:,} in the head), {flops_per_token:,} FLOPs a token",
    f"horizon: {num_iterations:,} steps, {total_tokens:,} tokens ({horizon.reason}); "
    f"{total_tokens / (counts['matrices'] + counts['head']):.2f} tokens a parameter",
    f"batch: {total_batch_size:,} tokens ({horizon.batch_reason}) = {device_batch_size} rows x {max_seq_len} "
    f"x {world_size} processes x {grad_accum_steps} micro-steps",
    f"rates: x {rate_scale:.3f} (batch^1/2 x tokens^-0.32, against d12), AdamW's also x "
    f"{adam_scale / rate_scale:.3f} (width^-1/2): "
    + ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items()),
    f"weight decay: {scaled_decay:.4g} (rate x decay x steps as at d12), linear to 0; "
    f"warm-up {warmup_steps} steps, warm-down the last {warmdown_ratio:.0%}",
    f"expected: {expected_bytes / 2**30:.1f} GiB a process, {expected_seconds / 60:.0f} min at 30 % MFU",
    f"out: {run_path}",
]
say("\n".join(plan_lines))
if plan:
    machine.close()
    sys.exit(0)
if core_metric_every > 0:
    say("CORE is not there yet: core_metric_every is accepted and does nothing")

# ------------------------------------------------------------------------------------------------------
# Build: model, optimizer, data, all of them as the checkpoint left them

identity = {  # what must be the same for a run to be the same run
    "model": asdict(config),
    "data": dataset.fingerprint,
    "tokenizer": encoding.fingerprint,
    "seed": seed,
    "total_batch_size": total_batch_size,
}
machine.check_same(identity | {"compute dtype": str(compute_dtype), "num_iterations": num_iterations})
evaluated = -1  # the step of the last evaluation
if found:
    changed = checkpoint.changes(found, identity, accept)
    evaluated = metrics.last_evaluation(found.path.parent / "metrics.jsonl", found.step)
    evaluated = machine.all_gather(evaluated)[0]  # the first process wrote the file
    if found.step > num_iterations or found.step == num_iterations == evaluated:
        say(f"finished already: {found.path}; for more give --num_iterations, to start anew --resume=never")
        machine.close()
        sys.exit(0)
    say(f"going on from {found.path}")
    if num_iterations > (before := found.state["num_iterations"]):
        say(f"the horizon grew from {before} to {num_iterations} steps: the learning rate rises again")
    if changed:
        say(f"accepted: {', '.join(changed)} changed, so the data begins anew")

with torch.device("meta"):
    model = GPT(config)
model.to_empty(device=device)
model.init_weights(torch.Generator(device).manual_seed(seed))
if found or init_from:
    start_from = found or checkpoint.find_weights(init_from, identity, say)
    model.load_state_dict(start_from.load_model())
optimizer = optim.MuonAdamW(
    optim.parameter_groups(model, rates, scaled_decay),
    compute_dtype,
    compile=compiled,
    rank=machine.rank,
    world_size=world_size,
)
scaler = precision.make_scaler(device, compute_dtype)
loader = TrainLoader(
    dataset.train_shards,
    encoding,
    rows_per_step=total_batch_size // max_seq_len,
    max_seq_len=max_seq_len,
    device_batch_size=device_batch_size,
    rank=machine.rank,
    world_size=world_size,
    seed=seed,
    device=device,
    state=found.state["loader"] if found and not changed else None,
)
shape = max_seq_len, device_batch_size, eval_tokens, machine.rank, world_size, device
validation = validation_batches(dataset.val_shards, encoding, *shape)
# What a resumed loop must know
step = found.step if found else 0
loop = {"tokens": step * total_batch_size, "train_seconds": 0.0, "skipped": 0, "recent": [], "samples": []}
loop["wandb_id"] = None
if found:
    loop |= found.state["loop"]
    optimizer.load_named_state(found.load_optimizer(optimizer.needs))
    runtime.set_random_state(found.load_optimizer(runtime.is_random_state), device)
    if found.state["scaler"]:  # empty where the run was not in float16
        scaler.load_state_dict(found.state["scaler"])

train_model = torch.compile(model, dynamic=False) if compiled else model
if world_size > 1:  # averages the gradients over the processes, overlapped with the backward pass
    train_model = DistributedDataParallel(train_model, **runtime.DDP_OPTIONS)
token_bytes = torch.from_numpy(encoding.token_bytes()).to(device)

record = {
    "settings": settings.record(),
    "plan": plan_lines,
    "identity": identity,
    "versions": {"python": platform.python_version(), "torch": torch.__version__},
    "git_commit": runtime.git_commit(),
    "device": runtime.device_name(device),
    "world_size": world_size,
}
wandb_run = None
if machine.is_main:
    # Checkpoints past this one are of a run that is given up; they go first, lest they outlive their metrics.
    # With --resume=FOLDER all goes that another run left here.
    elsewhere = found and found.path.resolve().parent != run_path.resolve()
    if aside := checkpoint.set_aside(run_path, after=None if elsewhere else step):
        say(f"what was in {run_path} and is not this run's past is now in {aside}")
    metrics.rewind_metrics(run_path / "metrics.jsonl", step)
    (run_path / "config.json").write_text(json.dumps(record, indent=2) + "\n")
    wandb_run = metrics.start_wandb(run, "nanochat", record, run_path, loop["wandb_id"], say)
    loop["wandb_id"] = wandb_run.id if wandb_run else None
log = metrics.Metrics(run_path, wandb_run, enabled=machine.is_main)
console = metrics.Console(step, num_iterations, machine.is_main)
saver = checkpoint.AsyncSaver(run_path, machine.rank, world_size, token)  # each process writes its share
distributed.before_end(saver.finish)


def is_due(every: int) -> bool:
    return last_step or (every > 0 and step > 0 and step % every == 0)


def save():
    """Start to write a checkpoint of this moment: `step` updates have been made."""
    state = {
        "identity": identity,
        "resolved": {"compiled": compiled, "device_batch_size": device_batch_size},
        "num_iterations": num_iterations,
        "loader": merge_states(machine.all_gather(loader.state())),
        "scaler": scaler.state_dict(),
        "loop": loop,
    }
    try:
        saver.submit(
            step,
            model=model.state_dict(),
            optimizer=optimizer.named_state() | (runtime.random_state(device) if machine.is_main else {}),
            state=state,
            files={"tokenizer.json": encoding.to_bytes(), "config.json": run_path / "config.json"},
            before_publish=log.sync,
            after_publish=lambda: checkpoint.prune(
                run_path, keep_checkpoints, permanent_every, console.print
            ),
        )
    except checkpoint.SaveError as error:  # of the save before this one; training goes on
        console.print(f"warning: {error}")


# ------------------------------------------------------------------------------------------------------
# The loop: save, sample, evaluate, then one optimizer step over its micro-steps, then log

bad_steps, first_step = 0, step
stopping, saved_at, save_now = False, time.monotonic(), False
while True:
    last_step = step == num_iterations

    # First, for nobody knows how long a signal to stop leaves
    if step != first_step and (stopping or save_now or is_due(save_every) or is_due(permanent_every)):
        save()
        saved_at = time.monotonic()

    if machine.is_main and not stopping and is_due(sample_every):
        prompts = sample_prompts.split("|")
        loop["samples"] = continuations(model, encoding, prompts, compute_dtype, seed)
        console.print(*(f"--- {text}" for text in loop["samples"]))

    if not stopping and evaluated != step and is_due(eval_every):
        val_bpb = bits_per_byte(model, validation, token_bytes, compute_dtype, machine)
        console.print(f"step {step}: validation {val_bpb:.4f} bits per byte")
        log.write({"step": step, "val_bpb": val_bpb, "tokens": loop["tokens"]})
        evaluated = step

    if machine.is_main and evaluated == step:
        write_report(run_path, run_path.name, plan_lines, loop["samples"], last_step, console.print)

    if last_step or stopping:
        break

    # One optimizer step: the gradient of the whole batch, gathered over micro-steps, then one update
    started, waited = time.perf_counter(), loader.wait_s
    multiplier = scaling.lr_multiplier(step, num_iterations, warmup_steps, warmdown_ratio, final_lr_frac)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * multiplier
        if group["method"] == "muon":
            group["betas"] = (scaling.muon_momentum(step, num_iterations), group["betas"][1])
            group["weight_decay"] = scaled_decay * scaling.weight_decay_multiplier(step, num_iterations)

    micro_losses = torch.zeros(grad_accum_steps, device=device)
    for micro_step in range(grad_accum_steps):
        inputs, targets = next(loader)
        last_micro_step = micro_step == grad_accum_steps - 1
        with contextlib.nullcontext() if world_size == 1 or last_micro_step else train_model.no_sync():
            with precision.autocast(device, compute_dtype):
                loss = train_model(inputs, targets) / grad_accum_steps  # the sum of gradients is a mean
            scaler.scale(loss).backward()
        micro_losses[micro_step] = loss.detach()

    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip if grad_clip > 0 else math.inf)
    optimizer.found_inf = 1 - grad_norm.isfinite().float()  # a bad step changes nothing; nobody waits to know
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    machine.synchronize()
    seconds = time.perf_counter() - started

    grad_norm, finite = grad_norm.item(), math.isfinite(grad_norm)
    overflow = not finite and scaler.get_scale() > 1  # of float16, whose scale is halved then: no bad step
    bad_steps = 0 if finite or overflow else bad_steps + 1
    loop["skipped"] += not finite
    loop["train_seconds"] += seconds
    loop["tokens"] += total_batch_size
    # By one clock, and not while a save is still being written
    late = 0 < 60 * save_minutes < time.monotonic() - saved_at and saver.done() and machine.is_main
    sums = machine.all_sum([micro_losses.sum().item(), float(stop.name != ""), float(late)])
    loss_value, stopping, save_now = sums[0] / world_size, sums[1] > 0, sums[2] > 0
    spike = metrics.is_spike(loss_value, loop["recent"])
    loop["recent"] = [*loop["recent"], *[loss_value] * finite][-metrics.RECENT_STEPS :]
    record = {
        "step": step,
        "loss": loss_value,
        "lr_multiplier": multiplier,
        "grad_norm": grad_norm,
        "step_time_s": seconds,
        "data_wait_s": loader.wait_s - waited,
        "tok_per_sec": total_batch_size / seconds,
        "mfu": flops_per_token * total_batch_size / seconds / peak,
        "tokens": loop["tokens"],
        "flops": loop["tokens"] * flops_per_token,
        "train_time_s": loop["train_seconds"],
        "epoch": loader.epoch,
        "skipped": loop["skipped"],
        **({"loss_scale": scaler.get_scale()} if scaler.is_enabled() else {}),  # of the next step
        "spike": spike,
    }
    log.write(record)
    console.step(record)
    if spike:
        console.print(f"step {step}: the loss of {loss_value:.4f} is a spike, 6 sigma over the recent ones")
    if bad_steps == 3:
        where = metrics.first_bad(micro_losses.tolist())
        raise UserError(
            f"three steps in a row were not finite, the last one step {step} in {where} (rows from "
            f"{step * (total_batch_size // max_seq_len)} on); the checkpoints in {run_path} are from before: "
            "lower the learning rates or use --dtype=float32"
        )
    if step == first_step:
        gc.collect()
        gc.freeze()  # what is there now stays: the garbage collector need not look at it again
        saver.reserve(model.state_dict(), optimizer.named_state())
    step += 1

# ------------------------------------------------------------------------------------------------------
# Finish

loader.close()
saver.close()
console.close()
log.close()
if stopping:
    again = "" if resume == "auto" else " with --resume=auto"
    say(f"stopped by {stop.name or 'a signal'} after {step} steps and saved; the same command{again} goes on")
else:
    say(f"done: {loop['train_seconds']:.0f} s in steps, {machine.peak_memory() / 2**30:.2f} GiB at most")
    say(f"report: {run_path / 'report.md'}")
machine.close()
