"""Continue a base model on conversations, so that it answers. Reads from top to bottom.

    python -m scripts.mid_train                       # the newest base model, questions about Python
    python -m scripts.mid_train --source=d12 --data=chats.jsonl:2,hf:OWNER/NAME --loss_on=all
    torchrun --standalone --nproc_per_node=8 -m scripts.mid_train --source=d20 --data=chats/
    python -m scripts.mid_train --show=3              # print three conversations, targets coloured

With --loss_on=assistant, the default, only the answers are targets: this is full fine-tuning. With
--loss_on=all every token of a conversation is a target: this is midtraining. base_train.py comes first.
"""

import contextlib
import math
import shlex
import time
from collections import deque
from typing import Literal

import torch

import configurator
from nanochat import checkpoint, explain_errors, optim
from nanochat.data import chat_format
from nanochat.data.conversation_loader import ConversationBatches, ConversationLoader, render_all
from nanochat.data.conversations import open_conversations
from nanochat.engine import find_source, load_tokenizer, model_config
from nanochat.evals.bits_per_byte import validate
from nanochat.evals.exact_match import answer, exact_match, exact_match_questions
from nanochat.files import user_path
from nanochat.gpt import GPT
from nanochat.gradients import clip_grad_norm_, wrap_in_ddp
from nanochat.machine import precision, runtime, signals
from nanochat.machine.compiling import compile_after, freeze_garbage
from nanochat.machine.hardware import survey
from nanochat.machine.profiler import StepProfiler
from nanochat.plan import planning, trial, wording
from nanochat.run import loggers
from nanochat.run.output import RunOutput, begin, restore

# Settings. --help shows those with a *, --help=all shows all

# Model
source: str | None = None  # * the base model: a run's tag, its folder or a checkpoint's (none = the newest)
optimizer_state: Literal["fresh", "base"] = "fresh"  # base = go on with the optimizer state of the base run

# Conversations
data = "embedded"  # * embedded (about Python), or files, folders, hf:OWNER/NAME, as a.jsonl:3,b.jsonl
val_data: str | None = None  # validate on these; a.jsonl,b.jsonl have a curve each (none = one in 40)
loss_on: Literal["assistant", "all"] = "assistant"  # * targets: the tokens of the answers, or all
skip_bad = False  # leave out conversations that cannot be used
show = 0  # conversations to print as the model sees them, before the script exits (0 = off) [0..1e6]

# Horizon: the first positive one decides
num_iterations = -1  # optimizer steps (-1 = off) [-1, 1..1e9]
num_epochs = 3.0  # * times that every conversation is read [1e-6..1e6]

# Optimization
device_batch_size = -1  # * rows of a micro-batch on a device (-1 = as many as fit) [-1, 1..2**20]
total_batch_size = -1  # * tokens a step, over all devices, with padding (-1 = the base run's) [-1, 1..2**32]
rate_fraction = 0.3  # * learning rates, as a share of the base run's [0..1e6]
weight_decay = 0.0  # cautious weight decay of Muon's matrices (0 = off) [0..1e6]
grad_clip = 1.0  # largest norm of the gradient (-1 = off) [-1, 1e-6..1e6]
warmup_steps = 10  # steps of linear warm-up, at most a tenth of the run (0 = off) [0..1e9]
warmdown_ratio = 0.8  # share of the run in which the rate falls linearly [0..1]
final_lr_frac = 0.0  # what the rate falls to, as a share of the full rate [0..1]

# Evaluation
eval_every = 100  # * steps between validations on conversations (-1 = only at the end) [-1, 1..1e9]
eval_questions = 200  # validation questions whose answers are compared, word for word (0 = off) [0..1e6]
sample_every = 500  # steps between samples (-1 = only at the end) [-1, 1..1e9]
sample_prompts: str | None = None  # questions, separated by | (none = from the validation conversations)

