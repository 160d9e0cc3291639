"""wandb: what it gets, with the real package offline and with a stand-in for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.run.metrics import Metrics, read_metrics
from nanochat.run.wandb_log import WandbLog, start_wandb

ROOT = Path(__file__).parents[2]

LOGGING = """
import sys
from nanochat.run.metrics import Metrics
from nanochat.run.wandb_log import start_wandb
from pathlib import Path
folder, settings = sys.argv[1], {"settings": {"depth": {"value": 4, "source": "default"}}, "plan": ["a", "b"]}
run = start_wandb("my run", settings, folder, None)
log = Metrics(folder, run)
log.write({"step": 0, "val_bpb": 2.5, "tokens": 0})
for step in range(3):
    log.write({"step": step, "loss": 4.0 - step, "grad_norm": float("nan") if step == 1 else 0.5})
log.close()
again = start_wandb("my run", settings, folder, run.id)
assert again.id == run.id
log = Metrics(folder, again)
log.write({"step": 3, "own_tasks": {"name": 0.5, "bracket": 0.25, "bad": float("inf")}, "own_score": 0.125})
log.write({"step": 3, "samples": ["def f(x\\ud800", "import \u6771"]})
log.write({"step": 3, "loss": 0.125})
Path(folder, "report.html").write_text("<p>the report")
log.close()
"""
UNREACHABLE = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}


def run_wandb(folder, **variables):
    """LOGGING in a child without anyone's wandb settings; what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    home = folder / "home"
    home.mkdir()
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "WANDB_ERROR_REPORTING": "false"} | variables
    command = [sys.executable, "-c", LOGGING, folder]
    return subprocess.check_output(command, env=environment, text=True, timeout=120)


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
            row = {name: value for name, value in row.items() if not name.startswith(("_", "samples"))}
            history[r.history.step.num] = row
    assert history == {
        0: {"step": 0, "val_bpb": 2.5, "tokens": 0, "loss": 4.0, "grad_norm": 0.5},
        1: {"step": 1, "loss": 3.0},
        2: {"step": 2, "loss": 2.0, "grad_norm": 0.5},
        3: {"step": 3, "loss": 0.125, "own_tasks/name": 0.5, "own_tasks/bracket": 0.25, "own_score": 0.125},
    }
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/samples_*.json")
    samples = [[3, "def f(x?"], [3, "import \u6771"]]
    assert json.loads(table.read_text()) == {"columns": ["step", "sample"], "data": samples}
    (report,) = folder.glob("wandb/offline-run-*/files/report.html")
    assert report.read_text() == "<p>the report"
    logged = read_metrics(folder / "metrics.jsonl")
    assert [r["step"] for r in logged if "loss" in r] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "variables, says",
    [({}, "no API key"), pytest.param(UNREACHABLE, "cannot be reached", marks=pytest.mark.slow)],
)
def test_without_a_key_or_a_server_wandb_is_offline_says_so_and_holds_every_metric(tmp_path, variables, says):
    said = run_wandb(tmp_path, **variables).splitlines()
    assert len(said) == 2 and all(says in line for line in said)  # once a start
    check_what_wandb_wrote(tmp_path)


class FakeWandb:
    """Stands for the package, and for a run of it, where only our own decisions are of interest."""

    id = "an id"

    def __init__(self, reachable=True, fails=()):
        self.reachable, self.fails, self.modes, self.calls = reachable, fails, [], []

    def Settings(self, **options):
        assert options["init_timeout"] <= 30  # seconds: a run must not wait for a network for long
        return options

    def teardown(self):
        self.modes.append("teardown")

    def init(self, mode, **options):
        self.modes.append(mode)
        if mode != "offline" and not self.reachable:
            raise ConnectionError("no route to host")
        return self

    def _call(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise RuntimeError(f"{name} failed\nin detail")

    def log(self, values, step):
        self._call("log")

    def save(self, path, base_path, policy):
        self._call("save")

    def finish(self):
        self._call("finish")


@pytest.mark.parametrize(
    "given, reachable, modes, says",
    [
        ("a key in netrc", True, [None], ""),
        ("a key", False, [None, "teardown", "offline"], "cannot be reached (ConnectionError)"),
        ("no key", True, ["offline"], "no API key"),
        ("a mode", True, ["disabled"], ""),
    ],
)
def test_wandb_is_online_where_there_is_a_key_and_a_network(
    given, reachable, modes, says, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    if given == "a mode":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    elif given == "a key":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    elif given == "a key in netrc":
        netrc = tmp_path / ".netrc"
        netrc.write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n")
        netrc.chmod(0o600)
    fake, said = FakeWandb(reachable), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert start_wandb("a run", {}, tmp_path, None, said.append).run is fake
    assert fake.modes == modes
    assert len(said) == bool(says) and says in "".join(said)


def test_the_run_named_dummy_and_a_machine_without_wandb_log_nowhere(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    said = []
    assert start_wandb("dummy", {}, tmp_path, None, said.append) is None
    assert len(said) == 1 and "--run=NAME" in said[0]
    assert start_wandb("a run", {}, tmp_path, None, said.append) is None
    assert len(said) == 2 and "pip install wandb" in said[1]


@pytest.mark.parametrize("fails", ["log", "save", "finish"])
def test_a_failure_of_wandb_is_said_once_and_ends_nothing(tmp_path, capsys, fails):
    (tmp_path / "report.md").write_text("")
    fake, records = FakeWandb(fails=[fails]), [{"step": step, "loss": 1.0} for step in range(3)]
    log = Metrics(tmp_path, WandbLog(fake, tmp_path))
    for record in records:
        log.write(record)
    log.close()
    assert fake.calls.count(fails) == 1 and fake.calls[-1] == fails
    assert read_metrics(tmp_path / "metrics.jsonl") == records
    said = capsys.readouterr().err
    assert said.count("warning: wandb has failed (RuntimeError: ") == said.count("\n") == 1
