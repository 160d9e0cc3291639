"""Loggers: what each real package has got after a run that was stopped and resumed, all of it offline."""

import json
import os
import sqlite3
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from helpers import ROOT, command, losses, run

from nanochat import UserError
from nanochat.run import loggers
from nanochat.run.loggers import Loggers
from nanochat.run.metrics import LoopState, Metrics, read_metrics

LOGGING = """
import sys
from pathlib import Path
from nanochat.run.loggers import Loggers
from nanochat.run.metrics import LoopState, Metrics

folder, names, loop = Path(sys.argv[1]), sys.argv[2].split(","), LoopState()
config = {"settings": {"depth": {"value": 4, "source": "default"}}, "plan": ["a", "b"]}

log = Metrics(folder, Loggers(names, "my run", folder, config, loop, 0))
log.write({"step": 0, "val_bpb": 2.5, "tokens": 0})
for step in range(4):
    log.write({"step": step, "loss": 4.0 - step, "grad_norm": float("nan") if step == 1 else 0.5})
log.close()

log = Metrics(folder, Loggers(names, "my run", folder, config, LoopState(wandb_id=loop.wandb_id), 3))
log.write({"step": 3, "loss": 1.0, "grad_norm": 0.5})  # again: the checkpoint was of step 3
log.write({"step": 4, "own_tasks": {"name": 0.5, "bracket": 0.25, "bad": float("inf")}, "own_score": 0.125})
log.write({"step": 4, "samples": ["def f(x\\ud800", "import \u6771"]})
(folder / "report.html").write_text("<p>the report</p>")
(folder / "report.md").write_text("the report")
log.close()
"""
# {step: {name: number}} that every logger has then
HISTORY = {
    0: {"val_bpb": 2.5, "tokens": 0, "loss": 4.0, "grad_norm": 0.5},
    1: {"loss": 3.0},
    2: {"loss": 2.0, "grad_norm": 0.5},
    3: {"loss": 1.0, "grad_norm": 0.5},
    4: {"own_tasks/name": 0.5, "own_tasks/bracket": 0.25, "own_score": 0.125},
}
SAMPLES = ["def f(x?", "import \u6771"]
UNREACHABLE = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
IMPATIENT = """
import wandb
wandb.Settings = lambda settings=wandb.Settings, **given: settings(**given | {"init_timeout": 3})
"""


