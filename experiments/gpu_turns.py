"""Variants of gpu_variants.py take turns on a quiet GPU; what they say, within a limit of time.

All are started at once, as far as memory and cores allow. Each compiles on a CPU, makes its first steps when
no other computes, and waits. When a group is ready its variants take turns, while others compile: those that
are measured keep the others from the GPU (sides.GpuLock), and later groups have a higher `nice`.
"""

import json
import math
import os
import statistics
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from dataclasses import dataclass, field

from experiments import gpu_variants
from experiments.sides import GpuLock, Side
from nanochat.files import temporary_folder

ROUNDS, STEPS = 2, 4  # turns of each variant, and steps of a turn
PREPARE_S = {12: 75, 24: 125}  # expected seconds until a variant is ready, with cold caches (one H200)
TURNS_S = {12: 15, 24: 35}  # expected: all its turns
TRACED = {"d12": 0, "d24": 200}  # groups whose kernels are listed, and seconds that then must be left


class Report:
    """The results so far, {name: {"ok", "seconds", figures...}}, and the time that is left.

    `say` gets every figure as a line of JSON as soon as it is known. small: nothing takes long.
    """

    def __init__(self, minutes: float, say, clock=time.perf_counter, small: bool = False):
        self.say_line, self.clock, self.small, self.saying = say, clock, small, threading.Lock()
        self.deadline, self.results = clock() + 60 * minutes, {}

    def left(self) -> float:
        """Seconds."""
        return self.deadline - self.clock()

    def cannot_end(self, seconds: float) -> str:
        """Why something that takes so long is not started; empty if it is."""
        seconds = min(seconds, 0.5) if self.small else seconds
        if seconds < self.left():
            return ""
        return f"not run: it takes about {seconds:.0f} s, and {max(0, self.left()):.0f} s are left"

    def say(self, **figures):
        with self.saying:
            self.say_line(json.dumps(rounded(figures)))

    def take(self, name: str, result: dict):
        """The result of a part, which has ended."""
        self.results[name] = rounded(result)
        self.say(part=name, **result)


def rounded(value):
    """Floats to 4 digits; JSON has no infinity and no NaN, so these become words."""
    return json.loads(
        json.dumps(value),
        parse_float=lambda number: float(f"{float(number):.4g}"),
        parse_constant=lambda name: str(float(name)),
    )


@dataclass(eq=False)
class Runner:
    """A variant, its process, and what it has said."""

    group: str
    variant: dict
    nice: int
    future: Future | None = None  # of `side`; None: not started
    side: Side | None = None
    turns: list[dict] = field(default_factory=list)
    row: dict | None = None  # its figures, or "error" or "skipped"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be waited for."""
        return self.row is not None or (self.future is not None and self.future.done())

    def seconds(self, steps: int) -> float:
        """Expected for so many steps, the micro-step before them, and what is around."""
        return 1 + 1.2 * (steps + 0.3) * self.side.facts["step_s"]

    def fails(self, error: Exception):
        self.row = {"error": f"{type(error).__name__}: {error}"[:1000]}


