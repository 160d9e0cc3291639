"""The race: bits per byte on validation text N minutes after the command is typed, ours beside the peer's.

    python -m scripts.bench --what=race --minutes=5 --peer=FOLDER    # FOLDER: a checkout of karpathy/nanochat

Both train on the same documents with the same tokenizer, each with its own script in a process of its own.
Each saves checkpoints on its way; race_score.py scores all of them afterwards, outside of the time. Ours is
the settings file --recipe with --target_minutes. The peer has the recipe's shape, or its own width; batch,
width and dtype are those with which it is best in short runs (`best_settings`). It gets as many steps as fill
the same time at the speed of its last run. The sides take turns, and change places every round. Caches are
warm. Both train on the CPU. Neither samples, and only ours evaluates: one batch, at its end.
"""

import hashlib
import json
import math
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments import peer_run, race_score
from experiments.sides import peer_folder
from nanochat.files import temporary_folder, user_path
from nanochat.run.metrics import read_metrics
from nanochat.terminal import print_line

ROUNDS = 3  # at most; a round has a run of each side
POINTS = 6  # checkpoints on the way, about
ROWS = (4, 2, 8)  # the peer's batches, in rows of the recipe's length
SEARCH = 0.25  # the length of a run that chooses the peer's settings, as a share of the race's
EARLY = 0.95  # a run of the peer that ends before this share of the time is done again
TRIAL_STEPS = 30  # of a run that says how fast the peer is


@dataclass
class Race:
    """What all runs of a race have in common."""

    peer: Path
    text: Path  # of peer_run.prepare
    recipe: str
    base_dir: Path
    minutes: float
    folder: Path  # for the runs, and job.pt, the text to score
    shape: dict  # of the recipe: depth, aspect_ratio, head_dim, max_seq_len

    def new_place(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))


@dataclass
class Lap:
    """A run of one side."""

    seconds: float  # from the command to its end
    tokens: int
    peak_memory_bytes: int
    points: list[tuple[float, float]]  # of each checkpoint: seconds from the command, bits per byte

    @property
    def bpb(self) -> float:
        return self.points[-1][1]


def bench(settings: dict) -> dict:
    """Medians of each side, and the ratio of the bits per byte in each round.

    Raises UserError if `peer` is no folder of karpathy/nanochat, or a run fails.
    """
    peer, base_dir = peer_folder(settings["peer"]), user_path("base_dir", settings["base_dir"])
    text = peer_run.text_of(settings["data"], settings["vocab_size"], base_dir)
    with temporary_folder(settings["folder"]) as folder:
        race = Race(peer, text, settings["recipe"], base_dir, settings["minutes"], folder, {})
        race.shape = warm_up(race)
        race_score.write_job(text, race.folder, race.shape["max_seq_len"])
        best = best_settings(race)
        laps = run_rounds(race, best, min(ROUNDS, settings["rounds"]))
    return results(laps, best)


# ------------------------------------------------------------------------------------------------------
# Ours


def our_command(race: Race, run: Path) -> list:
    """Our base_train with the recipe, for the time of the race, into the folder `run`."""
    chosen = {"base_dir": race.base_dir, "out_dir": run, "keep_checkpoints": -1, "device_type": "cpu"}
    chosen |= {"num_iterations": -1, "target_flops": -1, "target_minutes": race.minutes}
    chosen |= {"save_minutes": race.minutes / (POINTS + 1)} | peer_run.our_settings(race.text)
    return peer_run.our_command(chosen, race.recipe)


