"""The race gives both sides the same text and time, and scores both in the same way."""

import math
import random

import fake_peer
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ROOT, disk, names_in

from experiments import peer_run, race_score, race_speed
from nanochat import UserError
from nanochat.data.parquet import Documents
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import Tokenizer, train
from nanochat.data.validation import ValidationBatches


def slow_bits_per_byte(table, documents, bos, length, token_bytes, positions) -> float:
    """Token by token, with a model that sees the token before and the position in the row."""
    nats, scored_bytes = 0.0, 0
    for document in documents:
        for i, token in enumerate(document):
            before = bos if i % length == 0 else document[i - 1]
            if i % length in positions:
                nats -= math.log(table[i % length][before][token])
                scored_bytes += token_bytes[token]
    return nats / math.log(2) / scored_bytes


def test_every_token_is_scored_once_in_rows_that_begin_with_bos():
    draw, vocab, bos, length = random.Random(0), 12, 11, 20
    documents = [[draw.randrange(11) for _ in range(n)] for n in (1, 2, 19, 20, 21, 40, 41, 7, 7, 95)]
    token_bytes = [draw.randrange(1, 6) for _ in range(11)] + [0]
    probabilities = torch.rand(length, vocab, vocab, generator=torch.Generator().manual_seed(0)) + 0.1
    probabilities /= probabilities.sum(-1, keepdim=True)

    def losses(inputs, targets):
        assert 2 <= inputs.shape[1] <= length and (inputs[:, 0] == bos).all()
        positions = torch.arange(inputs.shape[1])
        return -probabilities[positions, inputs, targets].log().flatten()  # of padding too: some number

    tokens = np.array([token for document in documents for token in (bos, *document)])
    job = {"batches": ValidationBatches(tokens, length, batch_size=3), "length": length}
    found = race_score.bits_per_byte(losses, job | {"token_bytes": torch.tensor(token_bytes)})
    found = {"1-20": found["bpb"]} | found["by_position"]
    for name, positions in (("1-20", range(20)), ("1-16", range(16)), ("17-64", range(16, 20))):
        slow = slow_bits_per_byte(probabilities.tolist(), documents, bos, length, token_bytes, positions)
        assert found.pop(name) == pytest.approx(slow, rel=1e-6)
    assert not found


def test_the_text_to_score_is_whole_or_its_lack_is_told(tmp_path):
    text = tmp_path / "text"
    for folder in ("base_data_climbmix", "tokenizer"):
        (text / folder).mkdir(parents=True)
    shard = text / "base_data_climbmix" / peer_run.VALIDATION
    pq.write_table(pa.table({"text": ["many words " * 9000]}), shard)
    train(["words"], 266).save(text / "tokenizer" / "tokenizer.json")
    with disk(tmp_path / "disk", "64k") as folder:
        (folder / "job.pt").write_text("the old one")
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
            race_score.write_job(text, folder, 16)
        assert (folder / "job.pt").read_text() == "the old one" and names_in(folder) == ["job.pt"]


def test_a_run_of_so_many_steps_takes_the_time_asked_for():
    """9 s to the end of the first step, 2 s of them the step itself. The end takes 4 s more."""
    done = [9.0 + 2 * i for i in range(31)]
    run = peer_run.Run(0, done[-1] + 4, 0, [], 0.0, step_done_s=done)
    steps = race_speed.steps_in(5, run)
    assert 300 - 2 < 7 + 2 * steps + 4 <= 300
    assert race_speed.steps_in(0.01, run) == 3  # too short for any: a few


