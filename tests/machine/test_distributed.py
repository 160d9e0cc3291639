"""A run of several processes in which one differs, fails, dies or hangs: all end, and the log says why."""

import math
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import ROOT, Process, command, losses, records, together, wait_for_step, wait_until

from nanochat import UserError, checkpoint

# Runs the real script. When process 1 asks for the first batch of the step, the fault happens there.
FAULT = """
import os, runpy, signal, sys, time
from nanochat.data import loader as loader_module
import torch

fault, step = sys.argv.pop(1), int(sys.argv.pop(1))
if fault == "diverge":  # in every process
    backward = torch.Tensor.backward
    torch.Tensor.backward = lambda loss, *rest, **more: backward(loss * torch.inf, *rest, **more)
if os.environ["RANK"] == "1":
    calls, original = 0, loader_module.TrainLoader.__next__

    def faulty(loader):
        global calls
        batch = original(loader)
        calls += 1
        if calls == 4 * step + 1:  # a process has four micro-steps a step; this is the first one of `step`
            while fault in ("SIGKILL", "SIGSTOP") and not os.path.exists(FOLDER + "/step_000003"):
                time.sleep(0.02)  # the save of step 3 needs both processes; let it end first
            if fault == "refuse":
                from nanochat import explain_errors

                explain_errors(lambda error: f"{error.args[0]}; give others")
            if fault in ("refuse", "raise"):
                raise LookupError("the tokens of process 1 are gone")
            if fault.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, fault))
            if fault == "nan":
                from nanochat.gpt import GPT
                forward = GPT.forward

                def broken(*arguments, **options):
                    GPT.forward = forward
                    return forward(*arguments, **options) * torch.nan

                GPT.forward = broken
        return batch

    loader_module.TrainLoader.__next__ = faulty
    if fault.startswith("--"):
        sys.argv.append(fault)
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
"""


def faulty(tmp_path: Path, corpus: Path, fault: str, step: int, *more: str) -> list[str]:
    """A run of two processes of which the second has a fault at that step."""
    (tmp_path / "fault.py").write_text(FAULT.replace("FOLDER", repr(str(tmp_path / "run"))))
    arguments = command(corpus, tmp_path / "run", "--total_batch_size=512", *more)[1:]
    return [str(tmp_path / "fault.py"), fault, str(step), *arguments]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run_torchrun(*run) -> tuple[int, str]:
    """(exit status, what was printed) of a faulty run."""
    how = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    done = subprocess.run([*TORCHRUN, *faulty(*run)], cwd=ROOT, timeout=600, **how)
    return done.returncode, done.stdout + done.stderr


def run_plain(arguments: list[str], **how) -> tuple[list[int], list[str]]:
    """Processes without torchrun, as srun starts them; (exit statuses, what each of them wrote to stderr)."""
    started = together(list(map(str, arguments)), **how)
    return [process.wait() for process in started], [process.stderr for process in started]


def test_an_error_of_plain_processes_is_printed_once(tmp_path, corpus):
    statuses, printed = run_plain(command(corpus, tmp_path / "run", "--depth=0"))
    assert statuses == [2, 2], printed
    assert "".join(printed).count("error:") == 1 and "depth" in printed[0], printed
    assert "Traceback" not in "".join(printed)


@pytest.mark.slow
def test_plain_processes_that_diverge_say_so_once_and_one_that_fails_says_so_itself(tmp_path, corpus):
    statuses, printed = run_plain(faulty(tmp_path, corpus, "diverge", 0))
    assert statuses == [2, 2] and "".join(printed).count("error:") == 1, printed
    assert "three steps in a row were not finite" in printed[0]
    statuses, printed = run_plain(faulty(tmp_path, corpus, "refuse", 2))
    assert statuses == [1, 2] and "Traceback" not in "".join(printed), printed
    assert printed[1].count("error: process 1: the tokens of process 1 are gone; give others") == 1
    assert "process 0: no answer from process 1: it has ended" in printed[0]


JOIN = """
import configurator
from nanochat.machine import runtime
configurator.configure(globals())
runtime.start("cpu", seed=0, timeout_s=2)
"""


@pytest.mark.parametrize(
    ("rank", "said"),
    [(0, "process 1 of 2 did not come within 2 s"), (1, "cannot join the other processes at 127.0.0.1:")],
)
def test_a_process_that_waits_for_one_that_is_missing_ends_in_time_and_names_it(tmp_path, rank, said):
    (tmp_path / "join.py").write_text(JOIN)
    statuses, printed = run_plain([tmp_path / "join.py"], ranks=[rank], world_size=2)
    assert statuses == [2] and said in printed[0] and "Traceback" not in printed[0], printed