def warm_up(race: Race) -> dict:
    """Fill our caches by the first steps of a run as long as the others: a shorter one may not compile at
    all. Returns the shape of the recipe's model, as settings of both projects."""
    run = race.new_place() / "run"
    peer_run.until_steps(our_command(race, run), (peer_run.FULL_SPEED,))
    model = json.loads((run / "config.json").read_text("utf-8"))["identity"]["model"]
    width, depth = model["width"], model["depth"]
    sizes = {"aspect_ratio": width // depth, "head_dim": width // model["num_heads"]}
    return {"depth": depth, "max_seq_len": model["max_seq_len"]} | sizes


def our_lap(race: Race) -> Lap:
    run = race.new_place() / "run"
    done = peer_run.watch(our_command(race, run), failed=f"base_train failed with {race.recipe}")
    checkpoints = sorted(run.glob("step_*"))
    seconds = [(path / "manifest.json").stat().st_mtime - done.began for path in checkpoints]
    tokens = [record["tokens"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    scores = race_score.score("ours", checkpoints, race.folder, race.peer)
    points = [(second, found["bpb"]) for second, found in zip(seconds, scores, strict=True)]
    return Lap(done.seconds, tokens[-1], done.peak_memory_bytes, points)


# ------------------------------------------------------------------------------------------------------
# The peer


def steps_in(minutes: float, run: peer_run.Run) -> int:
    """How many steps end after so many minutes, if start, end and a step take as long as in `run`."""
    first, last = len(run.step_done_s) // 3, len(run.step_done_s) - 1
    step_s = (run.step_done_s[last] - run.step_done_s[first]) / (last - first)
    others_s = run.first_step_s - step_s + run.seconds - run.step_done_s[last]
    return max(3, int((60 * minutes - others_s) / step_s))


def peer_trial(race: Race, chosen: dict, dtype: str) -> peer_run.Run:
    """A short run for the speed, after one of two steps that fills the caches."""
    for steps in (2, TRIAL_STEPS):
        settings = chosen | {"num_iterations": steps}
        run = peer_run.train(race.peer, race.text, race.new_place(), settings, dtype)
    return run


def peer_lap(race: Race, best: dict, minutes: float, before: peer_run.Run) -> tuple[Lap, peer_run.Run]:
    """A run of the peer that takes `minutes` at the speed of `before`, an earlier run.

    If it ends too early, because the machine has become faster, it runs once more: it gets its full time.
    """
    for _ in range(2):
        steps, place = steps_in(minutes, before), race.new_place()
        chosen = best["settings"] | {"num_iterations": steps, "save_every": max(1, steps // (POINTS + 1))}
        run = before = peer_run.train(race.peer, race.text, place, chosen, best["dtype"])
        if run.seconds > EARLY * 60 * minutes:
            break
    files = sorted((place / "base_checkpoints" / "run").glob("model_*.pt"))
    scores = race_score.score("peer", files, race.folder, race.peer)
    points = [(file.stat().st_mtime - run.began, s["bpb"]) for file, s in zip(files, scores, strict=True)]
    return Lap(run.seconds, steps * chosen["total_batch_size"], run.peak_memory_bytes, points), run


def best_settings(race: Race) -> dict:
    """The peer's settings and dtype with the lowest bits per byte in short runs, and all that was tried.

    First the batch, then its own width (aspect_ratio 64), then float32, its default on a CPU. Its script
    scales its rates to the batch. The result is kept in a file beside the text.
    """
    sources = [(race.peer / name).read_text("utf-8") for name in ("scripts/base_train.py", "nanochat/gpt.py")]
    key = hashlib.sha256(json.dumps([sources, race.shape, race.minutes]).encode()).hexdigest()[:12]
    kept = race.text / f"peer-best-{key}.json"
    if kept.exists():
        print_line(f"the peer's best settings are in {kept}; remove it to look for them again", sys.stderr)
        return json.loads(kept.read_text("utf-8"))
    tried: list[dict] = []

    def attempt(settings: dict, dtype: str = "bfloat16"):
        settings = settings | {"total_batch_size": settings["device_batch_size"] * settings["max_seq_len"]}
        found = {"settings": settings, "dtype": dtype}
        lap, run = peer_lap(race, found, SEARCH * race.minutes, peer_trial(race, settings, dtype))
        tried.append(found | {"bpb": lap.bpb, "seconds": lap.seconds, "tok_per_sec": run.tok_per_sec})
        reached = f"{lap.bpb:.4f} bits per byte after {lap.seconds:.0f} s"
        print_line(f"the peer with {named(found)}: {reached}", sys.stderr)

    for rows in ROWS:
        attempt(race.shape | {"device_batch_size": rows})
    if race.shape["aspect_ratio"] != 64:
        attempt(best_of(tried)["settings"] | {"aspect_ratio": 64})
    attempt(best_of(tried)["settings"], "float32")
    found = best_of(tried) | {"tried": tried}
    kept.write_text(json.dumps(found, indent=1), "utf-8")
    return found


def best_of(tried: list[dict]) -> dict:
    """The one with the lowest bits per byte; a run that diverged has none."""
    return min(tried, key=lambda found: (math.isnan(found["bpb"]), found["bpb"]))


def named(best: dict) -> str:
    """Settings of the peer in words."""
    settings = best["settings"]
    shape = f"depth {settings['depth']}, aspect_ratio {settings['aspect_ratio']}"
    return f"{shape}, {settings['total_batch_size']} tokens a step, {best['dtype']}"


# ------------------------------------------------------------------------------------------------------
# Both


def run_rounds(race: Race, best: dict, rounds: int) -> dict[str, list[Lap]]:
    """The laps of each side. Ours begins in the first round, the peer in the second, and so on."""
    laps, before = {"ours": [], "peer": []}, peer_trial(race, best["settings"], best["dtype"])
    for number in range(rounds):
        for side in ("ours", "peer") if number % 2 == 0 else ("peer", "ours"):
            if side == "ours":
                lap = our_lap(race)
            else:
                lap, before = peer_lap(race, best, race.minutes, before)
            laps[side].append(lap)
            reached = f"{lap.bpb:.4f} bits per byte after {lap.tokens:,} tokens in {lap.seconds:.0f} s"
            print_line(f"round {number + 1}, {side}: {reached}", sys.stderr)
    return laps


def results(laps: dict[str, list[Lap]], best: dict) -> dict:
    """A row for each side, the ratio of the bits per byte in a round, and every run with its points."""
    rows = {}
    for side, of_side in laps.items():
        rows[side] = {
            "bpb": statistics.median(lap.bpb for lap in of_side),
            "seconds": statistics.median(lap.seconds for lap in of_side),
            "tokens": statistics.median(lap.tokens for lap in of_side),
            "peak_memory_gb": max(lap.peak_memory_bytes for lap in of_side) / 1e9,
        }
    rows["peer"]["settings"] = named(best)
    ratios = [mine.bpb / theirs.bpb for mine, theirs in zip(laps["ours"], laps["peer"], strict=True)]
    rows["ours_over_peer"] = {"median": statistics.median(ratios), "of_each_round": ratios}
    for side, of_side in laps.items():
        rows |= {f"{side}, round {i}": asdict(lap) for i, lap in enumerate(of_side, start=1)}
    return rows
