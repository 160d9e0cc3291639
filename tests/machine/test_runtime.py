"""The machine: device, memory and peak FLOP/s, signals, and the exchanges between two processes."""

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, python, run_stages
from watch import Watch

from nanochat import UserError
from nanochat.machine import hardware, memory, runtime

CPU = torch.device("cpu")


# -- Device and seed


def test_auto_takes_cuda_before_mps_before_cpu_and_a_device_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "mps", "tpu"):
        with pytest.raises(UserError, match=f"device_type {name} is not available here; .*cpu"):
            runtime.start(name, seed=0)
    assert runtime.start("auto", seed=0).device == CPU
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert runtime.start("auto", seed=0).device.type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert runtime._choose_device("auto", local_rank=1) == torch.device("cuda", 1)
    with pytest.raises(UserError, match="3 processes on this machine but it has 2 GPUs; lower"):
        runtime._choose_device("auto", local_rank=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match="4 processes on this machine but it has 2 GPUs; lower"):
        runtime.start("auto", seed=0)


def test_memory_is_counted_in_bytes_and_shared_among_processes():
    alone, four = runtime.Machine(CPU), runtime.Machine(CPU, world_size=4)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**24 < alone.free_memory() <= physical
    assert four.free_memory() == pytest.approx(alone.free_memory() / 4, rel=0.2)
    block = torch.ones(2**26)  # 256 MiB, touched
    assert block.nbytes < memory.peak(CPU) < physical


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory as Linux tells it")
def test_free_memory_is_what_ulimit_leaves_to_the_process(monkeypatch):
    import resource

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (taken + 2**26, resource.RLIM_INFINITY))
    assert 2**25 < runtime.Machine(CPU).free_memory() < 2**27
    assert runtime.Machine(CPU, world_size=4).free_memory() > 2**25  # each process has a limit of its own
    monkeypatch.setattr(resource, "getrlimit", lambda what: (taken // 2, resource.RLIM_INFINITY))
    assert runtime.Machine(CPU).free_memory() == 0


def test_free_memory_is_within_the_limits_of_its_groups_and_their_file_cache_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "Path", lambda path: Path(f"{tmp_path}/{path}"))
    proc, groups = tmp_path / "proc", tmp_path / "sys" / "fs" / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable:  8000 kB\n")
    assert runtime.Machine(CPU).free_memory() == 8000 * 1024
    for folder, limit in ((groups, "max"), (groups / "slurm", "4000000"), (groups / "slurm" / "7", "max")):
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("3000000\n")
        (folder / "memory.stat").write_text("anon 1\nactive_file 5\ninactive_file 500000\nslab 3\n")
    assert runtime.Machine(CPU).free_memory() == 8000 * 1024
    (proc / "self" / "cgroup").write_text("1:name=systemd:/a\n0::/slurm/7\n")
    assert runtime.Machine(CPU).free_memory() == 1_500_000
    (proc / "self" / "cgroup").write_text("0::/\n")  # what a container sees
    (groups / "memory.max").write_text("4000001\n")
    assert runtime.Machine(CPU).free_memory() == 1_500_001


# -- Two processes

TWO = """
import time
from pathlib import Path
from nanochat.machine import runtime

def main(folder):
    machine = runtime.start("cpu", seed=0)
    assert machine.world_size == 2
    assert machine.all_sum([machine.rank + 0.5, 2.0**40 + machine.rank]) == [2.0, 2.0**41 + 1]
    values = [{"rank": rank, "text": "x" * (10 + rank)} for rank in range(2)]
    assert machine.all_gather(values[machine.rank]) == values
    machine.print(f"said by process {machine.rank}")
    for turn in range(2):
        with machine.main_first(f"turn{turn}"):
            built = Path(folder, f"built{turn}")
            if machine.is_main:
                time.sleep(0.3)
                built.touch()
            assert built.exists(), "the second process did not wait"
    machine.close()
"""


def test_two_processes_sum_gather_and_wait_for_the_first(tmp_path):
    (printed,) = run_stages(TWO, tmp_path, (2, str(tmp_path)))
    assert "said by process 0" in printed and "said by process 1" not in printed


@pytest.mark.parametrize(
    ("first", "second", "said"), [({"b": 2}, {}, "unknown, process 0 has 2"), ({}, {"b": 2}, "2, .* unknown")]
)
def test_processes_with_code_of_different_versions_are_told_the_difference(first, second, said, monkeypatch):
    monkeypatch.setattr(runtime.Machine, "all_gather", lambda self, what: [what, second])
    with pytest.raises(UserError, match=f"process 1 has b {said}; give every process the same"):
        runtime.Machine(CPU, world_size=2).check_same(first)


def test_a_signal_while_another_process_prepares_the_data_ends_with_0(capsys):
    machine = runtime.Machine(CPU, 1, 1, 2, store=SimpleNamespace(check=lambda keys: False))
    with pytest.raises(SystemExit) as end, machine.main_first("data", SimpleNamespace(name="SIGTERM")):
        pass
    assert end.value.code == 0 and "stopped by SIGTERM while another" in capsys.readouterr().err


def test_what_is_printed_obeys_no_model_and_no_file(capsys):
    runtime.Machine(CPU).print("a \x1b]0;title\x07", "\x9b2J\n\tb")
    assert capsys.readouterr().out == "a \\x1b]0;title\\x07 \\x9b2J\n\tb\n"


# -- Signals

WAITER = """
import os, signal, sys, time
from nanochat.machine.signals import StopSignal
if sys.argv[1:] == ["nohup"]:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
stop = StopSignal()
stop.set_up_done(lambda: "7 steps are lost")
print("ready", flush=True)
seen = ""
while True:
    if stop.name != seen:
        seen = stop.name
        print(seen, flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("nohup", [[], ["nohup"]], ids=["", "nohup"])
def test_signals_are_remembered_and_a_second_sigint_stops_at_once(nohup):
    with python(WAITER, *nohup) as child:
        assert child.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGINT):
            child.send_signal(number)
            if number != signal.SIGHUP or not nohup:  # a run under nohup goes on
                assert child.stdout.readline().strip() == number.name
        child.send_signal(signal.SIGTERM)  # a scheduler's second signal is not a second Ctrl-C
        assert child.stdout.readline() == "SIGTERM\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "SIGINT\n"
        child.send_signal(signal.SIGINT)
        assert child.wait() == 130
        assert child.stderr.read().endswith("stopped at once: 7 steps are lost\n")


IN_SET_UP = """
import hashlib, sys, time
from nanochat.machine.signals import StopSignal
stop = StopSignal()
print("ready", flush=True)
if sys.argv[1] == "C":  # one call of C code that lasts for minutes
    hashlib.pbkdf2_hmac("sha512", b"a", b"b", 500_000_000)
time.sleep(100)
"""


@pytest.mark.parametrize("name, where", [("SIGTERM", "C"), ("SIGINT", "C"), ("SIGHUP", "Python")])
def test_a_signal_before_the_first_step_ends_the_process(name, where):
    with python(IN_SET_UP, where) as child:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.3)
        child.send_signal(getattr(signal, name))
        assert child.wait() == 0  # the call in C takes longer
        assert f"stopped by {name} before the first step" in child.stderr.read()


IN_A_TERMINAL = """
import fcntl, sys, termios, time
from pathlib import Path
fcntl.ioctl(1, termios.TIOCSCTTY, 0)  # the terminal's SIGHUP comes to this process
from nanochat.machine.signals import StopSignal
stop = StopSignal()
stop.set_up_done()
while not stop.name:
    print("step", flush=True)
    time.sleep(0.01)
print("saving", flush=True)
print("saving", file=sys.stderr, flush=True)
Path(sys.argv[1]).write_text(stop.name)
"""


def test_a_terminal_that_closes_does_not_keep_a_run_from_saving(tmp_path):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with python(IN_A_TERMINAL, tmp_path / "saved", start_new_session=True, **streams) as child:
        os.close(theirs)
        assert b"step" in os.read(ours, 1000)
        os.close(ours)  # the window is closed
        assert child.wait() == 0
        assert (tmp_path / "saved").read_text() == "SIGHUP"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA RTX A4000", None),  # its name only resembles a known one, as those of the next
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
    ],
)
def test_the_peak_is_the_data_sheets_for_a_known_gpu_in_16_bits_and_else_measured(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(hardware, "measured_flops", lambda device, dtype: (1e12, "measured"))
    peak, source = hardware.peak_flops(torch.device("cuda", 0), torch.bfloat16)
    assert (peak == tflops * 1e12 and "data sheet" in source) if tflops else source == "measured"
    assert hardware.peak_flops(torch.device("cuda", 0), torch.float32) == (1e12, "measured")


# -- Speed


def test_free_memory_is_read_before_a_measurement_of_the_peak_takes_some(monkeypatch):
    free = {"bytes": 300}

    def measure(device, dtype):
        free["bytes"] = 200  # torch keeps the memory of the matrices
        return 1e12, "measured"

    monkeypatch.setattr(memory, "free", lambda device, processes: free["bytes"])
    monkeypatch.setattr(hardware, "peak_flops", measure)
    assert hardware.survey(runtime.Machine(CPU), torch.float32).memory == 300


def test_a_peak_is_measured_in_floating_point_operations_a_second(monkeypatch):
    monkeypatch.setattr(hardware, "time", Watch(tick=0.25))
    peak, source = hardware.peak_flops(CPU, torch.float32)
    assert "measured" in source and "float32" in source and peak == 4 * 2 * 1024**3


@pytest.mark.parametrize(
    ("capability", "own", "expected"), [("AVX512", None, "1"), ("AVX512", "0", "0"), ("AVX2", None, None)]
)
def test_the_compiler_is_told_what_vectors_there_are_unless_the_user_says_it(
    capability, own, expected, monkeypatch
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    name = "TORCHINDUCTOR_VEC_ISA_OK"
    monkeypatch.setenv(name, own or "")  # so that it is as before when the test has ended
    if own is None:
        monkeypatch.delenv(name)
    runtime.start("cpu", seed=0).close()
    assert os.environ.get(name) == expected


# -- Names


def git(folder, *words):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_commit_is_the_projects_own_with_a_plus_if_files_differ_from_it(tmp_path, monkeypatch):
    (project := tmp_path / "project").mkdir()
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "of another repository, above the project")
    assert runtime.git_commit(project) is None
    (project / ".git").mkdir()  # damaged
    assert runtime.git_commit(project) is None
    git(project, "init")
    (project / "a.txt").write_text("1")
    git(project, "add", "a.txt")
    git(project, "commit", "-m", "a")
    commit = git(project, "rev-parse", "HEAD")
    assert runtime.git_commit(project) == commit
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))  # as in a hook of another repository
    assert runtime.git_commit(project) == commit
    monkeypatch.delenv("GIT_DIR")
    (project / "a.txt").write_text("2")
    assert runtime.git_commit(project) == commit + "+"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back when asked")
def test_memory_that_was_freed_goes_back_to_the_system():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [b"x" * 100_000 for _ in range(800)]
    full = resident()
    del blocks[:-1]  # the last one keeps the heap from ending below the others
    memory.give_back()
    assert full - resident() > 60_000_000


FAULTS = """
import resource, sys, torch
from nanochat.machine import memory
if sys.argv[1] == "True":
    memory.keep_what_is_freed()
counts = []
for _ in range(20):  # at first a piece is not found again: an aligned one needs a larger gap
    torch.zeros(2**24)  # 64 MiB, freed at once
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(counts[-1] - counts[-5])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_memory_that_is_kept_is_not_asked_of_the_system_again():
    """Counted in pages, in processes of their own: it holds to the end of a process."""
    command = [sys.executable, "-c", FAULTS]
    given_back, kept = (int(subprocess.check_output([*command, k], cwd=ROOT)) for k in ("False", "True"))
    assert kept < given_back / 10


def test_the_sources_that_decide_a_run_are_told_also_under_a_profiler_and_while_one_is_edited(tmp_path):
    found = runtime.sources(ROOT, ROOT / "scripts" / "base_train.py")
    assert {"nanochat/gpt.py", "nanochat/ops/loss.py", "base_train.py"} <= found.keys()
    assert not any(name.startswith("nanochat/run/") for name in found)
    assert runtime.sources(ROOT, Path("scripts.base_train")).keys() == found.keys() - {"base_train.py"}
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "gpt.py").touch()
    (tmp_path / "nanochat" / ".#gpt.py").symlink_to("person@machine.7")  # Emacs's lock
    assert runtime.sources(tmp_path, Path("base_train")).keys() == {"nanochat/gpt.py"}
