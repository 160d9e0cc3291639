"""How fast base_train trains, and where a step's time goes: `python -m scripts.bench --what=train`.

Each turn is a run of scripts/base_train.py in a process of its own: `steps` steps that are timed, a save and
an evaluation, after which the peak of memory is read, one step more, and one that is profiled. The variants
take turns, `rounds` times. Of the profiled steps of a variant the one of median length is split by kind of
work (step_split.py). The peak of matrix products is measured before each round. What the plan said of memory
and time stands beside what was measured.

--peer=FOLDER sets the first variant alone beside karpathy/nanochat's own base_train, in bfloat16 and in
float32, its default: the same text, tokenizer, shape and batch, in turns on a CPU (peer_run.py).
"""

import json
import statistics
from pathlib import Path

import configurator
from experiments import peer_run, step_split
from experiments.sides import SHAPE, peer_folder
from nanochat import UserError
from nanochat.files import temporary_folder, user_path
from nanochat.machine import hardware, precision, runtime
from nanochat.plan import scaling
from nanochat.plan.counts import flops_per_token, on_meta
from nanochat.run.metrics import read_metrics

DEFAULTS = configurator.defaults(Path(__file__).parent.parent / "scripts" / "base_train.py")
SINGLE = "tok_per_sec", "mfu", "mfu_of_measured_peak", "peak_memory_bytes", "first_step_s"


def bench(settings: dict) -> dict:
    """The figures of each variant, and of the first one SINGLE at the top. Prints them for people, too."""
    names = [name.strip() for name in settings["variants"].split(",")]
    for name in names:
        if name.removesuffix("+compile") not in precision.DTYPES:
            raise UserError(f"unknown variant {name}; use {', '.join(precision.DTYPES)}, also with +compile")
    machine, peers, more = runtime.start(settings["device_type"], seed=0), {}, {}
    if settings["peer"]:
        if machine.device.type != "cpu":
            raise UserError("--what=train --peer runs on a CPU: give --device_type=cpu, or --what=gpu")
        checkout, base = peer_folder(settings["peer"]), user_path("base_dir", settings["base_dir"])
        text = peer_run.text_of(settings["data"], settings["vocab_size"], base)
        names, peers, more = names[:1], {"bfloat16": [], "float32": []}, peer_run.our_settings(text)
    turns: dict = {name: [] for name in names}
    peaks: dict = {name.removesuffix("+compile"): [] for name in names}
    with temporary_folder() as place:
        for turn in range(settings["rounds"]):
            for dtype, found in peaks.items():
                found.append(hardware.measured_flops(machine.device, precision.DTYPES[dtype])[0])
            for name, of_variant in turns.items():
                of_variant.append(train(settings, name, place / f"{name}{turn}", more))
            for dtype, of_peer in peers.items():
                peer_place = place / f"peer, {dtype}{turn}"
                of_peer.append(peer_run.train(checkout, text, peer_place, shape_of(settings), dtype))
        peak = {dtype: statistics.median(found) for dtype, found in peaks.items()}
        rows = {name: figures(settings, of_variant, peak, name) for name, of_variant in turns.items()}
        for name, row in rows.items():
            row["speed_relative_to_first"] = rows[names[0]]["step_ms"] / row["step_ms"]
            row["split"] = split(turns[name])
    report(rows, peak)
    first = rows[names[0]]
    speeds = [figures(settings, [turn], peak, names[0])["tok_per_sec"] for turn in turns[names[0]]]
    for dtype, of_peer in peers.items():
        rows[f"peer, {dtype}"] = row = over_peer(of_peer, speeds, first)
        print(f"peer, {dtype:14s} {in_words(row)}")
    return rows | {name: first[name] for name in SINGLE}  # these stand at the top of the JSON object, too


# ------------------------------------------------------------------------------------------------------
# Runs


