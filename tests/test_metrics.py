"""metrics.jsonl through crashes and resumes, the console's lines, and wandb with the real package."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import metrics
from nanochat.metrics import Console, Metrics, Progress, diverged, is_spike, read_metrics, rewind_metrics

ROOT = Path(__file__).parent.parent


def write_all(folder, records):
    log = Metrics(folder)
    for record in records:
        log.write(record)
    log.close()


# ------------------------------------------------------------------------------------------------------
# The file


def test_records_come_back_as_written_one_json_object_a_line(tmp_path):
    records = [{"step": i, "loss": math.pi * 10.0**-i, "name": "a\nb"} for i in range(5)]
    write_all(tmp_path, records[:2])
    write_all(tmp_path, records[2:])  # a second process appends
    assert read_metrics(tmp_path / "metrics.jsonl") == records  # numbers to the last digit
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records


def test_a_record_is_on_its_way_to_disk_as_soon_as_it_is_written(tmp_path):
    log = Metrics(tmp_path)
    log.write({"step": 0, "loss": 1.0})
    assert read_metrics(log.path) == [{"step": 0, "loss": 1.0}]
    log.sync()
    log.close()


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    write_all(tmp_path, [{"step": 0, "loss": math.nan, "grad_norm": math.inf, "mfu": -math.inf, "x": 1.5}])
    text = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert strict == {"step": 0, "loss": None, "grad_norm": None, "mfu": None, "x": 1.5}


def test_processes_other_than_the_first_write_nothing(tmp_path):
    log = Metrics(tmp_path, enabled=False)
    log.write({"step": 0})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_what_follows_the_last_newline_is_not_a_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    whole = '{"step": 0, "loss": 1.0}\n{"step": 1, "loss": 2.0}\n'
    for partial in ("", "{", '{"step": 2, "loss"', '{"step": 2}'):
        path.write_text(whole + partial)
        assert [r["step"] for r in read_metrics(path)] == [0, 1]


WRITER = """
import sys
from nanochat.metrics import Metrics
log, step = Metrics(sys.argv[1]), 0
while True:
    log.write({"step": step, "loss": 1 / (step + 1), "padding": "x" * (step % 5000)})
    step += 1
"""


def test_a_writer_killed_at_any_moment_leaves_whole_records_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], env=environment)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and (not path.exists() or path.stat().st_size < 200_000):
            time.sleep(0.001)
    finally:
        child.kill()
    assert child.wait() == -signal.SIGKILL
    assert path.read_bytes().endswith(b"\n")
    records = read_metrics(path)
    assert len(records) > 50
    for step, record in enumerate(records):
        assert record == {"step": step, "loss": 1 / (step + 1), "padding": "x" * (step % 5000)}


# ------------------------------------------------------------------------------------------------------
# Going back to a checkpoint


def run_of(first, last, every, evaluated=-1):
    """The records of steps first..last - 1 as the script writes them: an evaluation stands before the
    training step of its number, and one that was made before is not made again."""
    records = []
    for step in range(first, last + 1):
        if step % every == 0 and step != evaluated:
            records.append({"step": step, "val_bpb": 1 / (step + 1), "tokens": step})
        if step < last:
            records.append({"step": step, "loss": step / 7})
    return records


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_run_that_was_rewound_and_went_on_has_the_records_of_one_never_stopped(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    length, every = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
    crash = data.draw(st.integers(0, length))
    checkpoint = data.draw(st.integers(0, crash))
    write_all(folder, run_of(0, crash, every))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(data.draw(st.sampled_from(["", '{"step": 3, "lo'])))
    rewind_metrics(folder / "metrics.jsonl", checkpoint)
    evaluated = checkpoint if checkpoint % every == 0 else -1
    write_all(folder, run_of(checkpoint, length, every, evaluated))
    assert read_metrics(folder / "metrics.jsonl") == run_of(0, length, every)


def test_a_training_record_without_a_number_is_still_a_training_record(tmp_path):
    write_all(
        tmp_path, [{"step": 0, "loss": 1.0}, {"step": 1, "loss": math.nan}, {"step": 1, "val_bpb": 2.0}]
    )
    rewind_metrics(tmp_path / "metrics.jsonl", 1)
    kept = [{"step": 0, "loss": 1.0}, {"step": 1, "val_bpb": 2.0}]
    assert read_metrics(tmp_path / "metrics.jsonl") == kept


def test_rewinding_where_nothing_was_recorded_does_nothing(tmp_path):
    rewind_metrics(tmp_path / "metrics.jsonl", 5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails_at", ["fsync", "replace"])
def test_a_rewind_that_fails_leaves_the_records_as_they_were(tmp_path, monkeypatch, fails_at):
    write_all(tmp_path, run_of(0, 9, 3))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, fails_at, fail)
    with pytest.raises(OSError):
        rewind_metrics(tmp_path / "metrics.jsonl", 4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# ------------------------------------------------------------------------------------------------------
# The console


def record(step, loss=3.0):
    return {
        "step": step,
        "loss": loss,
        "lr_multiplier": 1.0,
        "step_time_s": 0.25,
        "tok_per_sec": 12_345.6,
        "mfu": 0.375,
    }


def test_a_log_gets_one_plain_line_a_step_with_the_time_left(capsys):
    console = Console(first_step=5, num_iterations=10, enabled=True)
    for step in range(5, 10):
        console.step(record(step))
    console.print("evaluated")
    console.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[:-1]] == [f"step {n}/10" for n in range(6, 11)]
    assert "12,346 tok/s" in lines[0] and "mfu 37.5 %" in lines[0] and "250 ms" in lines[0]
    assert lines[0].endswith("0:00:01 left")  # four steps of a quarter of a second
    assert lines[-1] == "evaluated"


def test_the_console_shows_a_running_mean_that_a_bad_step_does_not_spoil(capsys):
    console = Console(first_step=0, num_iterations=20, enabled=True)
    for step, loss in enumerate([4.0, 4.0, math.nan, 4.0, math.inf, 4.0]):
        console.step(record(step, loss))
    shown = [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["loss 4.0000", "loss 4.0000", "loss nan", "loss 4.0000", "loss inf", "loss 4.0000"]


def test_on_a_terminal_one_line_rewrites_itself(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console = Console(first_step=0, num_iterations=3, enabled=True)
    for step in range(3):
        time.sleep(0.11)  # the line is drawn at most ten times a second
        console.step(record(step))
    console.close()
    captured = capsys.readouterr()
    assert captured.out == "" and "\n" not in captured.err.strip()
    assert captured.err.count("\r") >= 3 and "loss 3.0000" in captured.err


def test_processes_other_than_the_first_print_nothing(capsys):
    console = Console(first_step=0, num_iterations=3, enabled=False)
    console.step(record(0))
    console.print("hello")
    console.close()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


WITHOUT_READER = """
import sys
from nanochat.metrics import Console
sys.stdin.readline()  # until the reader of our output has gone
console = Console(0, 5, enabled=True)
for step in range(5):
    console.step(dict(step=step, loss=1.0, lr_multiplier=1, step_time_s=1, tok_per_sec=1, mfu=1))
    console.print("x" * 10_000)
