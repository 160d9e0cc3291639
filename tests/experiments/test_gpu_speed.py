"""`bench --what=gpu` prepares side by side, measures in turns, ends in time, and goes on after what fails."""

import contextlib
import json
import re
import threading

import filelock
import pytest
import torch
from helpers import assert_ended, python
from watch import Watch

from experiments import gpu_parts, gpu_variants, sides
from experiments.gpu_speed import PARTS, Part, bench, run_parts
from experiments.gpu_turns import Report, Turns
from nanochat import UserError
from nanochat.ops import tables

CPU = {"device": "cpu", "small": True, "peer": None}


def report(minutes: float = 1.0, **more) -> tuple[Report, list[dict]]:
    lines: list[dict] = []
    return Report(minutes, lambda line: lines.append(json.loads(line)), **more), lines


# ------------------------------------------------------------------------------------------------------
# Parts


@pytest.fixture
def pool():
    with sides.threads() as pool:
        yield pool


STAND_INS = """
import os, pathlib, signal, subprocess, time

def raises(job):
    print("begun")
    raise ValueError("no such kernel")

def hangs(job):
    time.sleep(600)

def dies(job):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGSEGV)

def has_no_memory(job):
    raise RuntimeError("CUDA out of memory")

def works(job):
    print("noise")
    return {"figure": 2}

def is_wrong(job):
    return {"ok": False, "found": 1}
"""


def test_a_part_that_raises_hangs_or_dies_ends_with_what_it_started_and_stops_no_other(
    tmp_path, monkeypatch, pool
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "stand_ins.py").write_text(STAND_INS)
    (tmp_path / "torch.py").write_text("Tensor = device = None")  # the stand-ins need no more of it
    names = re.findall(r"^def (\w+)", STAND_INS, re.MULTILINE)
    parts = [Part(name, f"stand_ins.{name}", 1 if name == "hangs" else 100) for name in names]
    parts.append(Part("on a GPU", "stand_ins.raises", 100, needs=("cuda", "json", "nocturnal")))
    found, lines = report(minutes=30)
    run_parts(found, parts, CPU, pool)
    results = found.results
    assert lines == [{"part": name} | row for name, row in results.items()]
    assert [row["ok"] for row in results.values()] == [False, False, False, False, True, False, True]
    assert "ValueError: no such kernel" in results["raises"]["error"]
    assert results["hangs"]["error"].endswith("stopped after 3 s") and results["hangs"]["seconds"] >= 3
    assert "ended" in results["dies"]["error"] and "out of memory" in results["has_no_memory"]["error"]
    assert_ended(int((tmp_path / "child").read_text()))
    assert results["works"]["figure"] == 2 and results["is_wrong"]["found"] == 1
    assert results["on a GPU"]["skipped"] == "needs cuda and nocturnal"


def test_checks_run_side_by_side_after_the_figures(pool):
    """Each check waits for the other one."""
    both, ran = threading.Barrier(2, timeout=60), []

    def run(part: Part, job: dict, limit_s: float) -> dict:
        if part.is_check:
            both.wait()
        ran.append(part.name)
        return {"ok": True, "seconds": 0.0}

    parts = [Part(name, "", 1, is_check=name != "figure") for name in ("a", "b", "figure")]
    found, lines = report(minutes=30)
    run_parts(found, parts, CPU, pool, run)
    assert ran[0] == lines[0]["part"] == "figure"
    assert set(ran[1:]) == {line["part"] for line in lines[1:]} == {"a", "b"}


def test_no_part_is_started_that_cannot_end_in_the_time_left(pool):
    clock, started = Watch(0.0), []

    def run(part: Part, job: dict, limit_s: float) -> dict:
        assert limit_s == 90 - clock.now
        started.append(part.name)
        clock.now += 40
        return {"ok": True, "seconds": 40}

    found, _ = report(minutes=1.5, clock=clock)
    parts = [Part(name, "", seconds) for name, seconds in {"a": 80, "b": 60, "c": 45}.items()]
    run_parts(found, parts, CPU | {"device": "cuda"}, pool, run)
    assert started == ["a", "c"]  # after a 50 s are left
    assert found.results["b"] == {
        "ok": False, "seconds": 0.0, "error": "not run: it takes about 60 s, and 50 s are left"
    }  # fmt: skip


def test_an_unknown_part_and_a_folder_that_is_not_the_peers_are_refused(tmp_path):
    settings = {"parts": "machine, d13", "peer": None}
    with pytest.raises(UserError, match=r"no part is called d13; .* d12"):
        bench(settings)
    with pytest.raises(UserError, match="--peer is a folder of karpathy/nanochat"):
        bench(settings | {"parts": "", "peer": str(tmp_path)})