def train(settings: dict, variant: str, run: Path, more: dict) -> dict:
    """A run: its folder, what its plan said, its records without the first third, its peak of memory, seconds
    to its first step."""
    dtype, _, compiled = variant.partition("+")
    steps, tokens = settings["steps"], settings["device_batch_size"] * settings["max_seq_len"]
    chosen = {name: settings[name] for name in DEFAULTS if name in settings}
    chosen |= {"dtype": dtype, "compile": "on" if compiled else "off", "out_dir": run}
    chosen |= {"num_iterations": steps + 2, "profile": steps + 1, "total_batch_size": tokens}
    chosen |= {"eval_every": steps, "save_every": steps} | more
    done = peer_run.watch(peer_run.our_command(chosen), failed=f"base_train failed in {variant}")
    records = read_metrics(run / "metrics.jsonl")
    evaluated = next(record for record in records if "peak_memory" in record)
    return {
        "run": run,
        "planned": json.loads((run / "config.json").read_text("utf-8"))["derived"],
        "records": [r for r in records if "loss" in r and steps // 3 <= r["step"] < steps],
        "peak_memory_bytes": evaluated["peak_memory"],
        "first_step_s": next(s for s, line in done.lines if line.startswith("step 1/")),
    }


def figures(settings: dict, turns: list[dict], peak: dict, variant: str) -> dict:
    """What the runs of a variant say together."""
    records = [record for turn in turns for record in turn["records"]]
    step_s = statistics.median(record["step_time_s"] for record in records)
    speed = settings["device_batch_size"] * settings["max_seq_len"] / step_s
    flops = flops_per_token(model_of(settings))
    memory, planned = max(turn["peak_memory_bytes"] for turn in turns), turns[0]["planned"]
    return {
        "tok_per_sec": speed,
        "step_ms": 1000 * step_s,
        "planned_step_ms": 1000 * planned["seconds"] / planned["num_iterations"],
        "mfu": statistics.median(record["mfu"] for record in records),
        "loss": records[-1]["loss"],  # the variants have the same batches and first weights
        "mfu_of_measured_peak": speed * flops / peak[variant.removesuffix("+compile")],
        "peak_memory_bytes": memory,
        "peak_memory_gib": memory / 2**30,
        "planned_memory_gib": planned["memory"] / 2**30,
        "first_step_s": statistics.median(turn["first_step_s"] for turn in turns),
    }


def model_of(settings: dict):
    """The model, as shapes."""
    return on_meta(scaling.model_config(*(settings[name] for name in SHAPE)))


# ------------------------------------------------------------------------------------------------------
# Where the time goes


def split(turns: list[dict]) -> dict:
    """step_split.time_split of the profiled step of median length."""
    found = [step_split.time_split(next(turn["run"].glob("profile_*.json.gz"))) for turn in turns]
    return sorted(found, key=lambda one: one["step_ms"])[(len(found) - 1) // 2]


def report(rows: dict, peak: dict):
    """Print peaks, speeds, and a table for each variant."""
    speeds = ", ".join(f"{dtype} {flops / 1e12:.3f} TFLOP/s" for dtype, flops in peak.items())
    print(f"matrix products: {speeds}")
    for name, row in rows.items():
        print(f"\n{name:20s} {in_words(row)}")
        print(step_split.tables(row["split"]))


def in_words(row: dict) -> str:
    """The figures of a variant in a line."""
    return "  ".join(f"{k} {v:,.4g}" for k, v in row.items() if isinstance(v, int | float))


# ------------------------------------------------------------------------------------------------------
# Beside the peer


def shape_of(settings: dict) -> dict:
    """The settings of the peer's script for the shape and the batch of ours."""
    names = ("depth", "aspect_ratio", "head_dim", "max_seq_len", "device_batch_size", "window_pattern")
    shape = {name: settings[name] for name in names} | {"num_iterations": settings["steps"]}
    return shape | {"total_batch_size": settings["device_batch_size"] * settings["max_seq_len"]}


def over_peer(runs: list[peer_run.Run], our_speeds: list[float], ours: dict) -> dict:
    """The peer's medians and largest memory, and ours over them: the speed in the same round."""
    ratios = [a / run.tok_per_sec for a, run in zip(our_speeds, runs, strict=True)]
    memory = max(run.peak_memory_bytes for run in runs)
    return {
        "tok_per_sec": statistics.median(run.tok_per_sec for run in runs),
        "ours_over_peer": statistics.median(ratios),
        "of_each_round": [round(ratio, 3) for ratio in ratios],
        "peak_memory_bytes": memory,
        "our_memory_over_peers": ours["peak_memory_bytes"] / memory,
        "first_step_s": statistics.median(run.first_step_s for run in runs),
    }