# Checkpoints
save_every = 1000  # steps between checkpoints (-1 = only at the end) [-1, 1..1e9]
save_minutes = 5.0  # minutes between further checkpoints (-1 = off) [-1, 1e-4..1e6]
keep_checkpoints = 2  # how many of the newest are kept (-1 = all) [-1, 1..1e6]
resume = "auto"  # * auto (newest good checkpoint), never (set the old run aside), a step, or a folder
accept = ""  # changes to allow: data,loss_on,source,seed,total_batch_size; refusals: memory
base_dir = "~/.cache/nanochat"  # where runs live (environment: NANOCHAT_BASE_DIR)
out_dir: str | None = None  # the run's folder (none = <base_dir>/mid_checkpoints/<model_tag>)
model_tag: str | None = None  # * the run's name (none = the base run's)

# Machine
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # * auto = the best that the device has
compile: Literal["auto", "on", "off"] = "auto"  # auto = if it saves more time than it takes
kernels: Literal["auto", "off"] = "auto"  # written by hand, for GPUs: auto = those that are right and faster
gradient_dtype: Literal["float32", "bfloat16"] = "float32"  # in which processes exchange gradients
seed = 42  # of the order of conversations, and of samples [0..2**62]
process_timeout = 600.0  # seconds to wait for a process that does not answer; then all end [1..1e6]
profile = -1  # write a trace of this step by torch.profiler into the run's folder (-1 = off) [-1, 0..1e9]
logger: str | None = None  # * wandb,tensorboard,trackio or some (none = no logger; with --run=NAME wandb)
run = "dummy"  # the name of the run in the loggers (dummy = its folder)
plan_only = False  # * print the plan and exit

settings = configurator.configure(globals(), aliases={"plan": "plan_only"})  # people type --plan

# ------------------------------------------------------------------------------------------------------
# Set up: machine, base model, conversations

machine = runtime.start(device_type, seed, process_timeout)
say, device, world_size = machine.print, machine.device, machine.world_size
compute_dtype, dtype_reason = precision.resolve_dtype(dtype, device)
stop = signals.StopSignal()
machine.check_same_settings(settings.values)
log_to = loggers.choose(logger, run)  # a missing package is told before any work

base_path = user_path("base_dir", base_dir)
base = find_source(source, base_path, say, kinds=["base_checkpoints"])
config = model_config(base, base.load_model())
tag = model_tag or base.run_folder.name
run_path = user_path("out_dir", out_dir or base_path / "mid_checkpoints" / tag)
tokenizer = load_tokenizer(base, config)
chat_format.check(tokenizer)
with machine.main_first("conversations", stop):
    conversations = open_conversations(data, val_data, skip_bad, base_path, say, network=not plan_only)
if show:
    for messages in conversations.train.messages[: show if machine.is_main else 0]:
        print(chat_format.coloured(tokenizer, messages, loss_on), end="\n\n")
    machine.exit()
how = tokenizer, config.max_seq_len, loss_on
train_tokens = render_all(conversations.train, *how)
val_tokens = {name: render_all(some, *how) for name, some in conversations.val_sets.items()}

resumed, run_id = (None, "") if plan_only else checkpoint.enter(run_path, resume, machine, base.path)
resolved = resumed.resolved if resumed else {}

# ------------------------------------------------------------------------------------------------------
# Plan: everything that follows from the settings, with its reason

hardware = survey(machine, compute_dtype, dtype_reason)
epoch_tokens = len(train_tokens.epoch_rows(0, seed, config.max_seq_len)) * config.max_seq_len
plan = planning.derive_continued(settings.values, config, base.state, epoch_tokens, hardware, resolved)
plan = planning.on_machine(plan, settings.values, machine, resolved, divided_rows=True, reduction="sum")
sections = wording.sections(plan, conversations, tokenizer, run_path)
sections["model"] = {"base": str(base.path), **sections["model"]}
sections["text"]["targets"] = train_tokens.summary(loss_on)
warnings, seen = plan.warnings(accept), base.state.get("loop", {}).get("tokens", math.inf)
if seen < plan.parameters["total"] / 10:
    warnings.append(f"{base.path} has seen only {seen:,} tokens: it will answer nonsense, see --source")
