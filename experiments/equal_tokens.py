"""Ours beside karpathy/nanochat at equal training tokens: bits per byte, and what they took in seconds.

    python -m experiments.equal_tokens --peer=FOLDER --depths=4,6 --seeds=3        # FOLDER: a checkout of it
    python -m experiments.equal_tokens --peer=FOLDER --batches=2048,8192,32768     # ours with several batches
    python -m experiments.equal_tokens --peer=FOLDER --data=PATH --val_data=FILE   # on another text
    python -m experiments.equal_tokens --peer=FOLDER --device_type=cuda --minutes=8    # on a GPU

Both train with their own script and their own rules: rates and schedule follow from the depth, the batch and
the number of tokens. Text, tokenizer, shape, tokens, device and precision are the same. The peer is given
several batches, and its best is what ours is compared with. It has no setting for a seed, so it runs once.
All checkpoints are scored by race_score.py: every token of every validation document, in float32.

On a CPU a run has one thread, and every core has a run. On a GPU the runs share it, so tokens/s and seconds
are then no speeds. A result is kept in <base_dir>/equal_tokens/, so a command that was stopped trains only
what is missing. A run that fails, or that --minutes ends, is named, and the exit status is 2. The picture
has bits per byte against tokens and against seconds in training steps, of which compiling is a part on both
sides, and ours over the peer's after as many tokens.

The first line names the folder with text and tokenizer, which --data takes too, on this machine or another:
--batches=none --peer_batches=none only makes it. docs/benchmarks.md has the commands for a GPU.
"""

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

import configurator
from experiments import peer_run, race_score
from experiments.sides import ROOT, peer_folder
from nanochat import UserError, terminal
from nanochat.files import user_path, write_whole
from nanochat.machine import runtime
from nanochat.run.metrics import read_metrics

peer: str | None = None  # a folder of karpathy/nanochat
data = "embedded"  # as base_train's, a document stays whole; or the folder that the first line names
val_data: str | None = None  # as base_train's
depths = "4"  # separated by commas
aspect_ratio = 64  # width = depth * aspect_ratio [1..4096]
head_dim = 128  # channels of an attention head [2..1024]
tokens = 4_915_200  # of each run [1..1e12]
max_seq_len = 512  # tokens of a row [2..65536]
vocab_size = 4096  # tokens [265..2**20]
batches: str | None = "8192"  # of ours, tokens a step, separated by commas (none = the peer alone)
peer_batches: str | None = "2048,4096,8192"  # of the peer (none = ours alone)
seeds = 1  # of ours: 0, 1, ... [1..1000]
more = ""  # settings of our base_train, separated by spaces, such as --compile=off
device_type: Literal["auto", "cuda", "cpu"] = "auto"  # auto = cuda if there is one, else cpu
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto = bfloat16 on a GPU, else float32
points = 6  # checkpoints on the way to score [1..100]
jobs = -1  # runs at a time (-1 = one a core, on a GPU 3) [-1, 1..1024]
minutes = -1.0  # what is not done by then is ended (-1 = no limit) [-1, 0.01..1e5]
plot: str | None = None  # the picture to draw (none = no picture)
base_dir = "~/.cache/nanochat"  # where data, tokenizers and results are (environment: NANOCHAT_BASE_DIR)

SIDES = {"ours": "this project", "peer": "karpathy/nanochat"}
# Settings of base_train that this command decides by one of another name
DECIDED_BY = {
    "depth": "depths", "seed": "seeds", "total_batch_size": "batches", "num_iterations": "tokens",
    "save_every": "points", "keep_checkpoints": "points", "tokenizer": "data", "out_dir": "base_dir",
}  # fmt: skip


def numbers(name: str, text: str | None) -> list[int]:
    """A setting with positive whole numbers separated by commas; None has no numbers."""
    if not all(re.fullmatch(r"\s*0*[1-9]\d*\s*", number) for number in (text or "1").split(",")):
        raise UserError(f"--{name}={text} has to be positive whole numbers separated by commas, as 4,6")
    return [*dict.fromkeys(map(int, text.split(",")))] if text else []  # each run once