class Turns:
    """The variants of a job, by group. `prepare` makes a Side that has made its first steps."""

    def __init__(self, report: Report, job: dict, pool, prepare=gpu_variants.prepare):
        self.report, self.job, self.pool, self.prepare = report, job, pool, prepare
        self.waiting: list[Runner] = []  # not started, in order
        self.live: list[Runner] = []  # they have memory
        self.splits: list[Future] = []  # of (group, variant's name, where its time goes)

    def run(self, groups: dict[str, list[dict]]):
        """Measure each group as soon as its variants are ready, in this order if several are."""
        todo = {
            name: [Runner(name, variant, min(19, 4 * number)) for variant in variants]
            for number, (name, variants) in enumerate(groups.items())
        }
        for runner in (runner for runners in todo.values() for runner in runners):
            if why := gpu_variants.missing(runner.variant, self.job):
                runner.row = {"skipped": why}
            else:
                self.waiting.append(runner)
        with temporary_folder() as place:
            self.place = place
            self.job = self.job | {"lock": str(self.place / "gpu")}
            self.lock = GpuLock(self.job["lock"])
            self.measure(todo)
            for split in as_completed(self.splits):
                name, who, found = split.result()
                self.report.results[name]["variants"][who]["time_split"] = rounded(found)
                self.report.say(part=name, variant=who, time_split=found)

    def measure(self, todo: dict[str, list[Runner]]):
        """Until no group is left."""
        while todo:
            self.start()
            ready = [name for name, runners in todo.items() if all(runner.is_over for runner in runners)]
            pending = [runner.future for runner in self.live if not runner.is_over]
            if pending and not ready:
                wait(pending, return_when=FIRST_COMPLETED)
                continue
            name = (ready or list(todo))[0]  # all that fit are ready, or the group is
            began = self.report.clock()
            self.take_turns([runner for runner in todo[name] if runner in self.live])
            if all(runner.row for runner in todo[name]):
                self.finish(name, todo.pop(name), self.report.clock() - began)

    def start(self):
        """Start, in order, those for which there is memory and time."""
        while self.waiting and self.fits(self.waiting[0]):
            runner = self.waiting.pop(0)
            depth = runner.variant["depth"]
            if why := self.report.cannot_end(PREPARE_S[depth] + TURNS_S[depth]):
                runner.row = {"error": why}
                continue
            limit_s = self.report.left() / 2  # one that hangs leaves time for those that wait for it
            runner.future = self.pool.submit(self.make_ready, runner, limit_s)
            self.live.append(runner)

    def make_ready(self, runner: Runner, limit_s: float):
        runner.side = self.prepare(runner.variant, self.job | {"nice": runner.nice}, limit_s)
        facts = {name: runner.side.facts[name] for name in ("first_step_s", "rows")}
        self.report.say(part=runner.group, variant=runner.variant["name"], ready=True, **facts)

    def fits(self, runner: Runner) -> bool:
        """Whether it can be prepared beside those that live: one of them computes, the others keep."""
        if not self.live:
            return True
        depths = [str(one.variant["depth"]) for one in (*self.live, runner)]
        sizes = [self.job["sizes"][depth] for depth in depths if self.job.get("sizes")]
        kept = sum(size["kept_gib"] for size in sizes)
        most = max((size["peak_gib"] - size["kept_gib"] for size in sizes), default=0)
        has_cores = len(self.live) < max(2, 3 * (os.cpu_count() or 1) // 4)  # for compilers
        return (has_cores or self.job["small"]) and kept + most <= (self.job.get("memory_gib") or math.inf)

    def take_turns(self, runners: list[Runner]):
        """Each makes some steps, ROUNDS times, and is profiled. Each gets its row, and ends."""
        for runner in runners:
            if error := runner.future.exception():
                runner.fails(error)
        for _ in range(ROUNDS):
            ready = [runner for runner in runners if not runner.row]
            with self.lock.held():
                if not self.report.cannot_end(sum(runner.seconds(STEPS) for runner in ready)):
                    for runner in ready:
                        self.turn(runner)
        ready = [runner for runner in runners if not runner.row]
        for runner in ready:
            runner.row = self.row_of(runner, ready[0])
        for runner in ready:
            self.trace(runner)
        for runner in runners:
            if runner.side:
                runner.side.__exit__()
            self.live.remove(runner)

    def turn(self, runner: Runner):
        try:
            turn = runner.side.do("steps", count=STEPS, warm_up=True, limit_s=max(0.1, self.report.left()))
            runner.side.do("release")
        except (RuntimeError, MemoryError) as error:
            runner.fails(error)
            return
        runner.turns.append(turn)
        said = {"part": runner.group, "variant": runner.variant["name"], "turn": len(runner.turns)}
        tokens, step_s = runner.side.job["total_batch_size"], turn["step_s"]
        self.report.say(**said, step_s=step_s, tok_per_sec=tokens / step_s)

    def row_of(self, runner: Runner, base: Runner) -> dict:
        """Its figures, its speed over that of the base in the same rounds, and over ours in bfloat16."""
        row = gpu_variants.figures(runner.side, runner.turns)
        if not runner.turns:
            row["error"] = "no time is left for its turns; these figures are of its second step"
        elif runner is not base and runner.variant["depth"] == base.variant["depth"]:
            pairs = zip(runner.turns, base.turns, strict=True)
            row["of_each_round"] = [of_base["step_s"] / turn["step_s"] for turn, of_base in pairs]
            row["over_base"] = statistics.median(row["of_each_round"])
        of_depth = self.report.results.get(f"d{runner.variant['depth']}", {}).get("variants", {})
        if ours := of_depth.get("ours", {}).get("tok_per_sec"):
            row["over_ours"] = row["tok_per_sec"] / ours
        return row

    def trace(self, runner: Runner):
        """Profile it, and find out in the background where the time of a step goes."""
        steps = 2 if runner.variant["depth"] < 20 else 1
        expected = 10 + 2 * runner.seconds(steps) + TRACED.get(runner.group, 0)
        if runner.group not in TRACED or self.report.cannot_end(expected):
            return
        side, who = runner.side, runner.variant["name"]
        path, folder = self.place / f"{runner.group}-{who}.json", self.job.get("folder")
        try:
            with self.lock.held():
                side.do("trace", path=str(path), count=steps, limit_s=max(0.1, self.report.left()))
        except (RuntimeError, MemoryError) as error:
            runner.row["time_split"] = {"error": f"{type(error).__name__}: {error}"[:1000]}
            return

        def split() -> tuple[str, str, dict]:
            head = side.facts["rows"] * side.job["max_seq_len"], side.job["vocab_size"]
            found = gpu_variants.split(path, steps, head, f"{who}-{runner.group}", folder)
            return runner.group, who, found

        self.splits.append(self.pool.submit(split))

    def finish(self, name: str, runners: list[Runner], seconds: float):
        """The result of a group."""
        rows = {runner.variant["name"]: runner.row for runner in runners}
        result = {"ok": not any("error" in row for row in rows.values()), "seconds": seconds}
        if all("skipped" in row for row in rows.values()):
            reasons = dict.fromkeys(row["skipped"] for row in rows.values())
            result["skipped"] = "; ".join(reasons) or "nothing to compare here"
        if "over_base" in (ours := rows.get("ours", {})):
            result["ours_over_peer"] = ours["over_base"]
        self.report.take(name, result | {"variants": rows})
