"""At equal tokens both sides get the same text, and each of our runs is set beside the peer's best."""

import json

import pytest

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
        "sources": {"ours": "a", "peer": "b"},
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(equal_tokens, name, value, raising=False)
    monkeypatch.setattr(peer_run, "our_settings", lambda text: {"data": text, "vocab_size": 300})
    return tmp_path


def keep(run: Run, bpb: float):
    run.folder.mkdir(parents=True)
    points = [(512, 1.0, bpb + 1), (1024, 2.0, bpb)]
    (run.folder / "result.json").write_text(json.dumps({"points": points, "tok_per_sec": 512.0}))


def test_both_sides_get_the_same_tokens_rows_and_precision(place, monkeypatch):
    command = [str(argument) for argument in equal_tokens.our_command(Run("ours", 3, 256, 7))]
    asked = {"--depth=3", "--total_batch_size=256", "--num_iterations=4", "--max_seq_len=64", "--seed=7"}
    assert asked | {"--dtype=float32", "--save_every=2", "--vocab_size=300", "--compile=off"} <= set(command)

    def train(checkout, text, folder, settings, dtype):
        assert (checkout, text, dtype) == (place / "peer", place / "text", "float32")
        assert (settings["depth"], settings["total_batch_size"], settings["num_iterations"]) == (3, 256, 4)
        assert (settings["max_seq_len"], settings["device_batch_size"], settings["save_every"]) == (64, 4, 2)
        return peer_run.Run(0, 9.0, 1, [], 0.0, [256.0, 128.0], [1.0, 3.0])

    monkeypatch.setattr(peer_run, "train", train)
    done_s, checkpoints = equal_tokens.train_peer(Run("peer", 3, 256, 0))
    assert done_s == [1.0, 3.0] and checkpoints == []


def test_ours_is_set_beside_the_best_of_the_peers_batches_at_the_same_depth(place):
    runs = [Run("peer", 4, 256, 0), Run("peer", 4, 512, 0), Run("peer", 6, 256, 0)]
    runs += [Run("ours", 4, 256, 0), Run("ours", 4, 256, 1), Run("ours", 6, 256, 0)]
    for run, bpb in zip(runs, (2.0, 1.6, 4.0, 0.7, 0.9), strict=False):  # the last has no result yet
        keep(run, bpb)
    assert equal_tokens.best_of_peer(runs, 4) == runs[1]
    cells = [line.strip("| ").split(" | ") for line in equal_tokens.table(runs).splitlines()[2:]]
    assert [(row[0], row[1], row[5], row[6]) for row in cells] == [
        ("karpathy/nanochat", "4", "2.0000", "1.250"),
        ("karpathy/nanochat", "4", "1.6000", "1.000"),
        ("karpathy/nanochat", "6", "4.0000", "1.000"),
        ("this project", "4", "0.8000 ± 0.1414", "0.500"),
    ]
    equal_tokens.draw(runs, 256, place / "tokens.png")
    assert (place / "tokens.png").stat().st_size > 5000


def test_what_has_a_result_is_not_trained_again_and_a_failure_stops_no_other_run(place, monkeypatch, capsys):
    trained = []

    def train(run):
        trained.append(run)
        if run.batch == 512:
            raise UserError("base_train failed: no memory")
        checkpoints = [run.folder / "step_000002", run.folder / "step_000004"]
        for checkpoint in checkpoints:
            checkpoint.mkdir()
        return [1.0, 2.0, 3.0, 4.0], checkpoints

    monkeypatch.setattr(equal_tokens, "OURS_OR_PEER", {"ours": train, "peer": train})
    monkeypatch.setattr(race_score, "score", lambda side, checkpoints, *_: [2.5, 1.5])
    kept, bad, good = Run("peer", 4, 256, 0), Run("ours", 4, 512, 0), Run("ours", 4, 256, 0)
    keep(kept, 2.0)
    assert equal_tokens.train_all([kept, bad, good], 1) == [bad]
    assert trained == [bad, good]
    assert "ours, depth 4, 512 tokens a step, seed 0: base_train failed" in capsys.readouterr().err
    assert good.result == {"points": [[512, 2.0, 2.5], [1024, 4.0, 1.5]], "tok_per_sec": 256.0}
    assert not list(good.folder.glob("step_*"))  # no checkpoint is left
    assert equal_tokens.train_all([kept, bad, good], 1) == [bad] and trained == [bad, good, bad]


def test_other_sources_or_settings_are_another_run(place, monkeypatch):
    ours, theirs = Run("ours", 4, 256, 0), Run("peer", 4, 256, 0)
    before = ours.folder, theirs.folder
    monkeypatch.setattr(equal_tokens, "sources", {"ours": "changed", "peer": "b"})
    assert ours.folder != before[0] and theirs.folder == before[1]
    monkeypatch.setattr(equal_tokens, "dtype", "bfloat16")
    assert theirs.folder != before[1]
