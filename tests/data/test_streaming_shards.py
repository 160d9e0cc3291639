"""The stream of public data, whose shards may arrive while a run reads them: that changes no row."""

import itertools
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import BOS, Corpus, Numbers, run
from shards import flat
from test_loader import slow_rows
from watch import Watch

from nanochat import UserError
from nanochat.data import packing
from nanochat.data import streaming_shards as arriving
from nanochat.data.loader import TrainLoader, merge_states
from nanochat.data.streaming_shards import Arrival, ArrivingShards

LENGTHS = [(7 * i) % 23 + 1 for i in range(240)]


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Corpus:
    """6 shards of 4 row groups of 10 documents."""
    monkeypatch.setattr(arriving, "LOOK_S", 0.01)
    return Corpus(tmp_path / "in", LENGTHS, 10, 6)


@pytest.fixture
def short(monkeypatch):
    """Lanes that keep 4 documents: all of them together keep less than a shard, as in real runs."""
    monkeypatch.setattr(packing, "BUFFER_PIECES", 4)


def shards_of(corpus: Corpus, patience_s: float = 60) -> ArrivingShards:
    return ArrivingShards(corpus.shards, Arrival(corpus.shards[0].parent, "command", patience_s))


def hide(corpus: Corpus, numbers) -> list[Path]:
    """Take shards away; `bring` puts them back."""
    hidden = [corpus.shards[number] for number in numbers]
    for path in hidden:
        path.rename(path.with_suffix(".hidden"))
    return hidden


def bring(path: Path) -> None:
    path.with_suffix(".hidden").rename(path)


@pytest.mark.parametrize("seed", [0, 3])
def test_one_shard_after_the_other_is_dealt_and_packed_as_the_slow_packer_does(corpus, seed):
    rows, _ = run(shards_of(corpus), 120, n_lanes=4, T=12, seed=seed)
    by_shard = flat((4 * s + packing.permutation(4, seed, 0, -1 - 4 * s)).tolist() for s in range(6))
    orders = [by_shard, *(packing.permutation(24, seed, epoch, 0).tolist() for epoch in (1, 2))]
    epochs = [corpus.deal(4, 12, seed, epoch, order) for epoch, order in enumerate(orders)]
    for lane in range(4):
        expected = slow_rows((epoch[lane] for epoch in epochs), 13)
        assert rows[:, lane].tolist() == list(itertools.islice(expected, 120))
    tokens = rows[:, :, 1:][rows[:, :, 1:] != BOS]
    assert len(tokens) > 1.5 * sum(LENGTHS)  # far into the second epoch


def test_the_rows_are_the_same_when_the_shards_come_late(corpus, short, monkeypatch):
    monkeypatch.setattr(arriving, "MENTION_S", 0)
    expected, states = run(shards_of(corpus), 90, n_lanes=4, T=12)
    shards, hidden = shards_of(corpus), iter(hide(corpus, range(1, 6)))
    shards.arrival.say = lambda line: bring(next(hidden))  # it is said that the loader waits for this one
    with TrainLoader(shards, Numbers(), 4, 12, 4) as loader:
        batches = [next(loader) for _ in range(90)]
        assert not list(hidden) and loader.state() == states[0]
    rows = [torch.cat([inputs, targets[:, -1:]], dim=1).numpy() for inputs, targets in batches]
    assert (np.stack(rows) == expected).all()


@pytest.mark.parametrize("before, after", [(1, 1), (1, 2), (4, 1)])
def test_a_restart_anywhere_with_any_number_of_processes_changes_no_row(corpus, before, after):
    expected, _ = run(shards_of(corpus), 100, n_lanes=4, T=12)
    for at in (0, 1, 17, 43, 80):
        first, states = run(shards_of(corpus), at, n_lanes=4, T=12, W=before)
        state = json.loads(json.dumps(merge_states(states)))
        rest, _ = run(shards_of(corpus), 100 - at, n_lanes=4, T=12, W=after, state=state)
        assert (np.concatenate([first, rest]) == expected).all()