# ------------------------------------------------------------------------------------------------------
# A run of either side


@dataclass(frozen=True)
class Run:
    side: str  # ours or peer
    depth: int
    batch: int  # tokens a step
    seed: int

    def __str__(self):
        return f"{self.side}, depth {self.depth}, {self.batch:,} tokens a step, seed {self.seed}"

    @property
    def steps(self) -> int:
        return max(1, round(tokens / self.batch))

    @property
    def rows(self) -> int:
        """Of a micro-batch: at most 16, so that three runs of d12 share a GPU of 80 GB."""
        rows = max(1, self.batch // max_seq_len)
        return max(n for n in range(1, 17) if rows % n == 0)

    @property
    def folder(self) -> Path:
        same = [self.steps, aspect_ratio, head_dim, max_seq_len, text.name, str(text.parent), device, dtype]
        same += [points, sources[self.side]] + ([more] if self.side == "ours" else [])
        key = hashlib.sha256(json.dumps(same).encode()).hexdigest()[:12]
        return base_path / "equal_tokens" / f"{self.side}-d{self.depth}-{self.batch}-{self.seed}-{key}"

    @property
    def result(self) -> dict | None:
        """points: of each checkpoint its tokens, seconds in steps and bits per byte; of the last one its bits
        per byte by_position; training_loss, nats a token, the mean of the last twentieth of the steps;
        tok_per_sec. None: there is none yet."""
        kept = self.folder / "result.json"
        return json.loads(kept.read_text("utf-8")) if kept.exists() else None

    def train(self):
        """Train, score, and keep what `result` returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        done_s, losses, checkpoints = OURS_OR_PEER[self.side](self)
        steps = [int(path.stem.rpartition("_")[2]) for path in checkpoints]
        scores = race_score.score(self.side, checkpoints, job, checkout, device)
        points = [
            (step * self.batch, done_s[step - 1], s["bpb"]) for step, s in zip(steps, scores, strict=True)
        ]
        found = {"points": points, "by_position": scores[-1]["by_position"]}
        found["training_loss"] = statistics.mean(losses[-max(1, len(losses) // 20) :])
        found["tok_per_sec"] = self.batch * len(done_s) / done_s[-1]
        write_whole(self.folder / "result.json", json.dumps(found).encode())
        for path in checkpoints:  # they would fill the disk
            shutil.rmtree(path if path.is_dir() else path.parent, ignore_errors=True)
        by_position = ", ".join(f"{of}: {bpb:.4f}" for of, bpb in found["by_position"].items())
        print(
            f"{self}: {points[-1][2]:.4f} bits per byte (tokens of context {by_position}), training loss "
            f"{found['training_loss']:.4f}, {found['tok_per_sec']:,.0f} tokens/s",
            flush=True,
        )


def of_both(run: Run) -> dict:
    """The settings that the two scripts share."""
    shape = {"depth": run.depth, "aspect_ratio": aspect_ratio, "head_dim": head_dim}
    steps = {"total_batch_size": run.batch, "num_iterations": run.steps}
    saves = {"save_every": max(1, run.steps // points)}
    return shape | steps | saves | {"max_seq_len": max_seq_len, "device_type": device}


def our_command(run: Run) -> list:
    chosen = of_both(run) | {"seed": run.seed, "dtype": dtype, "keep_checkpoints": -1}
    chosen |= {"base_dir": base_path, "out_dir": run.folder / "run"}
    if device == "cuda":  # its plan takes the whole GPU for its own, memory and time
        chosen |= {"device_batch_size": run.rows, "compile": "on"}
    return [*peer_run.our_command(chosen | peer_run.our_settings(text)), *more.split()]


def train_ours(run: Run) -> tuple[list[float], list[float], list[Path]]:
    """(Seconds in steps after each step, its loss, checkpoints). What an earlier command began goes on."""
    peer_run.watch(our_command(run), failed="base_train failed")
    steps = [record for record in read_metrics(run.folder / "run" / "metrics.jsonl") if "loss" in record]
    done_s = itertools.accumulate(record["step_time_s"] for record in steps)
    return [*done_s], [record["loss"] for record in steps], sorted((run.folder / "run").glob("step_*"))


def train_peer(run: Run) -> tuple[list[float], list[float], list[Path]]:
    place = run.folder / "run"
    shutil.rmtree(place, ignore_errors=True)  # it cannot go on from where it was
    chosen = of_both(run) | {"device_batch_size": run.rows}
    found = peer_run.train(checkout, text, place, chosen, dtype)
    done_s = itertools.accumulate(run.batch / speed for speed in found.step_tok_per_sec)
    return [*done_s], found.step_loss, sorted((place / "base_checkpoints" / "run").glob("model_*.pt"))


OURS_OR_PEER = {"ours": train_ours, "peer": train_peer}


def train_all(runs: list[Run], at_once: int, limit_s: float | None = None) -> list[Run]:
    """Train what has no result, for so many seconds at most. Returns the runs that have none then; why one
    failed stands on stderr. A run that is not done goes on: the end of this process ends it."""

    def attempt(run: Run):
        try:
            run.train()
        except (UserError, OSError) as error:
            print(f"{run}: {error}", file=sys.stderr, flush=True)

    pool = ThreadPoolExecutor(at_once)
    done, _ = wait([pool.submit(attempt, run) for run in runs if run.result is None], limit_s)
    pool.shutdown(wait=False, cancel_futures=True)
    for future in done:
        future.result()  # a fault of ours is seen
    return [run for run in runs if run.result is None]


# ------------------------------------------------------------------------------------------------------
# What came out


def bpb(run: Run) -> float:
    return run.result["points"][-1][2]


def best_of_peer(runs: list[Run], depth: int) -> Run | None:
    of_peer = [run for run in runs if (run.side, run.depth) == ("peer", depth) and run.result]
    return min(of_peer, key=lambda run: (math.isnan(bpb(run)), bpb(run)), default=None)  # nan: it diverged


def over_peer(run: Run, best: Run) -> np.ndarray:
    """The bits per byte of each checkpoint of a run over those of the peer's after as many tokens. Between
    two of its checkpoints it is read off a line in log tokens; before its first one it is nan."""
    (tokens, _, values), (of_peer, _, theirs) = (zip(*r.result["points"], strict=True) for r in (run, best))
    return np.array(values) / np.interp(np.log(tokens), np.log(of_peer), theirs, left=math.nan)


def table(runs: list[Run]) -> str:
    """A row for each side, depth and batch; seeds are put together."""
    columns = "side, depth, tokens, tokens a step, seeds, bits per byte, over the peer's best, tokens/s"
    rows = [columns.split(", ")]
    for side, depth, batch in dict.fromkeys((run.side, run.depth, run.batch) for run in runs):
        same = [r for r in runs if (r.side, r.depth, r.batch) == (side, depth, batch) and r.result]
        if not same:
            continue
        values, best = [bpb(run) for run in same], best_of_peer(runs, depth)
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        ratio = f"{statistics.mean(values) / bpb(best):.3f}" if best else ""
        speed = statistics.median(run.result["tok_per_sec"] for run in same)
        trained = same[0].result["points"][-1][0]
        cells = [SIDES[side], depth, f"{trained:,}", f"{batch:,}", len(same)]
        cells += [f"{statistics.mean(values):.4f}{spread}", ratio, f"{speed:,.0f}"]
        rows.append(cells)
    return terminal.table(rows)


def draw(runs: list[Run], batch: int, path: Path):
    """The peer's best and our runs with `batch`: bits per byte against tokens and against seconds; and ours
    over the peer's after as many tokens. Raises OSError if the picture cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    by_tokens, by_seconds, ratio = figure.subplots(1, 3)
    lines = itertools.cycle(("-", "--", ":", "-."))
    styles = dict(zip(sorted({run.depth for run in runs}), lines, strict=False))
    best = {depth: found for depth in styles if (found := best_of_peer(runs, depth))}
    shown = [run for run in runs if run.side == "ours" and run.batch == batch and run.result]
    for run in [*shown, *best.values()]:
        how = {"marker": "o", "markersize": 3, "color": "tab:blue" if run.side == "ours" else "tab:gray"}
        how |= {"label": f"{SIDES[run.side]}, d{run.depth}" if run.seed == 0 else None}
        of_run, seconds, values = zip(*run.result["points"], strict=True)
        by_tokens.plot(of_run, values, styles[run.depth], **how)
        by_seconds.plot(seconds, values, styles[run.depth], **how)
        if run.side == "ours" and run.depth in best:
            ratio.plot(of_run, over_peer(run, best[run.depth]), styles[run.depth], **how)
    by_tokens.set(xlabel="tokens", ylabel="validation bits per byte", xlim=(0, None))
    by_seconds.set(xlabel="seconds in training steps", xlim=(0, None))
    ratio.set(xlabel="tokens", ylabel=f"over {SIDES['peer']}'s bits per byte", xlim=(0, None))
    by_tokens.legend()
    for axes in (by_tokens, by_seconds, ratio):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


# ------------------------------------------------------------------------------------------------------


def check_settings():
    """Raises UserError for what would be known only after the runs, or would make them unlike."""
    if plot:
        from matplotlib.figure import Figure

        path, kinds = user_path("plot", plot).resolve(), Figure().canvas.get_supported_filetypes()
        if not path.parent.is_dir():
            raise UserError(f"--plot={plot} is in no folder; make the folder, or give another file")
        if path.suffix[1:].lower() not in {"", *kinds}:
            raise UserError(f"--plot={plot} is no picture; its name may end in .png, .svg or .pdf")
    named = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in more.split()}
    shared = {"aspect_ratio", "head_dim", "max_seq_len", "vocab_size", "device_type", "dtype"}
    if wrong := sorted(named & (shared | {"data", "val_data", "base_dir"} | DECIDED_BY.keys())):
        own = DECIDED_BY.get(wrong[0], wrong[0])
        raise UserError(f"--more is of ours alone; give --{own} to this command, and both sides have it")


