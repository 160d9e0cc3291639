"""Record which operator runs in which dtype, in a real training step and in generation.

    python -m scripts.precision_report                       # print the page and write it to a file
    python -m scripts.precision_report --dtype=float16       # the same for another precision
    python -m scripts.precision_report --measure             # and measure what each precision costs; minutes

docs/precision.md answers the usual questions about precision with this output.
"""

import shlex
import sys
from pathlib import Path
from typing import Literal

import torch

import configurator
from nanochat import UserError, optim
from nanochat.data.loader import TrainLoader
from nanochat.data.sources import open_dataset
from nanochat.diagnostics import precision_cost, scaled_rates
from nanochat.diagnostics.precision_page import page
from nanochat.diagnostics.recorder import record_step
from nanochat.files import replacing, temporary_folder, user_path
from nanochat.gpt import GPT
from nanochat.machine import precision, runtime
from nanochat.machine.precision import name_of
from nanochat.plan import counts, scaling
from nanochat.plan.memory import training_bytes
from nanochat.terminal import gib

# Model
depth = 4  # Transformer layers [1..512]
aspect_ratio = 64  # width = depth * aspect_ratio [1..4096]
head_dim = 64  # channels of an attention head [2..1024]
max_seq_len = 512  # positions a row [2..2**20]
window_pattern = "L"  # as in base_train
vocab_size = 4096  # tokens [1..2**20]

# The step
device_batch_size = 4  # rows [1..2**20]
grad_clip = 1.0  # the most the gradient's norm may be (-1 = off) [-1, 1e-6..1e6]
max_tokens = 2  # tokens to generate after a prompt of 8 (0 = none) [0..1e9]
seed = 42  # of weights and tokens [0..2**62]

# What each precision costs
measure = False  # train and infer in every precision, each in a process of its own, in turns
precisions = "auto"  # names with commas between them (auto = all that work here); the first is the base
measure_steps = 40  # training steps, the same for all; the loss is the mean over the last round [2..1e6]
measure_rounds = 5  # turns of each precision [1..1e4]
measure_seconds = 100.0  # most seconds to train each but the first; a slower one makes fewer steps [0.1..1e6]
measure_tokens = 32  # tokens to generate in each turn [1..1e6]
data = "embedded"  # text to train on, as in base_train

# Machine
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # compute dtype of the recorded step
base_dir = "~/.cache/nanochat"  # where data, tokenizer and the page are (environment: NANOCHAT_BASE_DIR)
out: str | None = None  # file of the page (none = <base_dir>/precision_report.md)

configurator.configure(globals())

DEFAULTS = configurator.defaults(Path(__file__).with_name("base_train.py"))
base_path = user_path("base_dir", base_dir)
out_path = user_path("out", out) if out else base_path / "precision_report.md"
machine = runtime.start(device_type, seed)
device = machine.device
compute_dtype, reason = precision.resolve_dtype(dtype, device)
config = scaling.model_config(depth, aspect_ratio, head_dim, max_seq_len, vocab_size, window_pattern)


def to_measure() -> list[str]:
    """The precisions to measure. UserError if the machine lacks one or the settings do not fit."""
    names = [name.strip() for name in precisions.split(",")]
    names = precision_cost.possible(device) if names == ["auto"] else names
    for name in names:
        if name not in precision.DTYPES:
            raise UserError(f"unknown precision {name}; use {', '.join(precision.DTYPES)}")
        precision.resolve_dtype(name, device)
    if measure_steps % measure_rounds or measure_steps < 2 * measure_rounds:
        raise UserError(
            f"measure_steps {measure_steps} does not give each of {measure_rounds} rounds the same number, "
            f"at least 2; use {max(2, round(measure_steps / measure_rounds)) * measure_rounds}"
        )
    if measure_tokens > max_seq_len - precision_cost.PROMPT:
        raise UserError(
            f"a prompt of {precision_cost.PROMPT} tokens and measure_tokens {measure_tokens} do not fit in "
            f"max_seq_len {max_seq_len}; lower --measure_tokens or raise --max_seq_len"
        )
    return names


wanted = to_measure() if measure else []
processes = len(wanted) + 2 if measure else 1  # one each, one more for the first, and this one
memory = machine.free_memory() // processes
tokens = device_batch_size * max_seq_len
needed = sum(training_bytes(config, tokens, torch.float32, compiled=False).values())
if needed > memory:
    raise UserError(
        f"this report needs about {gib(needed)} a process and {gib(memory)} are free; lower "
        "--device_batch_size, --max_seq_len or --depth"
    )