# ------------------------------------------------------------------------------------------------------
# Variants


class Stand:
    """A side that is ready, whose steps take known times."""

    def __init__(self, name: str, clock: Watch, said: list, step_s: list[float], ready_at=0.0, **facts):
        self.name, self.clock, self.said, self.step_s = name, clock, said, iter(step_s)
        self.ready_at = ready_at
        self.facts = {"rows": 4, "micro_steps": 2, "parameters": 7e6, "flops_per_token": 1e9} | facts
        self.facts |= {"first_step_s": 9.0, "attention": "SDPA", "step_s": step_s[0], "peak_bytes": 0}
        self.job = {"total_batch_size": 1000, "max_seq_len": 125, "depth": 12, "vocab_size": 320}

    def do(self, order: str, count: int = 0, limit_s: float = 0, **more) -> dict:
        self.said.append(f"{self.name} {order}")
        self.clock.now = max(self.clock.now, self.ready_at)
        if order != "steps":
            self.clock.now += {"trace": 10}.get(order, 0)
            return {}
        step_s = next(self.step_s)
        if step_s < 0:
            raise MemoryError("CUDA out of memory")
        self.clock.now += count * step_s
        return {"step_s": step_s, "peak_bytes": 2 * 2**30, "reserved_bytes": 3 * 2**30}

    def __exit__(self, *exception):
        self.said.append(f"{self.name} ends")


def variant(name: str, side: str = "ours", depth: int = 12) -> dict:
    return {"name": name, "side": side, "depth": depth, "settings": {}}


def run(groups: dict[str, list[dict]], times: dict[str, list[float]], minutes: float = 10, **job):
    """Runs groups of stand-ins: (results, lines, what was asked of whom). One without times fails, and one
    that is not in `times` hangs: it answers when its limit is over, as Side.ask does."""
    clock, said = Watch(0.0), []
    found, lines = report(minutes, clock=clock)

    def prepare(variant: dict, job: dict, limit_s: float):
        if variant["name"] not in times:
            clock.now += limit_s
            raise RuntimeError(f"stopped after {limit_s:.3g} s")
        if not times[variant["name"]]:
            raise RuntimeError("no such kernel")
        facts = {"peak_flops": 1e13, "expected_bytes": 3 * 2**30} if variant["side"] == "ours" else {}
        return Stand(variant["name"], clock, said, times[variant["name"]], **facts)

    with sides.threads() as pool:
        turns = Turns(found, CPU | {"peer": "FOLDER"} | job, pool, prepare)
        turns.run(groups)
    assert not turns.place.exists()
    return found.results, lines, said


def test_variants_take_turns_and_the_ratio_is_that_of_neighbouring_turns():
    pair = [variant("peer", "peer"), variant("ours")]
    times = {"peer": [0.6, 1.2], "ours": [0.5, 0.8], "none": [2.0, 2.0], "loss": [1.0, 1.0]}
    groups = {"pair": pair, "levers": [variant("none"), variant("loss")]}
    results, lines, said = run(groups, times)
    in_turns = [f"{name} {do}" for name in ("peer", "ours") for do in ("steps", "release")]
    assert said[:10] == [*in_turns, *in_turns, "peer ends", "ours ends"]
    ours, peer = (results["pair"]["variants"][name] for name in ("ours", "peer"))
    assert ours["of_each_round"] == [1.2, 1.5] and results["pair"]["ours_over_peer"] == 1.35
    assert ours["tok_per_sec"] == pytest.approx(1000 / 0.65, rel=1e-3)  # the median of 0.5 and 0.8 s
    assert ours["mfu"] == pytest.approx(1000 / 0.65 * 1e9 / 1e13, rel=1e-3)
    assert (ours["peak_gib"], ours["expected_over_peak"]) == (2, 1.5)
    assert peer["tok_per_sec"] == pytest.approx(1000 / 0.9, rel=1e-3) and "mfu" not in peer
    assert results["levers"]["variants"]["loss"]["over_base"] == 2
    of_turns = [(line["variant"], line["turn"], line["step_s"]) for line in lines if "turn" in line]
    assert of_turns[:4] == [("peer", 1, 0.6), ("ours", 1, 0.5), ("peer", 2, 1.2), ("ours", 2, 0.8)]
    assert sum(line.get("ready", False) for line in lines) == 4


def test_a_variant_that_fails_stops_no_other():
    times = {"a": [], "b": [1.0, -1], "c": [1.0, 2.0], "d": [1.0, 1.0]}
    groups = {"one": [variant("a"), variant("b"), variant("c")], "two": [variant("d")]}
    results, _, said = run(groups, times)
    one = results["one"]["variants"]
    assert "no such kernel" in one["a"]["error"] and "out of memory" in one["b"]["error"]
    assert one["c"]["turns"] == 2 and results["two"]["ok"] and not results["one"]["ok"]
    assert {"b ends", "c ends", "d ends"} <= set(said)


