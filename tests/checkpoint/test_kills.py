"""Processes that are killed (SIGKILL) at any line of a save, a replacement or a deletion: a good checkpoint
is left, and no half of one.

Each scenario runs in a fresh process without threads, made by multiprocessing's fork server, which imports
torch once for all of them. The scenario forks the processes that are killed.
"""

import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from helpers import check, names_in, numbers, save_step

import nanochat.files
from nanochat.checkpoint import AsyncSaver, background, files, find, folder, lock_folder, prune, save_and_load

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
WATCHED = {module.__file__ for module in (save_and_load, background, folder, files, nanochat.files, shutil)}


@pytest.fixture
def memory():
    """A folder in memory, if this machine has one: kills work the same there, and syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def in_fresh_process():
    """Calls a function of this module in a fresh process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def call(function, *arguments):
        process = context.Process(target=one_thread, args=(function, *arguments))
        process.start()
        process.join()
        assert process.exitcode == 0  # its traceback is in the captured output

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the fork server does not take over sys.path
        yield call


def one_thread(function, *arguments):
    torch.set_num_threads(1)  # a fork has none of its parent's threads and would wait for them for ever
    function(*arguments)


def die_at(line):
    """Kill this process after that many lines of the modules that write checkpoints."""
    left = line

    def trace(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def fork(work, *arguments):
    if pid := os.fork():
        return pid
    try:
        work(*arguments)
    finally:
        os._exit(0)


def killed_at_each_line(place, stride, prepare, work, after):
    """Kill work(run) at its first line, then `stride` lines later, and so on until it ends by itself.

    after(run, killed) checks what is left, before and after the next run has locked the folder.
    """

    def die_working(run, line):
        die_at(line)
        work(run)

    line, killed = 0, True
    while killed:
        run = place / f"run{line}" / "run"
        prepare(run)
        status = os.waitpid(fork(die_working, run, line), 0)[1]
        killed = os.WIFSIGNALED(status)
        assert killed or os.WEXITSTATUS(status) == 0
        after(run, killed)
        lock_folder(run).close()
        after(run, killed)
        assert not [n for n in names_in(run) if n.startswith((".tmp", ".old"))], names_in(run)
        shutil.rmtree(run.parent)
        line += stride
    assert line > 30


def kill_saves(place, stride):
    def after(run, killed):
        found = find(run, say=None)
        check(found, 2 if not killed or found.step == 2 else 1)

    killed_at_each_line(place, stride, lambda run: save_step(run, 1), lambda run: save_step(run, 2), after)


def kill_replacements(place, stride):
    def replace(run):
        save_step(run, 1, state={"step": 1, "again": True})

    def after(run, killed):
        found = find(run, say=None)
        check(found, 1)
        assert killed or "again" in found.state

    killed_at_each_line(place, stride, lambda run: save_step(run, 1), replace, after)


def kill_deletions(place, stride):
    def prepare(run):
        for step in (1, 2, 3):
            save_step(run, step)

    def whole(run):
        for step in folder.checkpoints_in(run):
            check(find(run, step), step)
        return sorted(folder.checkpoints_in(run))

    def after_prune(run, killed):
        assert whole(run) in ([[1, 2, 3], [2, 3], [3]] if killed else [[3]])

    def after_set_aside(run, killed):
        kept, gone = whole(run), whole(run.parent / "run.old-1")
        assert kept + gone == [1, 2, 3] and (killed or not kept)

    killed_at_each_line(place, stride, prepare, lambda run: prune(run, 1), after_prune)
    killed_at_each_line(place, stride, prepare, lambda run: find(run, "never"), after_set_aside)


def kill_background_saves(place):
    run = place / "run"

    def train():
        lock_folder(run)
        step = found.step if (found := find(run)) else 0
        saver = AsyncSaver(run)
        while True:
            step += 1
            what = dict(model={"wte": numbers(step), "big": torch.zeros(1_000_000)}, state={"step": step})
            what["optimizer"] = {"wte.momentum": numbers(step + 1000)}
            saver.submit(step, **what, after_publish=lambda: prune(run, 2))

    reached, kills, draw = 0, 0, random.Random(0)
    while kills < 8 or (reached < 4 and kills < 50):
        kills += 1
        pid = fork(train)
        time.sleep(draw.uniform(0.02, 0.2) * (1 + kills / 8))  # a busy machine needs longer for a save
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if found := find(run, say=sys.exit):
            check(found, found.step)
            assert found.step >= reached
            reached = found.step
    lock_folder(run)
    assert reached > 3 and len(names_in(run)) <= 4, names_in(run)


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kill", [kill_saves, kill_replacements, kill_deletions])
def test_killed_at_any_line_a_good_checkpoint_stands_and_no_half_is_left(
    in_fresh_process, memory, kill, stride
):
    in_fresh_process(kill, memory, stride)


def test_killed_at_random_moments_of_background_saves_the_newest_one_is_good(in_fresh_process, memory):
    in_fresh_process(kill_background_saves, memory)