say(wording.text(sections, warnings, whole=plan_only))
if plan_only:
    machine.exit()
plan.check(accept)
explain_errors(trial.explanation(plan))

identity = plan.identity(conversations, tokenizer, seed) | {"loss_on": loss_on, "source": base.fingerprint}
step, last_eval_step, changed, loop, clock = begin(resumed, identity, settings, plan, machine, accept)

# ------------------------------------------------------------------------------------------------------
# Build: model, optimizer, batches

with torch.device("meta"):
    model = GPT(config)
runtime.materialize(model, device, seed)
precision.check_dtypes(model, compute_dtype)
plan.apply_to(model)
eager_left = plan.eager_left(step)  # first steps that run eager, so that their losses come soon (None: all)
groups = optim.parameter_groups(model, plan.rates, plan.weight_decay)
optimizer = optim.MuonAdamW(groups, compute_dtype, eager_left, machine.rank, world_size)
scaler = precision.make_scaler(device, compute_dtype)
rows, share = plan.total_batch_size // config.max_seq_len, (machine.rank, world_size)
position = resumed.state["loader"] if resumed and not changed else None
loader = ConversationLoader(
    train_tokens, tokenizer, rows, config.max_seq_len, plan.device_batch_size, *share, seed, device,
    position, plan.attention.boundaries,
)  # fmt: skip
in_batches = tokenizer.bos_id, plan.device_batch_size, *share, device
val_sets = {name: ConversationBatches(tokens, *in_batches) for name, tokens in val_tokens.items()}
token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(device)
questions = exact_match_questions(conversations, eval_questions)
prompts = sample_prompts.split("|") if sample_prompts else [question[-1][1] for question, _ in questions[:3]]

if resumed:
    restore(resumed, model, optimizer, scaler, machine)
else:
    checkpoint.load_weights(base, model)
    if optimizer_state == "base":
        optim.load_state(optimizer, model, base)

train_model = compile_after(model, eager_left, plan.grad_accum_steps, say)
train_model = wrap_in_ddp(train_model, optimizer, gradient_dtype)

# ------------------------------------------------------------------------------------------------------
# Log, save, evaluate

output = RunOutput(
    run_path, run_id, machine, plan, settings, sections, identity, tokenizer, resumed, loop, clock,
    log_to, run, keep_checkpoints,
)  # fmt: skip
console = output.console
profiler = StepProfiler(profile, clock.most_steps, run_path, machine, console.print)


def is_due(every: int) -> bool:
    """Whether what is done every so many steps is due after `step` updates. At the end all is, and at step 0:
    it shows what the base model can do."""
    return finished or (every > 0 and step % every == 0)


def log_step(step, progress, started, data_wait_s, epoch, targets, micro_losses, numbers):
    """Log a step when its numbers are there; returns whether to stop, and whether to save."""
    loss, stops, saves, *clock_reading, grad_norm, loss_scale = numbers.result()
    record = {
        "step": step,  # the number of this update, from 0
        "loss": loss,
        "progress": progress,
        "lr_multiplier": lr_multiplier(progress),
        "grad_norm": grad_norm,
        "data_wait_s": data_wait_s,
        "epoch": epoch,
        "targets": targets,
    }
    output.log_step(record, started, loss_scale, clock_reading, micro_losses)
    return stops > 0, saves > 0