def test_a_variant_that_hangs_leaves_time_for_the_one_that_waits_for_it():
    variants = [variant("hangs"), variant("works")]
    results, *_ = run({"a": variants}, {"works": [1.0, 1.0]}, minutes=4, small=False)
    rows = results["a"]["variants"]
    assert "stopped after 120 s" in rows["hangs"]["error"] and rows["works"]["turns"] == 2


def test_nothing_is_prepared_or_measured_for_which_the_time_does_not_suffice():
    """d24 is expected to take 160 s, d12 90 s; a turn of `slow` takes over 100 s."""
    times = {"small": [1.0, 1.0], "large": [1.0], "slow": [20.0, 20.0, 20.0]}
    groups = {"a": [variant("small")], "b": [variant("large", depth=24)], "c": [variant("slow")]}
    results, _, said = run(groups, times, minutes=2)
    assert results["a"]["variants"]["small"]["turns"] == 2
    assert results["b"]["variants"]["large"]["error"] == "not run: it takes about 160 s, and 120 s are left"
    slow = results["c"]["variants"]["slow"]
    assert slow["turns"] == 1 and slow["step_s"] == 20 and "large steps" not in said


def test_as_many_are_prepared_at_once_as_fit_into_the_memory_and_the_rest_after_them():
    size = {"12": {"rows": 4, "kept_gib": 4, "peak_gib": 34}}
    times = {name: [1.0, 1.0] for name in "abc"}
    groups = {"a": [variant("a"), variant("b")], "c": [variant("c")]}
    results, lines, said = run(groups, times, sizes=size, memory_gib=40)  # 4 + 34 of two; 4 + 4 + 34 of three
    assert [line["variant"] for line in lines if "ready" in line][2:] == ["c"]
    results, lines, said = run(groups, times, sizes=size, memory_gib=30)  # one at a time
    assert said == [f"{name} {do}" for name in "abc" for do in (*2 * ["steps", "release"], "ends")]
    assert all(row["ok"] for row in results.values())


def test_five_minutes_suffice_for_the_figures_of_a_machine_like_the_first(monkeypatch, pool):
    """One H200 and 16 cores: a d12 is ready after 70 s, a d24 after 115 s, with cold caches."""
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    clock, said = Watch(0.0), []
    found, _ = report(5, clock=clock)

    def run(part: Part, job: dict, limit_s: float) -> dict:
        clock.now += part.expected_s
        return {"ok": True, "seconds": part.expected_s}

    def prepare(variant: dict, job: dict, limit_s: float):
        step_s, ready_at = (1.05, 80) if variant["depth"] == 12 else (2.8, 125)
        return Stand(variant["name"], clock, said, [step_s, step_s], ready_at)

    job = {"device": "cuda", "small": False, "peer": "FOLDER"}
    groups = gpu_variants.groups(job)
    levers = [variant("none"), variant("loss"), variant("mlp")]
    run_parts(found, PARTS[:1], job, pool, run)
    Turns(found, job, pool, prepare).run(groups | {"levers": levers})
    run_parts(found, PARTS[1:], job, pool, run)
    rows = [row for group in groups for row in found.results[group]["variants"].values()]
    assert len(rows) == 11 and {row["turns"] for row in rows} == {2}
    assert found.results["save_evaluate_sample"]["ok"] and clock.now < 300
    assert "not run" in found.results["ceilings"]["error"] and said.count("ours trace") == 1


def test_what_is_missing_is_skipped():
    fp8 = variant("d12") | {"settings": {"fp8": True}}
    results, _, _ = run({"fp8": [fp8], "pair": [variant("peer", "peer")], "none": []}, {}, peer=None)
    assert all(row["ok"] for row in results.values()) and results["fp8"]["skipped"] == "needs cuda"
    assert "--peer=FOLDER" in results["pair"]["skipped"] and "skipped" in results["none"]


def test_rows_are_halved_until_they_fit_and_the_facts_say_so(monkeypatch):
    tried = []

    def prepared(whose, step_job: dict, folder, limit_s, said: dict):
        tried.append(step_job["rows"])
        if step_job["rows"] > fits:
            raise MemoryError("CUDA out of memory")
        return said

    monkeypatch.setattr(gpu_variants, "prepared", prepared)
    job, fits = CPU | {"small": False, "sizes": {"12": {"rows": 16}}}, 4
    said = gpu_variants.prepare(variant("ours"), job, 9)
    assert said == {"rows_halved_to": 4, "because": "CUDA out of memory"} and tried == [16, 8, 4]
    fits = 0
    with pytest.raises(MemoryError):
        gpu_variants.prepare(variant("ours"), job, 9)