def recorded_step():
    """One training step and some generation, with random tokens: dtypes do not depend on the text."""
    model = GPT(config).to(device)
    model.init_weights(torch.Generator(device).manual_seed(seed))
    rates = scaled_rates(DEFAULTS, config, tokens, steps=1)
    optimizer = optim.MuonAdamW(optim.parameter_groups(model, *rates), compute_dtype)
    scaler = precision.make_scaler(device, compute_dtype)
    rows = torch.randint(vocab_size, (device_batch_size, max_seq_len + 1), device=device)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    prompt = rows[0, : min(8, max_seq_len - 1)].tolist() if max_tokens > 0 else []
    return record_step(
        model, optimizer, scaler, compute_dtype, inputs, targets, prompt, max_tokens, grad_clip
    )


def costs() -> str:
    """The page of --measure: two tables as Markdown."""
    dataset = open_dataset(data, base_dir=base_path)
    tokenizer = dataset.open_tokenizer("auto", vocab_size, base_path)
    sizes = device_batch_size, max_seq_len, device_batch_size
    with TrainLoader(dataset.train_shards, tokenizer, *sizes, seed=seed) as loader:
        pairs = [next(loader) for _ in range(measure_steps)]
    batches = torch.stack([torch.cat((x, y[:, -1:]), 1) for x, y in pairs]).cpu()  # (steps, B, T + 1)
    seconds = measure_seconds / measure_rounds
    rates, _ = scaled_rates(DEFAULTS, config, tokens, measure_steps)
    with temporary_folder() as folder:
        common = {"config": config, "device": device, "rounds": measure_rounds, "folder": folder}
        trained = precision_cost.measure_training(
            wanted, batches, rates=rates, seed=seed, seconds=seconds, **common
        )
        inferred = precision_cost.measure_inference(wanted, new_tokens=measure_tokens, **common)
    return cost_page(trained, inferred, dataset)


def cost_page(trained: list[dict], inferred: list[dict], dataset) -> str:
    """Both tables, and how to read them."""
    parameters = counts.parameter_counts(counts.on_meta(config))["total"]
    short = [f"{r['name']} made {r['steps']} of {measure_steps} steps" for r in trained if r["loss"] is None]
    parts = [
        "## What each precision costs here",
        f"The processes work in turns, and the speeds are medians. Ratios are to {trained[0]['name']}. All "
        f"train in eager mode on the same {measure_steps} batches of {dataset.name} "
        f"({dataset.fingerprint[:12]}), with constant rates. *Loss* is the mean over the last round; the "
        "last row shows how much losses differ by chance. *Memory* is the peak of the process; *of weights "
        "and step* is the part since the model was made, whose float32 weights take "
        f"{4 * parameters / 2**30:.2f} GiB."
        + (f" Some had no time for all steps and have no loss: {', '.join(short)}." if short else ""),
        precision_cost.training_table(trained),
        "Inference uses the weights of the first row. *Autocast* keeps float32 weights and casts them at "
        "every call; *cast once* stores them in the precision, as chat.py does. *Off* compares the logits "
        "with those of the first row, over all positions of one row of tokens; the largest of these is "
        f"{inferred[0]['size']:.3g}.",
        precision_cost.inference_table(inferred),
    ]
    return "\n\n".join(parts) + "\n"


def write(text: str):
    try:
        out_path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out_path) as file:
            file.write(text.encode(errors="replace"))
    except OSError as error:
        raise UserError(
            f"cannot write {out_path} ({error.strerror}); choose another file with --out"
        ) from None


facts = [
    f"{runtime.device_name(device)}, {torch.get_num_threads()} threads; torch {torch.__version__}",
    f"compute dtype {name_of(compute_dtype)} ({reason})",
    f"model: depth {depth}, width {config.width}, {config.num_heads} heads, vocabulary of {vocab_size:,}",
    f"step: {device_batch_size} x {max_seq_len} tokens",
    f"`{shlex.join(['python', '-m', 'scripts.precision_report', *sys.argv[1:]])}`",
]
text = page(recorded_step(), "Precision report", facts)
print(text)
write(text)
if measure:
    text += "\n" + (measured := costs())
    print(measured)
    write(text)
print(f"written: {out_path}")
machine.close()