def evaluate():
    """Score and sample what is due after `step` updates, as one record of metrics.jsonl."""
    record, began, said = {"step": step}, time.monotonic(), ""
    if is_due(eval_every):
        record |= validate(model, val_sets, token_bytes, compute_dtype, machine, plan.compiled, console.over)
        said = " of the targets"
    if questions and is_due(eval_every):
        exact = record["exact_match"] = exact_match(model, tokenizer, questions, compute_dtype, machine)
        said += f", {100 * exact:.1f} % of {len(questions)} questions answered word for word"
    if is_due(sample_every) and machine.is_main:
        answers = answer(model, tokenizer, [[("user", p)] for p in prompts], compute_dtype)
        record["samples"] = [f"{p}\n-> {text}" for p, text in zip(prompts, answers, strict=True)]
    output.log_evaluation(record, began, said, final=finished)


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
    """From 0.95 down to 0.85 with the learning rate: that gives a better model (docs/ablations.md)."""
    return 0.85 + 0.10 * lr_multiplier(progress)


# ------------------------------------------------------------------------------------------------------
# The loop: what is due (log, save, evaluate), then one optimizer step over its micro-steps

first_step, stopping, save_now = step, False, False
pending_logs = deque()  # steps whose numbers are on their way from the device
while True:
    finished = clock.progress(step) >= 1  # no update is left
    save_due = is_due(save_every)
    evaluation_due = is_due(eval_every) or is_due(sample_every)

    # Log. A GPU gets step n + 1 before step n is logged (machine.steps_ahead): it need not wait for Python.
    # A save or an evaluation comes after the log of all steps
    due = save_due or evaluation_due
    while pending_logs and (len(pending_logs) > machine.steps_ahead or due or stopping or save_now):
        stopping, save_now = log_step(*pending_logs.popleft())
    profiler.end()

    # Save first: after a stop signal there may be little time
    if step != first_step and (stopping or save_now or save_due):
        output.save(step, model, optimizer, loader=loader.state(), scaler=scaler.state_dict())
        save_now = False
    if evaluation_due and not stopping and last_eval_step != step:
        evaluate()
        last_eval_step = step
    if finished or stopping:
        break

    # One optimizer step: the mean over all targets of the step, of every micro-step and every process
    profiler.begin(step)
    started, waited, progress = time.perf_counter(), loader.wait_s, clock.progress(step)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_multiplier(progress)
        if group.get("method") == "muon":
            group["betas"] = (muon_momentum(progress), group["betas"][1])
    micro_losses = torch.zeros(plan.grad_accum_steps, device=device)
    for micro_step in range(plan.grad_accum_steps):
        inputs, targets = next(loader)
        last_micro_step = micro_step == plan.grad_accum_steps - 1
        with contextlib.nullcontext() if world_size == 1 or last_micro_step else train_model.no_sync():
            with precision.autocast(device, compute_dtype):
                # documents: conversations of a row do not see each other
                loss = train_model(inputs, targets, "sum", documents=loader.documents) / loader.step_targets
            # DDP divides the summed gradients by world_size; step_targets already counts all processes
            scaler.scale(loss * world_size).backward()
        micro_losses[micro_step] = loss.detach()
    scaler.unscale_(optimizer)
    grad_norm = clip_grad_norm_(model, optimizer, grad_clip if grad_clip > 0 else math.inf)
    optim.skip_if_not_finite(optimizer, grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=world_size == 1)  # DDP keeps them: they are views of its buckets

    # What the log needs comes to Python in one transfer, added up over the processes
    sums = micro_losses.sum(), stop.asked, output.save_is_overdue(save_minutes), *clock.now(step + 1)
    numbers = machine.read(sums, same=(grad_norm, precision.loss_scale(scaler, device)))
    counts = loader.wait_s - waited, loader.epoch, loader.step_targets
    pending_logs.append((step, progress, started, *counts, micro_losses, numbers))
    if step == first_step:
        stop.set_up_done(output.what_is_lost)
        output.prepare_to_save(model, optimizer)
        freeze_garbage()
    step += 1

# ------------------------------------------------------------------------------------------------------
# Finish

loader.close()
output.finish(step, (stop.name or "another process") if stopping else "", resume)
if not stopping:
    say(conversations.teaches)
    say(f"talk to it: python -m scripts.chat --source={shlex.quote(str(run_path))}")
machine.close()
