"""The watchdog ends a process whose peer has died or hangs, and no other.

nccl's waits are stood for by a main thread that sleeps. The fast tests run watchdogs of several ranks in this
process, with a real store and short rounds.
"""

import os
import signal
import subprocess
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import together
from watch import Watch

from nanochat.machine import watchdog

ROUND_S = 0.02


class Ring:
    """Processes that have met: `signs` are those of all ranks."""

    def __init__(self, signs: list[str]):
        second = timedelta(seconds=100)
        self.server = dist.TCPStore("127.0.0.1", 0, 1, True, second, wait_for_workers=False)
        self.signs, self.ends, self.dogs = signs, [], []
        for rank, sign in enumerate(signs):
            self.server.set(f"sign/{rank}", sign)
            self.server.set(f"beat/{rank}", "")
        self.server.set("verdict", "none")

    def client(self):
        return dist.TCPStore("127.0.0.1", self.server.port, 1, False, timedelta(seconds=100))

    def watch(self, rank: int, timeout_s=1e6):
        def end(*arguments):
            self.ends.append((rank, *arguments[:3]))

        dog = watchdog.Watchdog(rank, len(self.signs), timeout_s, self.client, False, end)
        self.dogs.append(dog)
        return dog

    def wait(self, ends: int, seconds=300.0):
        deadline = time.monotonic() + seconds
        while len(self.ends) < ends and time.monotonic() < deadline:
            time.sleep(ROUND_S)
        return sorted(self.ends)


@pytest.fixture
def ring(monkeypatch):
    monkeypatch.setattr(watchdog, "ROUND_S", ROUND_S)
    monkeypatch.setattr(watchdog, "_waits", [])
    made = []
    yield lambda signs: made.append(Ring(signs)) or made[-1]
    for dog in (dog for one in made for dog in one.dogs):
        dog.close()
    time.sleep(3 * ROUND_S)  # before the store is gone


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def sign_of(child) -> str:
    return f"{watchdog.sign().split()[0]} {child.pid}"


def test_a_neighbour_that_died_ends_all_and_one_that_only_pauses_ends_nobody(ring, child):
    me, processes = watchdog.sign(), ring([watchdog.sign(), sign_of(child), watchdog.sign(), watchdog.sign()])
    assert me.split()[1] == str(os.getpid())
    for rank in (0, 2, 3):  # 3 is no neighbour of 1: it learns of it from the store
        processes.watch(rank)
    child.send_signal(signal.SIGSTOP)
    assert processes.wait(1, seconds=60 * ROUND_S) == []  # no sign of life, but it is there
    child.kill()  # its parent has not asked for its status yet
    assert processes.wait(3) == [(rank, [1], False, False) for rank in (0, 2, 3)]


def test_a_neighbour_that_said_goodbye_may_end_and_one_that_failed_may_not(ring, child):
    processes = ring([watchdog.sign(), sign_of(child)])
    processes.watch(0)
    processes.server.set("beat/1", watchdog.GOODBYE)
    child.kill()
    child.wait()
    assert processes.wait(1, seconds=40 * ROUND_S) == []
    processes.server.set("beat/1", watchdog.FAILED)
    assert processes.wait(1) == [(0, [1], False, False)]


def test_a_neighbour_elsewhere_has_ended_when_it_is_silent_and_not_before(ring, monkeypatch):
    monkeypatch.setattr(watchdog, "SILENT_S", 30 * ROUND_S)
    processes = ring([watchdog.sign(), "elsewhere/1 7"])
    processes.watch(0)
    for count in range(60):
        processes.server.set("beat/1", str(count))
        time.sleep(ROUND_S)
    assert processes.ends == []
    assert processes.wait(1) == [(0, [1], False, False)]


