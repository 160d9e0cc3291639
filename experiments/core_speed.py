"""Examples a second of CORE's evaluation, and of one example at a time (scripts/bench.py, --what=core)."""

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import open_tokenizer
from nanochat.evals import core
from nanochat.evals.bundle import open_bundle
from nanochat.files import user_path
from nanochat.gpt import GPT
from nanochat.machine import precision, runtime
from nanochat.plan import scaling
from tests.bundles import write_bundle, write_like_core


@torch.no_grad()
def one_at_a_time(model, tokenizer, tasks, dtype, machine) -> int:
    """Answer every question by itself, its choices in one batch, with the logits of all positions.

    Returns the number of right answers.
    """
    right, device = 0, machine.device
    for number, task in enumerate(tasks):
        for index in range(len(task.examples)):
            question = core.tokenize(task, number, index, tokenizer, model.config.max_seq_len)
            rows = [torch.from_numpy(row.astype("int64")) for row in question.rows]
            idx = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
            with precision.autocast(device, dtype):
                logits = model(idx)[:, :-1]  # (B, T - 1, V)
            losses = F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten(), reduction="none")
            losses, exact = losses.view(len(rows), -1), logits.argmax(-1) == idx[:, 1:]
            spans = [slice(s - 1, len(row) - 1) for s, row in zip(question.starts, rows, strict=True)]
            mean = torch.stack([losses[i, span].mean() for i, span in enumerate(spans)]).cpu().numpy()
            every = torch.stack([exact[i, span].all() for i, span in enumerate(spans)]).cpu().numpy()
            rows_of = question.row_of_choice
            right += core.decide(task, question, mean[rows_of], every[rows_of])
    return right


def bench(values: dict) -> dict:
    """Both ways take turns over two bundles of the tests; `values` are the settings of bench.py."""
    machine = runtime.start(values["device_type"], seed=0)
    dtype, _ = precision.resolve_dtype("auto", machine.device)
    base = user_path("base_dir", values["base_dir"])
    dataset = open_dataset(values["data"], base_dir=base)
    folder = dataset.tokenizer_folder(base)
    tokenizer = open_tokenizer("auto", values["vocab_size"], folder, dataset.train_texts)
    shape = (values[name] for name in ("depth", "aspect_ratio", "head_dim", "max_seq_len"))
    model = GPT(scaling.model_config(*shape, tokenizer.vocab_size, values["window_pattern"]))
    model.to(machine.device).init_weights()
    results = {}
    for name, write in (("like CORE", write_like_core), ("awkward", write_bundle)):
        with tempfile.TemporaryDirectory() as place:
            tasks = open_bundle(write(Path(place) / "bundle"), place)[0].tasks
        results[name] = compare(model, tokenizer, tasks, dtype, machine, values["rounds"])
    return results


def compare(model, tokenizer, tasks, dtype, machine, rounds: int) -> dict:
    """Examples a second of both ways in turns, and the median of their ratios."""
    examples = sum(len(task.examples) for task in tasks)
    ways = {"batched": core.evaluate, "one_at_a_time": one_at_a_time}
    times = {name: [] for name in ways}  # seconds
    for way in ways.values():
        way(model, tokenizer, tasks[:1], dtype, machine)  # warms up
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way(model, tokenizer, tasks, dtype, machine)
            times[name].append(time.perf_counter() - began)
    pairs = list(zip(times["one_at_a_time"], times["batched"], strict=True))
    row = {"examples": examples, "compute_dtype": precision.name_of(dtype)}
    row |= {f"{name}_per_s": examples / statistics.median(each) for name, each in times.items()}
    return row | {"ratio": statistics.median(slow / fast for slow, fast in pairs)}
