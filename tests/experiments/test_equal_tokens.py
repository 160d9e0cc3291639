"""At equal tokens both sides get the same text, and each of our runs is set beside the peer's best."""

import json
import math
import threading

import fake_peer
import pytest
import torch
from helpers import python_m

from experiments import equal_tokens, peer_run, race_score
from experiments.equal_tokens import Run
from nanochat import UserError


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A command of 1,024 tokens in batches, and text and checkpoints that need no training."""
    text = tmp_path / "text"
    text.mkdir()
    values = {
        "tokens": 1024, "max_seq_len": 64, "points": 2, "dtype": "float32", "more": "--compile=off",
        "text": text, "base_path": tmp_path, "checkout": tmp_path / "peer", "job": text,
        "sources": {"ours": "a", "peer": "b"}, "device": "cpu", "aspect_ratio": 24, "head_dim": 8,
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(equal_tokens, name, value, raising=False)
    monkeypatch.setattr(peer_run, "our_settings", lambda text: {"data": text, "vocab_size": 300})
    return tmp_path


def keep(run: Run, bpb: float):
    run.folder.mkdir(parents=True)
    points = [(512, 1.0, bpb + 1), (1024, 2.0, bpb)]
    (run.folder / "result.json").write_text(json.dumps({"points": points, "tok_per_sec": 512.0}))


@pytest.fixture
def trained(place, monkeypatch) -> list[Run]:
    """The runs that were trained: by a stand-in, which leaves two checkpoints."""

    def train(run):
        runs.append(run)
        checkpoints = [run.folder / "step_000002", run.folder / "step_000004"]
        for checkpoint in checkpoints:
            checkpoint.mkdir(exist_ok=True)
        return [1.0, 2.0, 3.0, 4.0], [9.0, 8.0, 7.0, 6.0], checkpoints

    runs, scores = [], [{"bpb": bpb, "by_position": {"1-16": bpb + 1}} for bpb in (2.5, 1.5)]
    monkeypatch.setattr(equal_tokens, "OURS_OR_PEER", {"ours": train, "peer": train})
    monkeypatch.setattr(race_score, "score", lambda *_: scores)
    return runs


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_sides_get_the_same_shape_tokens_device_and_precision(place, monkeypatch, device):
    monkeypatch.setattr(equal_tokens, "device", device)
    asked = {"depth": 3, "aspect_ratio": 24, "head_dim": 8, "max_seq_len": 64, "device_type": device}
    asked |= {"total_batch_size": 1536, "num_iterations": 1, "save_every": 1}
    asked_of = {}

    def train(checkout, text, folder, settings, dtype):
        assert (checkout, text, dtype) == (place / "peer", place / "text", "float32")
        asked_of["peer"] = settings
        return peer_run.Run(0, 9.0, 1, [], 0.0, [8.5, 8.0], [256.0, 128.0], [1.0, 3.0])

    monkeypatch.setattr(peer_run, "train", train)
    found = equal_tokens.train_peer(Run("peer", 3, 1536, 0))
    assert found == ([6.0, 18.0], [8.5, 8.0], [])
    assert asked_of["peer"] == asked | {"device_batch_size": 12}  # of 24 rows, at most 16
    command = [str(argument) for argument in equal_tokens.our_command(Run("ours", 3, 1536, 7))]
    more = {"seed": 7, "dtype": "float32", "vocab_size": 300, "compile": "off"}
    assert {f"--{name}={value}" for name, value in (asked | more).items()} <= set(command)
    assert ("--device_batch_size=12" in command) == (device == "cuda")  # on a CPU its plan says how many


def test_ours_is_set_beside_the_best_of_the_peers_batches_at_the_same_depth(place):
    runs = [Run("peer", 4, 128, 0), Run("peer", 4, 512, 0), Run("peer", 6, 256, 0)]
    runs += [Run("ours", 4, 256, 0), Run("ours", 4, 256, 1), Run("ours", 6, 256, 0)]
    # The first diverged, the last has no result yet
    for run, bpb in zip(runs, (math.nan, 1.6, 4.0, 0.7, 0.9), strict=False):
        keep(run, bpb)
    assert equal_tokens.best_of_peer(runs, 4) == runs[1]
    lines = equal_tokens.table(runs).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0], row[1], row[5], row[6]) for row in cells] == [
        ("karpathy/nanochat", "4", "nan", "nan"),
        ("karpathy/nanochat", "4", "1.6000", "1.000"),
        ("karpathy/nanochat", "6", "4.0000", "1.000"),
        ("this project", "4", "0.8000 ± 0.1414", "0.500"),
    ]
    assert equal_tokens.over_peer(runs[3], runs[1]) == pytest.approx([1.7 / 2.6, 0.7 / 1.6])
    equal_tokens.draw(runs, 256, place / "tokens.png")
    assert (place / "tokens.png").stat().st_size > 5000


def test_a_picture_has_more_depths_than_there_are_styles_of_lines(place):
    runs = [Run("ours", depth, 256, 0) for depth in range(1, 6)]
    for run in runs:
        keep(run, 1.0)
    equal_tokens.draw(runs, 256, place / "five.png")


def test_what_has_a_result_is_not_trained_again_and_a_failure_stops_no_other_run(
    trained, monkeypatch, capsys
):
    def fail(run):
        trained.append(run)
        raise errors[run]

    monkeypatch.setitem(equal_tokens.OURS_OR_PEER, "peer", fail)
    kept, good = Run("ours", 4, 64, 0), Run("ours", 4, 256, 0)
    bad, full = Run("peer", 4, 128, 0), Run("peer", 4, 512, 0)
    errors = {bad: UserError("base_train failed: no memory"), full: OSError(28, "No space left on device")}
    keep(kept, 2.0)
    assert equal_tokens.train_all([kept, bad, full, good], 1) == [bad, full]
    assert trained == [bad, full, good]
    said = capsys.readouterr().err
    assert "peer, depth 4, 128 tokens a step, seed 0: base_train failed" in said and "No space left" in said
    points = [[512, 2.0, 2.5], [1024, 4.0, 1.5]]
    of_last = {"by_position": {"1-16": 2.5}, "training_loss": 6.0, "tok_per_sec": 256.0}
    assert good.result == {"points": points} | of_last
    assert not list(good.folder.glob("step_*"))  # no checkpoint is left
    assert equal_tokens.train_all([kept, bad, good], 1) == [bad] and trained == [bad, full, good, bad]


def test_a_run_that_is_not_done_in_time_is_named_and_what_is_done_stays(place, monkeypatch):
    may_end = threading.Event()

    def train(run):
        if run.batch == 512:
            may_end.wait(60)
        return [1.0] * 4, [9.0] * 4, []

    monkeypatch.setattr(equal_tokens, "OURS_OR_PEER", {"ours": train, "peer": train})
    monkeypatch.setattr(race_score, "score", lambda *_: [])
    late, never = Run("ours", 4, 512, 0), Run("ours", 4, 512, 1)
    assert equal_tokens.train_all([late, never], 1, limit_s=0.01) == [late, never]
    assert not may_end.is_set() and not never.folder.exists()
    may_end.set()


@pytest.mark.slow
def test_the_command_prepares_a_text_that_can_be_carried_and_trains_both_on_it(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(20):
        words = (f"number {i * j % 97} is {j % 7}\n" for j in range(20))
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(words))
    peer = fake_peer.checkout(tmp_path / "peer")
    torch.save({"vocab": torch.tensor(300.0)}, peer / "model.pt")

    def command(base: str, *arguments: str, status: int = 0):
        both = [f"--peer={peer}", f"--base_dir={tmp_path / base}", "--max_seq_len=32", "--vocab_size=300"]
        done = python_m(["experiments.equal_tokens", *both, *arguments])
        assert done.returncode == status, done.stdout + done.stderr
        return done

    texts = f"--data={tmp_path / 'texts'}", f"--val_data={tmp_path / 'texts' / '7.txt'}"
    done = command("here", *texts, "--batches=none", "--peer_batches=none")
    folder = done.stdout.splitlines()[0].partition(": ")[2]
    (tmp_path / "here").rename(tmp_path / "carried")
    folder = folder.replace(str(tmp_path / "here"), str(tmp_path / "carried"))
    small = [f"--data={folder}", "--depths=1", "--aspect_ratio=32", "--head_dim=32", "--tokens=2048"]
    small += ["--batches=256", "--peer_batches=512", "--points=2", "--jobs=1", "--more=--compile=off"]
    assert (
        "give --head_dim to this command" in command("there", *small, "--more=--head_dim=8", status=2).stderr
    )
    late = command("there", *small, "--minutes=0.01", status=2)
    assert "not done: peer, depth 1" in late.stderr and "ours, depth 1" in late.stderr
    rows = command("there", *small).stdout.splitlines()[-2:]
    theirs, ours = (float(row.split(" | ")[5]) for row in rows)
    kept = {path.parent.name[:4]: json.loads(path.read_text()) for path in tmp_path.rglob("result.json")}
    assert len(kept["ours"]["points"]) == len(kept["peer"]["points"]) == 2
    assert ours < theirs == round(kept["peer"]["points"][-1][2], 4)
    assert not list((tmp_path / "there").rglob("step_*")) and not list((tmp_path / "there").rglob("model_*"))


@pytest.mark.parametrize(
    ("more", "own"), [("--depth 8", "depths"), ("--total-batch-size=64", "batches"), ("--data=x", "data")]
)
def test_more_may_not_make_the_sides_unlike(place, monkeypatch, more, own):
    monkeypatch.setattr(equal_tokens, "more", f"--compile=off {more}")
    with pytest.raises(UserError, match=f"give --{own} to this command"):
        equal_tokens.check_settings()


@pytest.mark.parametrize(("plot", "why"), [("no/a.png", "in no folder"), ("a.text", "no picture")])
def test_a_picture_that_could_not_be_drawn_is_refused_before_the_runs(place, monkeypatch, plot, why):
    monkeypatch.setattr(equal_tokens, "plot", plot)
    with pytest.raises(UserError, match=f"--plot={plot} is {why}"):
        equal_tokens.check_settings()


@pytest.mark.parametrize("text", ["4,", "0", "4,-6", "four"])
def test_a_depth_that_is_none_is_refused(text):
    with pytest.raises(UserError, match=r"--depths=.* positive whole numbers"):
        equal_tokens.numbers("depths", text)
    assert equal_tokens.numbers("depths", "4, 06,4") == [4, 6] and equal_tokens.numbers("batches", None) == []


def test_other_sources_or_settings_are_another_run(place, monkeypatch):
    ours, theirs = Run("ours", 4, 256, 0), Run("peer", 4, 256, 0)
    before = ours.folder, theirs.folder
    monkeypatch.setattr(equal_tokens, "sources", {"ours": "changed", "peer": "b"})
    assert ours.folder != before[0] and theirs.folder == before[1]
    monkeypatch.setattr(equal_tokens, "dtype", "bfloat16")
    assert theirs.folder != before[1]


def test_checkpoints_stay_until_the_result_is_written(trained, monkeypatch):
    run = Run("ours", 4, 256, 0)

    def full(path, content):
        raise UserError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(UserError):
        patch.setattr(equal_tokens, "write_whole", full)
        run.train()
    assert len(list(run.folder.glob("step_*"))) == 2
    run.train()
    assert run.result and not list(run.folder.glob("step_*"))