if __name__ == "__main__":
    configurator.configure(globals())
    checkout, base_path = peer_folder(peer), user_path("base_dir", base_dir).resolve()
    check_settings()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C waits for no run: our end ends them
    wanted_depths, ours = numbers("depths", depths), numbers("batches", batches)
    runs = [
        Run("peer", d, batch, 0) for d in wanted_depths for batch in numbers("peer_batches", peer_batches)
    ]
    runs += [Run("ours", d, batch, seed) for seed in range(seeds) for d in wanted_depths for batch in ours]
    device = runtime.start(device_type, seed=0).device.type
    dtype = {"cpu": "float32", "cuda": "bfloat16"}[device] if dtype == "auto" else dtype
    text = peer_run.text_of(data, vocab_size, base_path, val_data, cut=False)
    print(f"text and tokenizer: {text}", flush=True)
    sources = {"ours": runtime.sources_fingerprint(ROOT), "peer": runtime.sources_fingerprint(checkout)}
    job = text / f"job-{max_seq_len}"  # the text to score
    race_score.write_job(text, job, max_seq_len, device)
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"  # for what is started below
    at_once = jobs if jobs > 0 else 3 if device == "cuda" else os.cpu_count() or 1
    missing = train_all(runs, at_once, 60 * minutes if minutes > 0 else None)
    print(table(runs))
    if plot:
        draw(runs, ours[0] if ours else 0, user_path("plot", plot))
    if missing:
        names = "; ".join(map(str, missing))
        print(f"not done: {names}. The same command tries these again", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(2)  # what still runs is not waited for