console.close()
"""


def test_a_run_outlives_the_reader_of_its_output():
    child = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_READER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    _, errors = child.communicate(b"\n", timeout=60)
    assert (child.returncode, errors) == (0, b"")


# ------------------------------------------------------------------------------------------------------
# wandb

LOGGING = """
import sys
from nanochat.metrics import Metrics, start_wandb
folder, settings = sys.argv[1], {"settings": {"depth": {"value": 4, "source": "default"}}, "plan": ["a", "b"]}
run = start_wandb("my run", "nanochat", settings, folder, None)
log = Metrics(folder, run)
log.write({"step": 0, "val_bpb": 2.5, "tokens": 0})
for step in range(3):
    log.write({"step": step, "loss": 4.0 - step, "grad_norm": float("nan") if step == 1 else 0.5})
log.close()
again = start_wandb("my run", "nanochat", settings, folder, run.id)
assert again.id == run.id
log = Metrics(folder, again)
log.write({"step": 3, "loss": 0.125})
log.close()
"""


def run_wandb(folder, **variables):
    """LOGGING in a child without anyone's wandb settings; what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    home = folder / "home"
    home.mkdir()
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "WANDB_ERROR_REPORTING": "false"} | variables
    return subprocess.run(
        [sys.executable, "-c", LOGGING, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


def read_wandb(path):
    """The records of a .wandb file: LevelDB's log format, each message a protocol buffer.

    After 7 bytes of header come blocks of 32768 bytes; a piece is a checksum (4 bytes), its length (2), its
    kind (1 whole, 2 first, 3 middle, 4 last) and its bytes; a block's last bytes, where no piece fits, are
    void.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, message = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def check_what_wandb_wrote(folder):
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    records = [r for path in files for r in read_wandb(path)]
    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert {(run.display_name, run.project) for run in runs} == {("my run", "nanochat")}
    assert len({run.run_id for run in runs}) == 1
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["settings"] == {"depth": {"value": 4, "source": "default"}} and config["plan"] == ["a", "b"]
    history = {}
    for r in records:
        if r.WhichOneof("record_type") == "history":
            row = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
            history[r.history.step.num] = {k: v for k, v in row.items() if not k.startswith("_")}
    assert history == {
        0: {"step": 0, "val_bpb": 2.5, "tokens": 0, "loss": 4.0, "grad_norm": 0.5},
        1: {"step": 1, "loss": 3.0},
        2: {"step": 2, "loss": 2.0, "grad_norm": 0.5},
        3: {"step": 3, "loss": 0.125},
    }
    logged = read_metrics(folder / "metrics.jsonl")
    assert [r["step"] for r in logged if "loss" in r] == [0, 1, 2, 3]


def test_without_an_api_key_wandb_is_offline_says_so_once_and_holds_every_metric(tmp_path):
    said = run_wandb(tmp_path)
    assert (
        said.splitlines()
        == ["wandb has no API key here: logging offline (wandb login; wandb sync uploads it later)"] * 2
    )  # once a start
    check_what_wandb_wrote(tmp_path)


@pytest.mark.slow
def test_where_the_server_cannot_be_reached_wandb_is_offline_and_says_so(tmp_path):
    variables = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    said = run_wandb(tmp_path, **variables)
    assert said.count("wandb cannot be reached") == 2
    check_what_wandb_wrote(tmp_path)


class FakeWandb:
    """Stands for the package where only our own decisions are of interest."""

    def __init__(self, reachable):
        self.reachable, self.modes = reachable, []

    def Settings(self, **options):
        assert options["init_timeout"] <= 30  # seconds: a run must not wait for a network for long
        return options

    def teardown(self):
        self.modes.append("teardown")

    def init(self, mode, **options):
        self.modes.append(mode)
        if mode != "offline" and not self.reachable:
            raise ConnectionError("no route to host")
        return mode


@pytest.mark.parametrize(
    "key, reachable, modes, says",
    [
        (True, True, [None], ""),
        (True, False, [None, "teardown", "offline"], "cannot be reached (ConnectionError)"),
        (False, True, ["offline"], "no API key"),
    ],
)
@pytest.mark.parametrize("place", ["environment", "netrc"])
def test_wandb_is_online_where_there_is_a_key_and_a_network(
    key, reachable, modes, says, place, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    if key and place == "environment":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    elif key:
        netrc = tmp_path / ".netrc"
        netrc.write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n")
        netrc.chmod(0o600)
    fake, said = FakeWandb(reachable), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert metrics.start_wandb("a run", "nanochat", {}, tmp_path, None, said.append) == modes[-1]
    assert fake.modes == modes
    assert len(said) == bool(says) and says in "".join(said)


def test_wandbs_own_mode_is_respected(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    fake = FakeWandb(reachable=True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    metrics.start_wandb("a run", "nanochat", {}, tmp_path, None, pytest.fail)
    assert fake.modes in ([None], ["disabled"])  # either way wandb reads it


def test_the_run_named_dummy_and_a_machine_without_wandb_log_nowhere(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    said = []
    assert metrics.start_wandb("dummy", "nanochat", {}, tmp_path, None, said.append) is None
    assert said == []
    assert metrics.start_wandb("a run", "nanochat", {}, tmp_path, None, said.append) is None
    assert len(said) == 1 and "pip install wandb" in said[0]


def test_a_spike_is_a_loss_six_sigma_over_the_recent_ones():
    recent = [2.0 + 0.1 * (-1) ** i for i in range(40)]  # mean 2, deviation 0.1
    assert not is_spike(2.59, recent) and is_spike(2.61, recent)
    assert not is_spike(100.0, recent[:31]), "too few to know what is usual"
    assert not is_spike(float("nan"), recent), "that is a bad step, counted elsewhere"


def test_the_first_bad_place_of_a_step_is_a_micro_step_or_else_the_gradient():
    said = str(diverged(7, [1.0, float("inf"), float("nan")], 56, "runs/d4"))
    assert "step 7 in micro-step 1 of its 3 (rows from 56 on)" in said and "runs/d4" in said
    assert "step 7 in its gradient" in str(diverged(7, [1.0, 2.0], 56, "runs/d4"))


def test_progress_counts_good_and_bad_steps_and_remembers_good_losses_only():
    progress = Progress()
    assert not any(progress.add_step(4.0 + 0.01 * (i % 2), 100, 0.5, finite=True) for i in range(70))
    assert progress.tokens == 7000 and progress.train_seconds == 35 and len(progress.recent) == 64
    assert progress.add_step(9.0, 100, 0.5, finite=True)  # a spike, which counts as recent from now on
    assert progress.recent[-1] == 9.0 and progress.skipped == 0
    assert not progress.add_step(float("nan"), 100, 0.5, finite=False)
    assert progress.skipped == 1 and progress.recent[-1] == 9.0 and progress.tokens == 7200
    assert Progress(**asdict(progress)) == progress
