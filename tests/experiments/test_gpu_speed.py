"""`bench --what=gpu` goes on after a part that fails, and sorts the time of a step by kind of work."""

import json
import time
from pathlib import Path

import pytest
import torch

from experiments import gpu_parts, sides
from experiments.gpu_speed import Part, bench, run_parts
from nanochat import UserError
from nanochat.machine import runtime

CPU = {"device": "cpu", "small": True, "peer": None}


def program(name: str, code: str, limit_s: float = 30.0, **more) -> Part:
    """A stand-in for a part: a Python program without torch."""
    return Part(name, limit_s, ("-c", code), **more)


def run(*parts: Part, minutes: float = 1.0, job: dict = CPU) -> tuple[dict, list[dict]]:
    lines = []
    results = run_parts(list(parts), job, minutes, lambda line: lines.append(json.loads(line)))
    return results, lines


def test_a_part_that_raises_hangs_or_prints_nothing_does_not_stop_the_others(tmp_path):
    child = tmp_path / "child"
    hangs = (
        "import os, subprocess, time\n"
        f"p = subprocess.Popen(['sleep', '60']); open({str(child)!r}, 'w').write(str(p.pid))\n"
        "time.sleep(60)"
    )
    began = time.monotonic()
    results, lines = run(
        program("raises", "print('begun'); raise ValueError('no such kernel')"),
        program("hangs", hangs, limit_s=1.5),
        program("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        program("says nothing", "pass"),
        program("works", "import sys; print('noise'); print('{\"figure\": 2}')"),
        program("is wrong", 'print(\'{"ok": false, "found": 1}\')'),
    )
    assert time.monotonic() - began < 30
    assert [line["part"] for line in lines] == list(results)
    assert lines == [{"part": name} | row for name, row in results.items()]
    assert [row["ok"] for row in results.values()] == [False, False, False, False, True, False]
    assert "ValueError: no such kernel" in results["raises"]["last_lines"]
    assert results["hangs"]["error"] == "stopped after 1.5 s" and 1.5 <= results["hangs"]["seconds"] < 10
    assert results["dies"]["error"] == "exit status -11" and "error" in results["says nothing"]
    assert results["works"]["figure"] == 2 and results["is wrong"]["found"] == 1
    state = Path(f"/proc/{child.read_text()}/stat")  # what the part had started ended with it
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_what_is_missing_is_skipped_and_what_has_no_time_left_is_not_ok():
    results, _ = run(
        program("long", "import time; time.sleep(60)"),
        program("late", "print('{}')"),
        program("on a GPU", "raise SystemExit(1)", needs="cuda"),
        program("with the peer", "raise SystemExit(1)", needs="peer"),
        minutes=2 / 60,
    )
    assert not results["long"]["ok"] and results["long"]["error"].startswith("stopped after")
    assert results["late"] == {"ok": False, "seconds": 0.0, "error": "not run: no time is left"}
    assert results["on a GPU"]["ok"] and results["on a GPU"]["skipped"] == "needs CUDA"
    assert results["with the peer"]["ok"] and "--peer=FOLDER" in results["with the peer"]["skipped"]


def test_what_runs_beside_the_checks_has_ended_before_the_first_figure(tmp_path):
    note = f"open({str(tmp_path / 'notes')!r}, 'a').write"
    results, _ = run(
        program("beside", f"import time; time.sleep(0.5); {note}('beside '); print('{{}}')", kind="beside"),
        program("check", f"{note}('check '); print('{{}}')", kind="check"),
        program("figure", f"{note}('figure'); print('{{}}')"),
    )
    assert all(row["ok"] for row in results.values()) and list(results) == ["beside", "check", "figure"]
    assert (tmp_path / "notes").read_text() == "check beside figure"


def test_an_unknown_part_and_a_folder_that_is_not_the_peers_are_refused(tmp_path):
    settings = {"parts": "machine, speed_d13", "peer": None}
    with pytest.raises(UserError, match=r"no part is called speed_d13; .* speed_d12"):
        bench(settings)
    with pytest.raises(UserError, match="--peer is a folder of karpathy/nanochat"):
        bench(settings | {"parts": "", "peer": str(tmp_path)})


def test_a_model_is_planned_as_base_train_plans_it():
    """This also fails when the plan wants to know more of the text than the stand-in for it says."""
    step_job = gpu_parts.model_job(CPU, 12)
    machine = runtime.Machine(torch.device("cpu"))
    plan = sides.our_plan(step_job, machine, torch.float32)
    assert plan.total_batch_size == step_job["total_batch_size"] == 256 and plan.device_batch_size == 2
    assert (plan.config.depth, plan.config.width, plan.grad_accum_steps) == (2, 64, 2)


def test_rows_are_halved_until_they_fit_and_the_result_says_so():
    tried = []

    def fits_four(step_job: dict) -> dict:
        tried.append(step_job["rows"])
        if not 0 < step_job["rows"] <= 4:
            raise MemoryError("CUDA out of memory")
        return {"figure": step_job["rows"]}

    found = gpu_parts.halving({"rows": 16}, fits_four)
    assert found == {"figure": 4, "rows_halved_to": 4, "because": "CUDA out of memory"}
    assert tried == [16, 8, 4]
    assert gpu_parts.halving({"rows": 2}, fits_four) == {"figure": 2}
    with pytest.raises(MemoryError):
        gpu_parts.halving({"rows": 2}, lambda step_job: fits_four({"rows": 99}))


class Stand:
    """A side whose steps take known times; `said` is what both sides were asked, in order."""

    def __init__(self, name: str, step_s: list[float], said: list, **facts):
        self.name, self.step_s, self.said = name, iter(step_s), said
        self.facts = {"rows": 4, "micro_steps": 2, "parameters": 7e6, "flops_per_token": 1e9} | facts
        self.facts |= {"first_step_s": 9.0, "attention": "SDPA"}

    def do(self, order: str, count: int = 0) -> dict:
        self.said.append(f"{self.name} {order}")
        if count != 2:
            return {"step_s": 99.0}
        return {"step_s": next(self.step_s), "peak_bytes": 2 * 2**30, "reserved_bytes": 3 * 2**30}


def test_ours_and_the_peers_take_turns_and_the_ratio_is_that_of_neighbouring_turns():
    said: list = []
    ours = Stand("ours", [0.5, 0.8], said, peak_flops=1e13, expected_bytes=3 * 2**30)
    peer = Stand("peer", [0.6, 1.2], said)
    step_job = {"total_batch_size": 1000, "max_seq_len": 125, "depth": 12}
    found = gpu_parts.take_turns(step_job, ours, peer, rounds=2)
    in_turns = [f"{name} {do}" for name in ("ours", "peer") for do in ("steps", "steps", "release")]
    assert said == ["peer release", *in_turns, *in_turns]
    assert found["of_each_round"] == pytest.approx([1.2, 1.5])
    assert found["ours_over_peer"] == pytest.approx(1.35)
    assert found["ours"]["tok_per_sec"] == pytest.approx(1000 / 0.65)  # the median of 0.5 and 0.8 s
    assert found["ours"]["mfu"] == pytest.approx(1000 / 0.65 * 1e9 / 1e13)
    assert (found["ours"]["peak_gib"], found["ours"]["expected_over_peak"]) == (2, 1.5)
    assert found["peer"]["tok_per_sec"] == pytest.approx(1000 / 0.9) and "mfu" not in found["peer"]