def test_a_position_needs_no_shard_behind_it(corpus, short):
    expected, _ = run(shards_of(corpus), 12, n_lanes=4, T=12)
    _, states = run(shards_of(corpus), 8, n_lanes=4, T=12)
    hide(corpus, range(3, 6))
    rest, _ = run(shards_of(corpus), 4, n_lanes=4, T=12, state=states[0])
    assert (rest == expected[8:]).all()


def test_a_position_of_another_number_of_shards_is_refused(corpus):
    _, states = run(shards_of(corpus), 2, n_lanes=4, T=12)
    fewer = ArrivingShards(corpus.shards[:3], shards_of(corpus).arrival)
    with pytest.raises(UserError, match="is for shards 6, this run has 3"):
        run(fewer, 1, n_lanes=4, T=12, state=states[0])


class Stop:
    """A StopSignal that a test sets."""

    name = ""

    def ask(self, reason: str):
        self.name = reason


def test_a_shard_that_nobody_brings_is_missed_at_once(corpus):
    hide(corpus, [0])
    with pytest.raises(UserError, match=r"s0\.parquet is missing; get it: command; after that the same"):
        run(shards_of(corpus, patience_s=0), 1, n_lanes=4, T=12)


def test_a_signal_ends_the_wait_after_the_step_that_is_ready(corpus, short):
    hide(corpus, range(1, 6))
    shards, stop = shards_of(corpus, patience_s=300), Stop()
    shards.arrival.belong_to(False, stop, 300)
    with TrainLoader(shards, Numbers(), 4, 12, 4) as loader:
        threading.Timer(0.3, lambda: stop.ask("SIGTERM")).start()
        while not stop.name:  # it is heard after a step
            next(loader)
    assert stop.name == "SIGTERM" and not shards.arrival.given_up


def test_a_loader_that_waits_can_be_closed(corpus, short):
    hide(corpus, range(1, 6))
    loader = TrainLoader(shards_of(corpus), Numbers(), 4, 12, 4)
    time.sleep(0.1)
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    closing.join(300)
    assert not closing.is_alive()


class BetweenLooks:
    """The event that a wait looks at. Between two looks 0.9 s pass, and the next thing happens."""

    def __init__(self, monkeypatch, things):
        self.watch, self.things = Watch(), things
        monkeypatch.setattr(arriving, "time", self.watch)

    def wait(self, seconds: float):
        self.watch.now += 0.9
        next(self.things)


@pytest.mark.parametrize("sizes", [range(1, 16), [*range(8), *range(8)]], ids=["steady", "breaks"])
def test_a_wait_lasts_while_bytes_come_and_is_mentioned_once(tmp_path, monkeypatch, capsys, sizes):
    shard, part = tmp_path / "shard_00001.parquet", tmp_path / ".cache/huggingface/download/a.incomplete"
    part.parent.mkdir(parents=True)
    arrival = Arrival(tmp_path, "command", patience_s=1)
    arrival.belong_to(True, Stop(), longest_s=60)

    def download():
        for size in sizes:
            yield part.write_bytes(b"x" * size)
        yield part.rename(shard)

    arrival.wait(shard, BetweenLooks(monkeypatch, download()))  # no error
    said = capsys.readouterr().out
    assert said == "waiting for shard_00001.parquet: training is faster than the download\n"


def test_several_processes_do_not_wait_for_each_other_too_long_even_while_bytes_come(tmp_path, monkeypatch):
    arrival, bytes_come = Arrival(tmp_path, "command", patience_s=60), itertools.count()
    arrival.belong_to(False, Stop(), longest_s=2)
    arrival.problem = "no connection"
    monkeypatch.setattr(arrival, "_bytes", bytes_come.__next__)
    with pytest.raises(UserError, match=r"has not come for 3 s \(no connection\); get it: command"):
        arrival.wait(tmp_path / "shard_00001.parquet", BetweenLooks(monkeypatch, iter(range(100))))
