"""Training of a vocabulary: bounded in time whatever the text, stopped by a signal, and never left behind."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from helpers import assert_ended, python, wait_until

from nanochat import UserError
from nanochat.data.tokenizer import train

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds children in /proc")


def dna(n: int) -> str:
    return "".join(random.Random(0).choices("acgt", k=n))


def children(process: int) -> list[int]:
    return [int(i) for i in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.parametrize("text", ["a" * 400_000, dna(200_000), "漢" * 200_000])
def test_a_long_unbroken_run_trains_in_seconds(text):
    began = os.times()
    tokenizer = train([text], 4096, exact=False)
    ended = os.times()
    seconds = ended.children_user - began.children_user  # of the process that trains, whatever else runs
    assert 0 < seconds < 15  # about 1 s; 30 s and more without cuts
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_only_runs_of_more_than_256_characters_are_cut_and_only_for_the_training():
    run = "ab" * 128
    joined, apart = (train(texts, 300, exact=False) for texts in ([run * 50], [run] * 50))
    assert joined.tokens == apart.tokens
    for whole in (run, "漢" * 256, "\t" * 256, "." * 256):  # its longest token has all of it
        assert whole.encode() in train([whole] * 2, 4096, exact=False).tokens


@needs_proc
def test_the_training_process_ends_with_the_process_that_started_it():
    script = "from nanochat.data.tokenizer import train; print('begin', flush=True)\n"
    script += "import random; train([''.join(random.choices('acgt', k=8_000_000))], 60_000)"
    with python(script) as parent:
        assert parent.stdout.readline() == "begin\n"
        wait_until(lambda: children(parent.pid))
        found = children(parent.pid)
        time.sleep(4)  # now it merges
    assert_ended(*found)


@needs_proc
def test_a_training_process_that_dies_is_one_sentence():
    before = children(os.getpid())

    def texts():
        yield "some text " * 1000
        for child in set(children(os.getpid())) - set(before):
            os.kill(child, signal.SIGKILL)
        for _ in range(1000):
            yield "more text " * 1000

    with pytest.raises(UserError, match=r"training of the tokenizer was killed \(SIGKILL\); free memory"):
        train(texts(), 300)


def test_an_error_in_the_texts_is_raised_as_it_is():
    def texts():
        yield "some text"
        raise UserError("this shard is damaged")

    with pytest.raises(UserError, match="this shard is damaged"):
        train(texts(), 300)