def test_a_port_where_another_program_listens_and_says_nothing_is_told_in_time(tmp_path):
    (tmp_path / "join.py").write_text(JOIN)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(mute.getsockname()[1])}
        script = Process([str(tmp_path / "join.py")], RANK="1", WORLD_SIZE="2", **place)
        assert script.wait() == 2 and "what listens there does not answer" in script.stderr, script.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two", "RANK": "1"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0"}, "RANK is 0, but WORLD_SIZE is 0"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "process 1: this process cannot join the others without"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}, "MASTER_PORT"),
    ],
)
def test_nonsense_in_the_variables_of_torchrun_is_a_sentence_whatever_the_rank(tmp_path, variables, said):
    (tmp_path / "join.py").write_text(JOIN)
    script = Process([str(tmp_path / "join.py")], **variables)
    assert script.wait() == 2 and said in script.stderr and "Traceback" not in script.stderr, script.stderr


def root_cause(printed: str) -> str:
    """torchrun's own report of the first failure."""
    return printed.split("Root Cause (first observed failure):")[1]


def test_an_exception_in_one_process_ends_all_and_torchrun_names_it_as_the_cause(tmp_path, corpus):
    status, printed = run_torchrun(tmp_path, corpus, "raise", 5)
    assert status == 1
    cause = root_cause(printed)
    assert "LookupError: the tokens of process 1 are gone" in cause and "rank      : 1" in cause
    assert sorted(losses(tmp_path / "run")) == list(range(5))
    assert checkpoint.find(tmp_path / "run", "auto").step == 3


@pytest.mark.slow
def test_an_error_of_all_processes_is_printed_once_and_stands_in_the_report_of_torchrun(tmp_path, corpus):
    status, printed = run_torchrun(tmp_path, corpus, "nothing", 0, "--total_batch_size=100")
    assert status == 1 and printed.count("total_batch_size 100 is not a multiple") == 1 + 1  # torchrun's too


@pytest.mark.slow
def test_a_killed_process_ends_all_and_the_other_says_which_one_is_gone(tmp_path, corpus):
    status, printed = run_torchrun(tmp_path, corpus, "SIGKILL", 5)
    assert status == 1
    cause = root_cause(printed)
    assert "rank      : 1" in cause and "SIGKILL" in cause
    assert "process 0: no answer from process 1: it has ended" in printed
    assert checkpoint.find(tmp_path / "run", "auto").step == 3


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP here")
def test_a_process_that_hangs_ends_all_after_process_timeout_and_is_named(tmp_path, corpus):
    first, second = together(faulty(tmp_path, corpus, "SIGSTOP", 5, "--process_timeout=5"))
    try:
        assert first.wait() == 1
    finally:
        second.kill()
    assert "process 0: no answer from process 1 for 5 s: it hangs" in first.stderr
    assert checkpoint.find(tmp_path / "run", "auto").step == 3


@pytest.mark.slow
def test_a_step_that_is_not_finite_in_one_process_is_skipped_by_all(tmp_path, corpus):
    statuses, printed = run_plain(faulty(tmp_path, corpus, "nan", 2))
    assert statuses == [0, 0], printed
    steps = [record for record in records(tmp_path / "run") if "loss" in record]
    assert [record["skipped"] for record in steps] == [0, 0, *[1] * 6]
    assert all(math.isfinite(record["loss"]) for record in steps[3:])


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step_and_the_run_goes_on(tmp_path, corpus):
    started = together(faulty(tmp_path, corpus, "SIGTERM", 3))
    assert [process.wait() for process in started] == [0, 0]
    assert "stopped by" in "".join(process.stdout for process in started)
    assert sorted(losses(tmp_path / "run")) == list(range(4))
    assert checkpoint.find(tmp_path / "run", "auto").step == 4
    statuses, _ = run_plain(faulty(tmp_path, corpus, "nothing", 0))
    assert statuses == [0, 0] and sorted(losses(tmp_path / "run")) == list(range(8))


def test_processes_with_different_settings_are_refused_by_name(tmp_path, corpus):
    statuses, printed = run_plain(faulty(tmp_path, corpus, "--keep_checkpoints=3", 0))
    assert statuses == [2, 2] and "process 1 has keep_checkpoints 3, process 0 has 2" in "".join(printed)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_processes_whose_torchrun_was_killed_save_and_end(tmp_path, corpus):
    out = tmp_path / "run"
    arguments = command(corpus, out, "--num_iterations=100000", "--save_every=-1")
    torchrun = subprocess.Popen([*TORCHRUN, "-m", *arguments], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for_step(torchrun, out, 2)
    torchrun.kill()
    torchrun.wait()
    wait_until(lambda: list(out.glob("step_*")))
    assert 2 < checkpoint.find(out, "auto").step < 100000

    def is_free():  # because the processes have ended
        with suppress(UserError):
            checkpoint.lock_folder(out).close()
            return True

    wait_until(is_free)