def log_to(folder, names: str, before="", **variables) -> str:
    """Run LOGGING after other code, in a child without anyone's settings of the packages; what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "TRACKIO"))}
    (folder / "home").mkdir()
    environment |= {"HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_ERROR_REPORTING": "false"} | variables
    line = [sys.executable, "-c", before + LOGGING, folder, names]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    return done.stdout


def read_wandb(path):
    """The records of a .wandb file: after 7 bytes of header, a checksum (4 bytes), the length (2), the kind
    (1: whole) and a protocol buffer each. Only larger files have records in several pieces."""
    from wandb.proto import wandb_internal_pb2

    data, at = path.read_bytes(), 7
    assert data.startswith(b":W&B") and len(data) <= 32768
    while at < len(data):
        end = at + 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : end])
        at = end
        yield record


def check_wandb(folder):
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    records = [r for path in files for r in read_wandb(path)]
    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert {(r.display_name, r.project) for r in runs} == {("my run", "nanochat")}
    assert len({r.run_id for r in runs}) == 1
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["settings"] == {"depth": {"value": 4, "source": "default"}} and config["plan"] == ["a", "b"]
    history = {}
    for r in (r.history for r in records if r.WhichOneof("record_type") == "history"):
        row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in r.item}
        history[r.step.num] = {k: v for k, v in row.items() if not k.startswith(("_", "samples"))}
    assert history == HISTORY
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/samples_*.json")
    assert json.loads(table.read_text()) == {"columns": ["step", "sample"], "data": [[4, s] for s in SAMPLES]}
    (report,) = folder.glob("wandb/offline-run-*/files/report.html")
    assert report.read_text() == "<p>the report</p>"


def check_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard" / "my run")).Reload()
    history = {}
    for name in found.Tags()["scalars"]:
        for event in found.Scalars(name):
            history.setdefault(event.step, {})[name] = event.value
    assert history == HISTORY
    texts = {}
    for tag in found.Tags()["tensors"]:
        event = found.Tensors(tag)[-1]
        texts[tag.removesuffix("/text_summary")] = event.step, event.tensor_proto.string_val[0].decode()
    assert texts["samples"][0] == 4 and all(sample in texts["samples"][1] for sample in SAMPLES)
    assert texts["report"] == (4, "the report") and '"depth"' in texts["config"][1]


def check_trackio(folder):
    with sqlite3.connect(folder / "trackio" / "nanochat.db") as database:
        rows = database.execute("SELECT run_name, run_id, step, metrics FROM metrics ORDER BY id").fetchall()
        (config,) = database.execute("SELECT config FROM configs").fetchone()
    assert {row[0] for row in rows} == {"my run"} and len({row[1] for row in rows}) == 1
    assert json.loads(config)["settings"] == {"depth": {"value": 4, "source": "default"}}
    history = {}
    for _, _, step, metrics in rows:
        history.setdefault(step, {}).update(json.loads(metrics))
    table, report = history[4].pop("samples"), history[4].pop("report")
    assert history == HISTORY
    assert [row["sample"] for row in table["_value"]] == SAMPLES
    assert "<p>the report</p>" in (folder / "trackio" / "media" / report["file_path"]).read_text()


def test_every_logger_has_the_whole_run_after_a_stop_and_a_resume(tmp_path):
    said = log_to(tmp_path, "wandb,tensorboard,trackio")
    assert said.count("no API key") == 2 and "tensorboard --logdir=" in said
    check_wandb(tmp_path)
    check_tensorboard(tmp_path)
    check_trackio(tmp_path)


@pytest.mark.slow
def test_wandb_is_offline_where_its_server_cannot_be_reached_and_holds_every_number(tmp_path):
    said = log_to(tmp_path, "wandb", before=IMPATIENT, **UNREACHABLE)
    assert said.count("cannot be reached") == 2
    check_wandb(tmp_path)


@pytest.mark.slow
def test_a_training_run_is_in_its_logger_with_the_losses_of_its_own_file(corpus, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    line = command(corpus, tmp_path / "run", "--logger=tensorboard")
    run([*line, "--num_iterations=5"])
    run(line)  # goes on to step 8
    expected = losses(tmp_path / "run")
    assert list(expected) == list(range(8))
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert {event.step: event.value for event in found.Scalars("loss")} == pytest.approx(expected)


class FakeWandb:
    """Stands for the package where only our own decisions are of interest."""

    id = "an id"
    settings = SimpleNamespace(base_url="https://ml.company.com")

    def Settings(self, **options):
        assert options["init_timeout"] <= 30  # seconds: a run must not wait for a network for long
        return options

    def setup(self):
        return self

    def init(self, mode, **options):
        self.mode = mode
        return self


@pytest.mark.parametrize("variables, file, host, mode", [
    ({"WANDB_API_KEY": "0" * 40}, ".netrc", "", None),
    ({}, ".netrc", "api.wandb.ai", None),
    ({}, ".netrc", "ml.company.com", None),
    ({"NETRC": "~/keys"}, "keys", "api.wandb.ai", None),
    ({"WANDB_MODE": "disabled"}, ".netrc", "", "disabled"),
])  # fmt: skip
def test_wandb_is_online_where_there_is_a_key_unless_a_mode_is_given(
    variables, file, host, mode, tmp_path, monkeypatch
):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), "USERPROFILE": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / file).write_text(f"machine {host}\n  login user\n  password {'0' * 40}\n" if host else "")
    (tmp_path / file).chmod(0o600)
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    loop = LoopState()
    Loggers(["wandb"], "a run", tmp_path, {}, loop, 0, say=pytest.fail)
    assert fake.mode == mode and loop.wandb_id == fake.id


def test_a_name_alone_means_wandb():
    chosen = loggers.choose(None, "dummy"), loggers.choose(None, "my run"), loggers.choose("tensorboard", "x")
    assert chosen == ([], ["wandb"], ["tensorboard"])
    assert loggers.choose("trackio, wandb,trackio", "dummy") == ["trackio", "wandb"]


@pytest.mark.parametrize("logger, message", [
    ("tensorbord", "no logger 'tensorbord'.*wandb,tensorboard,trackio"), ("wandb,,trackio", "no logger ''"),
    ("wandb,trackio", "trackio cannot be imported; .*`pip install trackio`"),
])  # fmt: skip
def test_an_unknown_and_a_missing_logger_is_a_sentence_before_training(logger, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)  # importing it fails
    with pytest.raises(UserError, match=message):
        loggers.choose(logger, "dummy")


def test_a_folder_named_like_a_missing_package_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "nothing_else").mkdir()  # as a run's folder has one named tensorboard
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(loggers.KINDS, "nothing_else", None)
    with pytest.raises(UserError, match="pip install nothing_else"):
        loggers.choose("nothing_else", "dummy")


@pytest.mark.parametrize("fails", ["start", "write", "finish"])
def test_a_logger_that_fails_is_told_once_and_ends_nothing(tmp_path, monkeypatch, capsys, fails):
    calls = {"wandb": [], "trackio": []}

    def call(name, what, *_):
        calls[name].append(what)
        if (name, what) == ("wandb", fails):
            raise RuntimeError("no\nin detail")
        return SimpleNamespace(write=partial(call, name, "write"), finish=partial(call, name, "finish"))

    for name in calls:
        monkeypatch.setitem(loggers.KINDS, name, partial(call, name, "start"))
    records = [{"step": step, "loss": 1.0} for step in range(3)]
    log = Metrics(tmp_path, Loggers(["wandb", "trackio"], "a run", tmp_path, {}, LoopState(), 0))
    for record in records:
        log.write(record)
    log.close()
    whole = ["start", *["write"] * 3, "finish"]
    assert calls == {"trackio": whole, "wandb": whole[: whole.index(fails) + 1]}
    assert read_metrics(tmp_path / "metrics.jsonl") == records
    said = capsys.readouterr().err
    assert said.startswith("warning: wandb has failed (RuntimeError: no)") and said.count("\n") == 1
