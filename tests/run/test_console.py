"""The console's lines in a log file and on a terminal, and the time that is left."""

import io
import math
import os
import sys

import pytest
from run.test_clock import make_plan

from nanochat.run.clock import Clock
from nanochat.run.console import Console, TimeLeft
from nanochat.run.metrics import LoopState


class Screen(io.StringIO):
    """A terminal; `lines` is what a person sees on it at last."""

    def isatty(self):
        return True

    def fileno(self):
        return 2

    @property
    def lines(self):
        lines, column = [""], 0
        for character in self.getvalue():
            if character == "\n":
                lines.append("")
            column = 0 if character in "\r\n" else column
            if character not in "\r\n":
                assert character.isprintable(), f"a terminal would obey {character!a}"
                lines[-1] = lines[-1][:column] + character + lines[-1][column + 1 :]
                column += 1
        return [line.rstrip() for line in lines if line.strip()]


def open_screen(monkeypatch, columns=120, streams=("stdout", "stderr")) -> Screen:
    """From now on the test prints to this terminal. A fixture could not do it: pytest sets the streams again
    before a test."""
    screen = Screen()
    for stream in streams:
        monkeypatch.setattr(sys, stream, screen)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((columns, 30)))
    monkeypatch.setenv("TERM", "xterm")
    return screen


def open_console(first_step: int, num_iterations: int, enabled=True, **remembered) -> Console:
    plan = make_plan(num_iterations=num_iterations, total_batch_size=1000)
    loop = LoopState(**remembered)
    return Console(first_step, enabled, loop, Clock(plan, loop, None, first_step), bytes_per_token=4.0)


def make(console: Console, clock, step: int, loss=3.0, seconds=0.25):
    """Let a step pass, and tell the console of it."""
    clock.now += seconds
    console.step(
        {
            "step": step,
            "loss": loss,
            "lr_multiplier": 1.0,
            "step_time_s": seconds,
            "tok_per_sec": 1000 / seconds,
            "mfu": 0.1 / seconds,
            **console.loop.add_step(loss, 1000, seconds, math.isfinite(loss)),
        }
    )


def steps_of(lines: list[str]) -> list[int]:
    return [int(line.split("/")[0].removeprefix("step ")) for line in lines]


# -- A log file


@pytest.mark.parametrize("end", [105, 1000])  # finished, or stopped
def test_a_log_has_the_first_twelve_steps_then_a_line_every_five_seconds_and_the_last(capsys, clock, end):
    console = open_console(5, end)
    for step in range(5, 105):
        make(console, clock, step)
    console.close()
    # at four steps a second every twentieth step
    assert steps_of(capsys.readouterr().out.splitlines()) == [*range(6, 18), 37, 57, 77, 97, 105]


def test_a_line_has_the_numbers_of_the_steps_since_the_line_before(capsys, clock):
    console = open_console(0, 1000, val_bpb=1.25)
    for step in range(12):
        make(console, clock, step)
    for step, seconds in enumerate([0.5, 1.5, 1.0, 2.0], start=12):
        make(console, clock, step, loss=2.0, seconds=seconds)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("step 16/1000 | ") and ", val 1.2500 | " in line and " left | " in line
    # 4 steps of 1,000 tokens in 5 seconds; the FLOPs of a step are 10 % of a second's peak
    assert "800 tok/s | mfu 8.0 % | lr x1.00 | 1250 ms" in line
    weights = [0.9 ** (15 - n) for n in range(16)]
    mean = sum(w * (3.0 if n < 12 else 2.0) for n, w in enumerate(weights)) / sum(weights)
    assert f"loss {mean:.4f}" in line and f" | bpb train {mean / math.log(2) / 4:.3f}, val" in line


def test_evaluations_and_steps_that_are_not_finite_always_have_a_line(capsys, clock):
    console = open_console(0, 1000)
    for step in range(20):
        make(console, clock, step, loss=math.nan if step == 15 else 4.0)
        if step == 13:
            console.print("evaluated", "a sample\nof two lines")
    lines = capsys.readouterr().out.splitlines()[12:]
    assert lines[:3] == ["evaluated", "a sample", "of two lines"] and len(lines) == 4
    assert lines[3].startswith("step 16/1000 | loss nan") and lines[3].endswith("1 skipped")


def test_processes_other_than_the_first_print_nothing(capsys, clock):
    console = open_console(0, 3, enabled=False)
    make(console, clock, 0)
    console.print("hello")
    with console.bar("evaluating", "batches", 10) as bar:
        clock.now += 100
        bar.update(10)
    console.close()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


# -- A terminal


def test_on_a_terminal_one_line_is_redrawn_and_printed_lines_stand_above_it(clock, monkeypatch):
    screen = open_screen(monkeypatch)
    console = open_console(0, 50, val_bpb=1.5)
    for step in range(49):
        make(console, clock, step)
        if step == 20:
            console.print("step 20: evaluated")
    *printed, live = screen.lines
    assert printed == ["step 20: evaluated"]
    assert (
        live == "step 49/50 | loss 3.0000 | 2 s left | bpb train 1.082, val 1.5000 | 4,000 tok/s | mfu 40.0 %"
        " | lr x1.00 | 250 ms"
    )
    make(console, clock, 49)
    console.close()
    assert [line.split(" | ")[0] for line in screen.lines] == ["step 20: evaluated", "step 50/50"]