def test_the_peer_races_with_what_was_best_in_short_runs_and_it_is_not_looked_for_twice(
    tmp_path, monkeypatch, capsys
):
    fake_peer.checkout(tmp_path)
    bpb = {(4, 48, "bfloat16"): 1.5, (2, 48, "bfloat16"): 1.4, (8, 48, "bfloat16"): 1.9,
           (2, 64, "bfloat16"): 1.3, (2, 64, "float32"): 1.35}  # fmt: skip
    asked = []

    def lap(race, found, minutes, before):
        settings = found["settings"]
        assert settings["total_batch_size"] == 512 * settings["device_batch_size"] and minutes == 2
        asked.append((settings["device_batch_size"], settings["aspect_ratio"], found["dtype"]))
        run = peer_run.Run(0, 1, 0, [], 0.0, step_tok_per_sec=[1.0])
        return race_speed.Lap(1, 1, 0, [(1, 9.9), (1, bpb[asked[-1]])]), run

    monkeypatch.setattr(race_speed, "peer_trial", lambda *_: None)
    monkeypatch.setattr(race_speed, "peer_lap", lap)
    shape = {"depth": 4, "aspect_ratio": 48, "head_dim": 64, "max_seq_len": 512}
    race = race_speed.Race(tmp_path, tmp_path, "", tmp_path, 8, tmp_path, shape)
    best = race_speed.best_settings(race)
    assert sorted(asked) == sorted(bpb) and best["dtype"] == "bfloat16"
    expected = shape | {"aspect_ratio": 64, "device_batch_size": 2, "total_batch_size": 1024}
    assert best["settings"] == expected and len(best["tried"]) == 5
    assert race_speed.best_settings(race) == best and len(asked) == 5
    race.minutes = 3
    with pytest.raises(AssertionError):  # another time: other runs, of another length
        race_speed.best_settings(race)


def test_ours_trains_on_the_peers_device(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_run, "our_settings", lambda text: {})
    race = race_speed.Race(tmp_path, tmp_path, "runs/laptop.py", tmp_path, 8, tmp_path, {})
    assert "--device_type=cpu" in race_speed.our_command(race, tmp_path)


def test_the_ratio_is_of_runs_of_the_same_round():
    def laps(*values):
        return [race_speed.Lap(60, 1000 * i, i * 10**9, [(50, v)]) for i, v in enumerate(values, start=1)]

    best = {"settings": {"depth": 4, "aspect_ratio": 48, "total_batch_size": 2048}, "dtype": "float32"}
    found = race_speed.results({"ours": laps(1, 2, 3), "peer": laps(4, 4, 5)}, best)
    assert found["ours_over_peer"] == {"median": 0.5, "of_each_round": [0.25, 0.5, 0.6]}
    assert found["ours"] == {"bpb": 2, "seconds": 60, "tokens": 2000, "peak_memory_gb": 3}
    assert found["peer"]["bpb"] == 4 and "2048 tokens a step, float32" in found["peer"]["settings"]


@pytest.mark.slow
def test_a_race_with_a_tiny_peer(tmp_path, monkeypatch):
    for i in range(200):
        path = tmp_path / "texts" / f"{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"def f{j}(a):\n    return a * {i * j % 7}\n\n" for j in range(i % 60 + 1)))
    peer = fake_peer.checkout(tmp_path / "peer")
    torch.save({"vocab": torch.tensor(300.0)}, peer / "model.pt")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "depth = 1\naspect_ratio = 32\nhead_dim = 32\nmax_seq_len = 32\ntotal_batch_size = 128\n"
        "dtype = 'float32'\ncompile = 'off'\nnum_iterations = 10_000\n"
    )
    monkeypatch.setattr(race_speed, "ROWS", (2,))
    monkeypatch.chdir(tmp_path)  # where all names of the command lead
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    settings = {"peer": "peer", "base_dir": "base", "data": "texts", "recipe": "recipe.py"}
    settings |= {"vocab_size": 300, "minutes": 0.4, "rounds": 1}
    found = race_speed.bench(settings | {"folder": str(tmp_path)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "peer", "recipe.py", "texts"]
    dataset = open_dataset(tmp_path / "texts", base_dir=tmp_path / "base")
    (text,) = (tmp_path / "base" / "tokenizers").glob("*/peer-*")
    tokenizer = Tokenizer.load(text / "tokenizer" / "tokenizer.json")
    val = "".join(Documents(dataset.val_shards))
    documents = list(Documents([text / "base_data_climbmix" / peer_run.VALIDATION]))
    assert sum(map(len, documents)) == len(val)
    uniform = sum(map(len, map(tokenizer.encode, documents))) * math.log2(300) / len(val.encode())
    assert found["peer"]["bpb"] == pytest.approx(uniform, rel=1e-6)
    assert 0 < found["ours"]["bpb"] < 0.9 * uniform  # it has learnt something
    assert found["ours_over_peer"]["median"] == pytest.approx(found["ours"]["bpb"] / uniform, rel=1e-6)
    for side in ("ours", "peer"):
        points = found[f"{side}, round 1"]["points"]
        assert points and points == sorted(points)
        assert points[-1][0] <= found[side]["seconds"]
    assert found["peer"]["seconds"] == pytest.approx(24, rel=0.3)
