"""stdout and stderr: a reader who stops, goes away or never was keeps no script from its work."""

import errno
import io
import os
import re
import signal
import subprocess
from types import SimpleNamespace

import pytest
from helpers import python, wait_until

from nanochat import streams

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")

# A run in small: it prints step after step, and saves when a signal comes
RUN = """
import ctypes, sys
from nanochat import streams
from nanochat.machine.signals import StopSignal
streams.STALLED_S = streams.END_S = 0.2
stop = StopSignal()
print("x" * 200_000)
stop.set_up_done()
step = 0
while not stop.name:
    print(f"step {step}", flush=True)
    print(f"warning {step}", file=sys.stderr)
    if step % 100 == 0:
        ctypes.CDLL(None).write(2, b"a message of C++\\n", 17)
    step += 1
    if step == 5000:
        open(sys.argv[1] + ".trains", "w").close()
open(sys.argv[1], "w").write(stop.name)
"""


@pytest.fixture
def full_pipe():
    """The end of a pipe that takes nothing more: who reads it has stopped."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    while True:
        try:
            os.write(writes, b"full before the start\n" * 100)
        except BlockingIOError:
            break
    os.set_blocking(writes, True)
    yield writes
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_run_whose_reader_has_stopped_trains_saves_and_ends_at_a_signal(tmp_path, full_pipe, name, both):
    with open(tmp_path / "stderr", "w") as file:
        stderr = full_pipe if both else file
        with python(RUN, tmp_path / "saved", stdout=full_pipe, stderr=stderr) as child:
            wait_until((tmp_path / "saved.trains").exists, child)
            child.send_signal(getattr(signal, name))
            assert child.wait() == 0
    assert (tmp_path / "saved").read_text() == name
    assert both or f"{name}: finishing this step, then saving" in (tmp_path / "stderr").read_text()


NEVER_SAVES = """
import sys
from pathlib import Path
from nanochat import streams
from nanochat.machine.signals import StopSignal
streams.STALLED_S = 0.2
stop = StopSignal()
stop.set_up_done(lambda: "7 steps are lost")
Path(sys.argv[1], "trains").touch()
while True:
    print("step")
    if stop.name:
        Path(sys.argv[1], "asked").touch()
"""


def test_a_second_ctrl_c_ends_a_run_whose_reader_has_stopped(tmp_path, full_pipe):
    with python(NEVER_SAVES, tmp_path, stdout=full_pipe, stderr=full_pipe) as child:
        for file in ("trains", "asked"):
            wait_until((tmp_path / file).exists, child)
            child.send_signal(signal.SIGINT)
        assert child.wait() == 130


LATE = """
import sys
from nanochat import streams
streams.in_background()
if sys.argv[1] == "trains":
    streams.never_wait()
for n in range(100_000):
    print(f"line {n} of 100000")
print("read", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("moment", ["prepares", "trains"])
def test_a_late_reader_gets_every_line_or_of_a_run_that_trains_the_number_of_those_left_out(moment):
    with python(LATE, moment) as child:
        assert child.stderr.readline() == "read\n"  # all is printed, and nothing was read
        lines = child.stdout.read().splitlines()
        assert child.wait() == 0
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line")]
    left_out = [int(re.search(r"\d+", line)[0]) for line in lines if not line.startswith("line")]
    assert numbers == sorted(numbers) and len(numbers) + sum(left_out) == 100_000
    assert bool(left_out) == (moment == "trains")


def test_a_full_disk_costs_what_it_does_not_take_and_no_line_that_comes_later():
    class Disk(io.BytesIO):
        room = True

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    disk = Disk()
    output = streams.Output(SimpleNamespace(buffer=SimpleNamespace(raw=disk)))
    for line, disk.room in (b"one\n", True), (b"two\n", False), (b"three\n", True):
        output.write(line)
    assert disk.getvalue() == b"one\nthree\n"


CLOSED = """
import os, sys
for fd in map(int, sys.argv[1].split()):
    os.close(fd)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], sys.argv[3]])
"""
IN_A_FILE = """
import sys
from nanochat import streams
if "in_background" in sys.argv[1]:
    from nanochat.machine.signals import StopSignal
    StopSignal()
streams.secure()
with open(sys.argv[1], "w") as file:
    file.write("the run's")
    file.flush()
    for line in range(100):
        print("a line")
        print("a line", file=sys.stderr, flush=True)
    assert sys.stdin.read() == "" and not sys.stdout.isatty() and not sys.stderr.isatty()
    file.write(" file")
"""


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
@pytest.mark.parametrize("name", ["direct", "in_background"])
def test_closed_streams_stop_no_script_and_no_file_of_a_run_takes_their_place(tmp_path, closed, name):
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with python(CLOSED, closed, IN_A_FILE, tmp_path / name, **streams) as child:
        assert child.wait() == 0
    assert (tmp_path / name).read_text() == "the run's file"


@pytest.mark.parametrize("name", ["direct", "in_background"])
def test_a_script_whose_readers_have_gone_does_its_work(tmp_path, name):
    reads, writes = os.pipe()
    os.close(reads)
    streams = {"stdin": subprocess.DEVNULL, "stdout": writes, "stderr": writes}
    with python(IN_A_FILE, tmp_path / name, **streams) as child:
        os.close(writes)
        assert child.wait() == 0
    assert (tmp_path / name).read_text() == "the run's file"