def test_a_pause_of_this_process_counts_as_one_round(monkeypatch):
    """SIGSTOP, or a laptop that sleeps: the clock has moved on by an hour."""
    monkeypatch.setattr(watchdog, "time", watch := Watch())
    seconds, pauses = [], iter([1, 3600, 1, 0])

    class Closed:
        def wait(self, timeout):
            watch.now += (pause := next(pauses))
            return not pause

    dog = watchdog.Watchdog.__new__(watchdog.Watchdog)
    dog._closed, dog._found = Closed(), lambda passed: seconds.append(passed) or ""
    dog._judge()
    assert seconds == [1.0, 2.0, 1.0]


def test_a_wait_beyond_the_limit_names_who_hangs_and_work_without_a_wait_may_take_any_time(ring, monkeypatch):
    monkeypatch.setattr(watchdog, "LATER_S", 0.0)
    processes = ring([watchdog.sign(), watchdog.sign()])
    for rank in (0, 1):
        processes.watch(rank, timeout_s=20 * ROUND_S)
    with watchdog.waiting():
        pass
    assert processes.wait(1, seconds=50 * ROUND_S) == [] and not watchdog._waits
    with watchdog.waiting():
        assert [(hangs, waits) for _, _, hangs, waits in processes.wait(2)] == [(True, True)] * 2


def test_without_the_store_of_torchrun_a_run_goes_on_to_its_save(ring):
    """torchrun was killed: signals.StopSignal sees that, and the run has to save."""
    processes = ring([watchdog.sign(), watchdog.sign()])
    processes.watch(1)
    processes.server = None
    assert processes.wait(1, seconds=50 * ROUND_S) == []


def test_a_process_ends_though_the_machine_of_the_store_is_gone_and_no_request_is_answered(ring, monkeypatch):
    monkeypatch.setattr(watchdog, "CLOSE_S", 0.2)
    processes = ring([watchdog.sign(), watchdog.sign()])
    gone, asked, over = threading.Event(), threading.Event(), threading.Event()
    client = processes.client()

    class Unanswered:
        multi_get = client.multi_get

        def set(self, key, value):
            if gone.is_set():
                asked.set()
                over.wait(600)
            client.set(key, value)

    monkeypatch.setattr(processes, "client", Unanswered)
    dog = processes.watch(1)
    gone.set()
    assert asked.wait(300)
    closing = threading.Thread(target=dog.close, args=(watchdog.FAILED,), daemon=True)
    closing.start()
    closing.join(300)
    assert not closing.is_alive()
    over.set()


CHILD = """
import os, signal, sys, time
from nanochat.machine import runtime, watchdog

machine = runtime.start("cpu", seed=0, timeout_s=float(sys.argv[1]))
machine.all_sum([1.0])
fault, bad = sys.argv[2], int(sys.argv[3])
if machine.rank == bad and fault == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if machine.rank == bad and fault == "done":
    machine.exit()
if machine.rank != bad:
    watchdog.expect(lambda: False)  # a kernel of nccl that waits for the other process
for _ in range(4 if fault == "done" else 600):
    time.sleep(1)  # of the one that hangs
"""


@pytest.mark.slow
def test_real_processes_whose_peer_is_killed_or_hangs_end_with_a_sentence_that_names_it(tmp_path):
    code, ended = tmp_path / "child.py", "it has ended, and its own message says why"
    code.write_text(CHILD)
    runs = [("600", "kill", "0"), ("600", "kill", "1"), ("2", "hang", "1"), ("600", "done", "1")]
    started = [together([str(code), *run]) for run in runs]
    results = [([p.wait() for p in pair], [p.stderr for p in pair]) for pair in started]
    for bad, (statuses, printed) in enumerate(results[:2]):  # 0 holds the store
        assert statuses[bad] == -signal.SIGKILL and statuses[1 - bad] == 1, printed
        assert f"error: process {1 - bad}: no answer from process {bad}: {ended}" in printed[1 - bad]
    statuses, printed = results[2]
    assert statuses == [1, 1] and "no answer from process 1 for 2 s: it hangs" in printed[0], printed
    assert "of the one that hangs" in printed[1] and "the others have waited 2 s for this one" in printed[1]
    assert results[3][0] == [0, 0], results[3]
