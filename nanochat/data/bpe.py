"""Training of a byte-level BPE vocabulary with the library `tokenizers`.

BPE starts from the 256 bytes. It merges the most frequent pair of neighbours into a new token, again and
again.

The library does not react to signals while it trains. So it runs in a child process (`python -m
nanochat.data.bpe`), which gets the texts through a pipe and can be killed at any moment. If its parent dies,
it ends too.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from nanochat import UserError
from nanochat.data.parquet import without_surrogates
from nanochat.terminal import bar, first_line

# The time to train grows with the square of the longest run that the pattern leaves whole, so training cuts
# longer runs: they are DNA, or one letter again and again, and no words. The longest run of the embedded text
# has 200 characters. The encoder cuts nothing.
LONGEST_RUN = 256  # characters
ROOT = Path(__file__).parents[2]  # the folder that has the package nanochat


def train_tokens(texts: Iterable[str], max_tokens: int, pattern: str, max_chars: int) -> list[bytes]:
    """The byte strings of a vocabulary, in merge order: 256 single bytes, then up to max_tokens - 256 merges.

    The regular expression `pattern` cuts the text first, so that no token spans a word boundary. Training
    stops after `max_chars` characters (-1: all). Raises UserError if the process that trains is killed, for
    example because memory is short.
    """
    command = [sys.executable, "-m", "nanochat.data.bpe"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    documents = len(texts) if hasattr(texts, "__len__") else None
    progress = bar("training the tokenizer", "documents", documents)
    # With a session of its own the child does not get a terminal's Ctrl-C: this process gets it and kills it
    with progress, subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as child:
        try:
            with contextlib.suppress(BrokenPipeError):  # the child has ended; its answer or status says why
                for value in itertools.chain([[max_tokens, pattern]], _limited(texts, max_chars, progress)):
                    child.stdin.write(json.dumps(value).encode() + b"\n")
                child.stdin.write(b"\n")  # the end of the texts
                child.stdin.flush()
                progress.set_description_str("training the tokenizer, now joining pairs")
            answer = child.stdout.read()
        finally:
            child.kill()
            with contextlib.suppress(OSError):
                child.stdin.close()
    answer = json.loads(answer) if answer.endswith(b"\n") else {}
    if "tokens" not in answer:
        if answer:
            why = f"failed ({answer['error']})"
        elif child.returncode < 0:
            why = f"was killed ({signal.Signals(-child.returncode).name})"
        else:
            why = f"ended with status {child.returncode}"
        raise UserError(
            f"the training of the tokenizer {why}; free memory, use less text or a smaller vocab_size"
        )
    return [bytes.fromhex(token) for token in answer["tokens"]]


def _limited(texts: Iterable[str], max_chars: int, progress) -> Iterator[str]:
    """The first `max_chars` characters of the texts (-1: all), as valid Unicode.

    `progress` counts the texts. Its total becomes an estimate of how many texts have `max_chars` characters.
    """
    chars, documents = 0, progress.total
    for number, text in enumerate(texts, start=1):
        if max_chars >= 0:
            text = text[: max_chars - chars]
        chars += len(text)
        if documents and chars and max_chars >= 0:
            progress.total = min(documents, number * max_chars // chars)
        progress.update()
        yield without_surrogates(text)
        if chars == max_chars:
            return


# -- the child process


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Windows has no sessions: Ctrl-C comes here too
    pipe = sys.stdin.buffer
    max_tokens, pattern = json.loads(pipe.readline())
    try:
        answer = {"tokens": [token.hex() for token in _train(_received(pipe), max_tokens, pattern)]}
    except BaseException as error:  # Rust's panics are not Exceptions
        answer = {"error": first_line(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)


def _received(pipe: BinaryIO) -> Iterator[str]:
    """The texts that the parent sends. After the last one, a thread waits for the parent's death."""
    for line in iter(pipe.readline, b"\n"):
        if not line.endswith(b"\n"):  # the parent has died
            os._exit(1)
        yield json.loads(line)

    def end_with_the_parent():
        pipe.read(1)  # returns when the parent closes the pipe or dies
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()


def _train(texts: Iterator[str], max_tokens: int, pattern: str) -> list[bytes]:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    cuts = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.Split(Regex(f"(?m:.{{1,{LONGEST_RUN}}})"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=max_tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)

    byte_of = {character: b for b, character in characters_of_bytes().items()}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[character] for character in text) for text, _ in vocabulary if len(text) > 1]
    return [bytes([b]) for b in range(256)] + merged


def characters_of_bytes() -> dict[int, str]:
    """{byte: character}: `tokenizers` writes each byte as a printable character, as GPT-2 does."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}


if __name__ == "__main__":
    _main()
