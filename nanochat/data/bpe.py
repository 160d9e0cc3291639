"""Training of a byte-level BPE vocabulary with the library `tokenizers`.

BPE starts from the 256 bytes. It joins the most frequent pair of neighbours to a new token, again and again.

The library does not react to signals while it trains. So it runs in a process of its own (`python -m
nanochat.data.bpe`), which gets the texts through a pipe and can be ended at any moment. If the process that
started it dies, it ends too.
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

# The time to train grows with the square of the longest run that the pattern leaves whole, so the training
# cuts runs. Longer ones are DNA, or one letter again and again: no word that a token should learn. The
# longest run of the embedded text has 200 characters. The encoder cuts nothing.
LONGEST_RUN = 256  # characters
ROOT = Path(__file__).parents[2]  # the folder that has the package nanochat


def train_tokens(
    texts: Iterable[str], max_tokens: int, pattern: str, max_chars: int = -1, show_progress: bool = False
) -> list[bytes]:
    """The byte strings of a vocabulary, in merge order: 256 single bytes, then up to max_tokens - 256 merges.

    The regular expression `pattern` cuts the text first, so that no token spans a word boundary. Training
    stops after `max_chars` characters (-1: all). The same texts give the same tokens on any number of
    threads. Raises UserError if the process that trains is killed, for example because memory is short.
    """
    command = [sys.executable, "-m", "nanochat.data.bpe"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # A session of its own: Ctrl-C in a terminal goes to this process alone, which then ends the other
    documents = len(texts) if hasattr(texts, "__len__") else None
    progress = bar("training the tokenizer", " documents", documents, hidden=not show_progress)
    with progress, subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as child:
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended; its answer or its status says why
                _send(child.stdin, [max_tokens, pattern], _limited(texts, max_chars, progress))
                progress.set_description_str("training the tokenizer, now joining pairs")
            answer = child.stdout.read()
        finally:
            child.kill()
            with contextlib.suppress(OSError):
                child.stdin.close()
    answer = json.loads(answer) if answer.endswith(b"\n") else {}
    if "tokens" not in answer:
        why = f"failed ({answer['error']})" if answer else _ending(child.returncode)
        raise UserError(
            f"the training of the tokenizer {why}; free memory, use less text or a smaller vocab_size"
        )
    return [bytes.fromhex(token) for token in answer["tokens"]]


def _limited(texts: Iterable[str], max_chars: int, progress) -> Iterator[str]:
    """The texts up to `max_chars` characters in all (-1: all of them), as valid Unicode. The bar `progress`
    counts them; its total becomes the number of texts that have `max_chars` characters, if it is less."""
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


def _send(pipe: BinaryIO, arguments: list, texts: Iterable[str]) -> None:
    """Each on a line of JSON; an empty line ends the texts."""
    for value in itertools.chain([arguments], texts):
        pipe.write(json.dumps(value).encode() + b"\n")
    pipe.write(b"\n")
    pipe.flush()


def _ending(status: int) -> str:
    return f"was killed ({signal.Signals(-status).name})" if status < 0 else f"ended with status {status}"


# -- the process that trains


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where sessions do not exist, Ctrl-C comes here too
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
    """The texts that _send() sends. After the last one a thread waits for the death of the sender."""
    for line in iter(pipe.readline, b"\n"):
        if not line.endswith(b"\n"):  # the sender has died
            os._exit(1)
        yield json.loads(line)

    def end_with_the_sender():
        pipe.read(1)  # returns when the sender closes the pipe or dies
        os._exit(1)

    threading.Thread(target=end_with_the_sender, daemon=True).start()


def _train(texts: Iterator[str], max_tokens: int, pattern: str) -> list[bytes]:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.Split(Regex(f"(?m:.{{1,{LONGEST_RUN}}})"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=max_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    byte_of = _bytes_of_characters()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[character] for character in text) for text, _ in vocabulary if len(text) > 1]
    return [bytes([b]) for b in range(256)] + merged


def _bytes_of_characters() -> dict[str, int]:
    """{character: byte} for the printable characters that GPT-2, and so `tokenizers`, writes for bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


if __name__ == "__main__":
    _main()