def test_fast_steps_are_drawn_ten_times_a_second(clock, monkeypatch):
    screen = open_screen(monkeypatch)
    console = open_console(0, 10_000)
    for step in range(1000):
        make(console, clock, step, seconds=0.001)
    assert 8 <= screen.getvalue().count("| loss") <= 11
    console.close()  # a stopped run leaves its last step on the terminal
    assert steps_of(screen.lines) == [1000]


def test_a_bar_takes_the_place_of_the_live_line_and_goes_away(clock, monkeypatch):
    screen = open_screen(monkeypatch)
    console = open_console(0, 50)
    make(console, clock, 0)
    with console.bar("evaluating", "batches", 4) as bar:
        bar.update(1)
        console.print("warning: a disk is slow")  # as the thread that saves may say meanwhile
        bar.update(1)
        bar.refresh()
        assert screen.lines[0] == "warning: a disk is slow" and len(screen.lines) == 2
        assert screen.lines[1].startswith("evaluating:  50%")
    assert screen.lines == ["warning: a disk is slow"]
    make(console, clock, 1)
    assert [line.split(" | ")[0] for line in screen.lines] == ["warning: a disk is slow", "step 2/50"]


def test_a_narrow_terminal_shows_the_most_important_numbers(clock, monkeypatch):
    screen = open_screen(monkeypatch, columns=40)
    console = open_console(0, 5000, val_bpb=1.5)
    for step in range(200):
        make(console, clock, step)
    assert screen.lines == ["step 200/5000 | loss 3.0000"]  # "20 min left" would need two more columns
    with console.bar("evaluating", "batches", 100) as bar:
        bar.refresh()
        assert "evaluating" in screen.lines[-1] and all(len(line) <= 40 for line in screen.lines)


def test_samples_cannot_give_orders_to_the_terminal(clock, monkeypatch):
    screen = open_screen(monkeypatch)
    console = open_console(0, 5)
    console.print("a\x1b[2Jb\rc\x9bd\te")
    assert screen.getvalue() == "a\\x1b[2Jb\\x0dc\\x9bd\te\n"


@pytest.mark.parametrize("where", ["stdout", "stderr", "TERM"])
def test_without_a_terminal_on_both_streams_nothing_is_redrawn(clock, monkeypatch, where):
    screen = open_screen(monkeypatch)
    file = io.StringIO()  # as in `... | tee log`, where the pipe's lines would meet the live line
    if where == "TERM":
        monkeypatch.setenv("TERM", "dumb")
    else:
        monkeypatch.setattr(sys, where, file)
    console = open_console(0, 50)
    make(console, clock, 0)
    console.bar("evaluating", "batches", 5).update(5)
    assert "\r" not in screen.getvalue() + file.getvalue()


# -- The time that is left


def time_left(*seconds: float, pauses: dict[int, float] | None = None) -> TimeLeft:
    """After steps that took so many seconds. pauses: {step: seconds before it}."""
    left, now = TimeLeft(), 0.0
    for step, each in enumerate(seconds):
        now += (pauses or {}).get(step, 0.0) + each
        left.add(each, now)
    return left


def test_the_time_left_counts_the_evaluations_to_come():
    for steps in (101, 150, 199, 201, 400):
        pauses = dict.fromkeys(range(100, steps, 100), 30.0)
        true = (1000 - steps) * 0.2 + (10 - len(pauses)) * 30
        found = time_left(*[0.2] * steps, pauses=pauses).after(1000 - steps)
        assert found == pytest.approx(true, abs=31), steps
    assert time_left(*[0.2] * 50).after(950) == pytest.approx(950 * 0.2)  # before the first none is known


def test_the_time_left_counts_the_last_evaluation_and_the_last_step_has_none(capsys, clock):
    console = open_console(0, 12)
    console.clock.expect_evaluation(240_000)  # a sixth of the time of 240 steps
    for step in range(12):
        make(console, clock, step)
    *_, before, last = capsys.readouterr().out.splitlines()
    assert " | 12 s left | " in before and "left" not in last  # a step, the evaluation and the end


def test_the_time_left_follows_a_machine_that_becomes_slower_and_no_step_that_compiles():
    assert time_left(60.0).after(9) is None  # it compiles; then a pause for what is done once
    assert time_left(60.0, 0.1, pauses={1: 99.9}).after(9) == pytest.approx(0.9)
    slower = time_left(60.0, *[0.1] * 501, *[0.3] * 400, pauses={1: 99.9})
    assert slower.after(100) == pytest.approx(30, rel=0.05)
    # of a CPU: the eleventh compiles
    assert time_left(0.9, *[0.2] * 9, 40.0, 0.1, 0.1).after(500) == pytest.approx(50)