def test_variants_of_ours_are_the_models_that_their_settings_ask_for_planned_as_base_train_plans_them():
    """This also fails when the plan wants to know more of the text than the stand-in for it says."""
    by_name = {one["name"]: one for one in gpu_variants.groups(CPU)["windows"]}
    for name, one in by_name.items():
        side = sides.Ours(gpu_parts.model_job(CPU, one["depth"], **one["settings"]))
        assert side.attention.window == name and min(side.plan.config.windows) < 64
        assert (side.plan.config.depth, side.plan.config.width) == (2, 64)
        assert (side.plan.total_batch_size, side.rows, side.micro_steps) == (256, 2, 2)
    with pytest.raises(RuntimeError, match=r"cannot run here: .*not varlen"):
        sides.Ours(gpu_parts.model_job(CPU, 12, window_pattern="SL", attention={"window": "varlen"}))


def test_gradients_of_tables_apart_are_so_in_every_micro_step(monkeypatch):
    added_to, apply = [], tables._Rows.apply
    monkeypatch.setattr(tables._Rows, "apply", lambda *args: (added_to.append(args[2]), apply(*args))[1])
    monkeypatch.setattr(tables, "dist", tables.dist)  # so that it is as before after this test
    (apart,) = [one for one in gpu_variants.groups(CPU)["levers"] if "apart" in one["name"]]
    side = sides.Ours(job := gpu_parts.model_job(CPU, apart["depth"], **apart["settings"]))
    side.step(sides.Batches(job, side.rows, side.micro_steps, side.device))
    assert side.micro_steps == 2 and added_to and not any(total is not None for total in added_to)


# ------------------------------------------------------------------------------------------------------
# Processes


def test_a_side_that_does_not_answer_is_ended():
    step_job = gpu_parts.model_job(CPU, 12)
    with pytest.raises(RuntimeError, match=r"stopped after 0\.2 s"):
        sides.Side("ours", step_job, limit_s=0.2)
    with pytest.raises(UserError, match=r"^this device cannot compute in no such"):
        sides.Side("ours", step_job | {"dtype": "no such"})
    assert not sides.Side.alive


def test_a_side_ends_with_the_process_that_started_it_even_in_the_midst_of_an_order():
    code = """
from experiments import gpu_parts, sides
job = gpu_parts.model_job({"device": "cpu", "small": True}, 12)
side = sides.Side("ours", job)
print(side.process.pid, flush=True)
side.do("steps", count=10**9)
"""
    with python(code) as process:
        side = int(process.stdout.readline())
        process.kill()
    assert_ended(side)


def test_one_at_a_time_has_the_gpu_while_it_computes_and_none_while_it_compiles(tmp_path):
    path, held = str(tmp_path / "gpu"), []
    lock, other = sides.GpuLock(path), sides.GpuLock(path)

    def is_free() -> bool:
        with contextlib.suppress(filelock.Timeout), other.file.acquire(timeout=0):
            return True
        return False

    def backend(graph, inputs):
        held.append(("compiles", is_free()))
        return lambda *args: (held.append(("computes", is_free())), graph(*args))[1]

    with lock.held_unless_compiling():
        for function in (torch.sin, torch.cos):
            torch.compile(lambda x, function=function: function(x), backend=backend)(torch.ones(1))
    assert held == 2 * [("compiles", True), ("computes", False)] and is_free()
    with lock.held():
        assert not is_free()
    assert is_free()


def test_the_kernels_of_a_profile_are_a_file_of_tables(tmp_path):
    trace = tmp_path / "trace.json"
    timed = {"ph": "X", "ts": 0, "dur": 4000, "tid": 1}
    mm = {"name": "aten::mm", "cat": "cpu_op", "args": {"Input Dims": [[8, 4], [4, 320]]}}
    events = [
        timed | {"name": "profiled steps", "cat": "user_annotation"},
        timed | mm | {"ts": 10, "dur": 100},
        timed | {"name": "launch", "cat": "cuda_runtime", "ts": 20, "dur": 1, "args": {"correlation": 1}},
        timed | {"name": "nvjet", "cat": "kernel", "ts": 900, "dur": 3000, "args": {"correlation": 1}},
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    found = gpu_variants.split(trace, 2, (8, 320), "ours-d12", str(tmp_path))
    assert found["ms"]["products of the head"] == 1.5 and not trace.exists()
    rows = (tmp_path / "step-ours-d12.md").read_text().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert ["products of the head", "1.5", "75.0%"] in cells
    assert ["`nvjet`", "products of the head", "1.50", "0.50"] in cells
    assert "error" in gpu_variants.split(trace, 2, (8, 320), "ours-d12", None)
