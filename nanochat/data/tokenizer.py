"""Text to token ids and back: a byte-level BPE, encoded by `tiktoken` and kept as one JSON file.

A vocabulary is a list of byte strings and, after them, the special tokens. The index of a token is its id;
among byte strings it is the merge priority too. All 256 bytes are tokens, so any text can be encoded. A
regular expression cuts the text first, so no token spans a word boundary; then pairs merge within each cut.

    tokenizer = train(texts, vocab_size=4096)
    tokenizer.save(path); tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode("hello")             # (n,) uint32; text that looks like a special token stays text
"""

import base64
import contextlib
import functools
import hashlib
import itertools
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nanochat import UserError
from nanochat.data.bpe import train_tokens
from nanochat.data.parquet import without_surrogates
from nanochat.files import replacing, user_path
from nanochat.terminal import first_line

# The pattern of GPT-4 (cl100k_base), but it cuts numbers after two digits, not three: a thousand tokens for
# three-digit numbers are too many for a small vocabulary.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

# Reserved from the start, so that a base model can learn conversations later with the same embedding.
SPECIAL_TOKENS = (
    "<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>",
    "<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>",
)  # fmt: skip

FORMAT = "nanochat-tokenizer-1"
AUTO_MAX_CHARS = 500_000_000  # characters that train a tokenizer at the first use of a data set

TIKTOKEN_HOST = "https://openaipublic.blob.core.windows.net"  # tiktoken gets its files here at the first use
TIMEOUT_S = 15  # seconds for the connection, and between two pieces of a file
_LONG_BLANK = re.compile(r"\s{20000}")


class Tokenizer:
    """A vocabulary with its encoder.

    `vocab_size` counts all ids, special tokens included; `bos_id` is the id of `<|bos|>`, which begins every
    document. Tokenizers with the same `fingerprint` give the same ids; `name` is only a label.
    """

    def __init__(
        self,
        name: str,
        tokens: Sequence[bytes],
        pattern: str = PATTERN,
        specials: Sequence[str] = SPECIAL_TOKENS,
    ):
        """`tokens[i]` is the byte string of id i, in merge order; `specials` get the ids after them.

        Raises ValueError if a byte is missing, or a token stands twice or is empty.
        """
        import tiktoken

        self.name = name
        self.pattern = pattern
        self.tokens = list(tokens)
        self.special_tokens = {text: len(self.tokens) + i for i, text in enumerate(specials)}
        self.vocab_size = len(self.tokens) + len(self.special_tokens)
        self.bos_id = self.special_tokens["<|bos|>"]
        content = json.dumps([pattern, list(specials), [token.hex() for token in self.tokens]])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        ranks = {token: i for i, token in enumerate(self.tokens)}
        if len(ranks) != len(self.tokens) or any(bytes([b]) not in ranks for b in range(256)):
            raise ValueError("a vocabulary needs all 256 bytes and no token twice")
        if b"" in ranks or "" in self.special_tokens:
            raise ValueError("a token is empty")
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )

    def copy(self) -> "Tokenizer":
        """An equal tokenizer for another thread.

        In Rust, the first thread that uses a regular expression owns its scratch memory; others take a lock
        for each match. With a copy of its own a thread encodes 1.45 times as fast.
        """
        return Tokenizer(self.name, self.tokens, self.pattern, list(self.special_tokens))

    # -- text to ids and back

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, (n,) uint32, read-only, without special tokens; lone surrogates become U+FFFD."""
        try:  # Rust makes the array: no Python integers
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self.encode(without_surrogates(text))
        except ValueError as error:
            # tiktoken's regular expression fails on a few hundred thousand blanks in a row
            cuts = [0, *(match.end() for match in _LONG_BLANK.finditer(text)), len(text)]
            if cuts[1] == len(text):  # no cut, or one at the end
                raise UserError(
                    f"the pattern of tokenizer {self.name} fails on a text ({first_line(error)}); use another"
                ) from error
            return np.concatenate([self.encode(text[a:b]) for a, b in itertools.pairwise(cuts)])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a list, array or tensor of ids. Broken UTF-8 becomes U+FFFD."""
        return self._encoding.decode([int(i) for i in ids], errors="replace")

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each token, (vocab_size,) int64; special tokens have 0. For bits per byte."""
        sizes = [*map(len, self.tokens), *[0] * len(self.special_tokens)]
        return np.array(sizes, dtype=np.int64)

    # -- the file

    def to_bytes(self) -> bytes:
        """The content of the JSON file."""
        data = {
            "format": FORMAT,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "tokens_base64": [base64.b64encode(token).decode() for token in self.tokens],
        }
        return json.dumps(data, indent=0).encode()

    def save(self, path: str | Path) -> None:
        """Write the JSON file, complete or not at all. Raises UserError if it cannot be written."""
        with place_for(path) as file:
            file.write(self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read the JSON file. Raises UserError if it is missing, unreadable or damaged."""
        source, advice = f"tokenizer {path}", "train it again or copy it from a checkpoint"
        try:
            data = json.loads(Path(path).read_bytes())
            if data["format"] != FORMAT:
                raise UserError(f"{source} has format {data['format']!r}, not {FORMAT!r}; {advice}")
            specials = data["special_tokens"]
            tokens = [base64.b64decode(token, validate=True) for token in data["tokens_base64"]]
            if list(specials.values()) != list(range(len(tokens), len(tokens) + len(specials))):
                raise ValueError("special tokens are not the last ids")
            tokenizer = cls(str(data["name"]), tokens, data["pattern"], list(specials))
            fingerprint = data["fingerprint"]
        except UserError:
            raise
        except OSError as error:
            raise UserError(
                f"no tokenizer can be read at {path} ({error.strerror}); give the path of its JSON file"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{error!r:.200}"
            raise UserError(f"{source} is not a readable tokenizer ({reason}); {advice}") from error
        if tokenizer.fingerprint != fingerprint:
            raise UserError(f"{source} is damaged: its content does not match its fingerprint; {advice}")
        return tokenizer


@contextlib.contextmanager
def place_for(path: str | Path) -> Iterator[BinaryIO]:
    """files.replacing for a tokenizer's JSON file, whose folder it makes. Raises UserError if the file cannot
    be written: before the block, which may take minutes, unless the disk becomes full."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); make room, or choose another place for it"
        ) from error


def train(texts: Iterable[str], vocab_size: int, *, max_chars: int = -1, exact: bool = True) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` ids, special tokens included, with a bar on stderr.

    max_chars: train on so many characters (-1: all). exact: refuse a text that yields fewer ids; else the
    tokenizer has fewer. The same texts give the same tokenizer, on any number of threads. Raises UserError,
    also if `vocab_size` is below the number of bytes and special tokens.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size {vocab_size} is too small; use at least {smallest} (all bytes and special tokens)"
        )
    tokens = train_tokens(texts, vocab_size - len(SPECIAL_TOKENS), PATTERN, max_chars)
    size = len(tokens) + len(SPECIAL_TOKENS)
    if exact and size != vocab_size:
        raise UserError(
            f"vocab_size {vocab_size} is more than this text yields; use at most {size} or train on more text"
        )
    return Tokenizer(f"bpe{size}", tokens)


def open_tokenizer(
    setting: str, vocab_size: int, folder: Path, texts: Callable[[], Iterable[str]] | None, *,
    exact: bool = True, network: bool = True,
) -> Tokenizer:  # fmt: skip
    """The tokenizer of a setting: the path of a JSON file, one of tiktoken's names ("gpt2"), or "auto".

    "auto" is the tokenizer of `vocab_size` ids in `folder`, which belongs to one data set. The first use
    trains it on the documents that `texts()` yields; see `train` for `exact`. Without texts, which happens in
    a plan, it is only a name and a size. network: whether anything may be downloaded. Raises UserError if the
    tokenizer cannot be read, downloaded, trained or written.
    """
    import tiktoken

    if setting in tiktoken.list_encoding_names():
        return from_tiktoken(setting, network)
    if setting != "auto":
        return Tokenizer.load(user_path("tokenizer", setting))
    if texts is None:
        return types.SimpleNamespace(name="not trained yet", vocab_size=vocab_size, fingerprint="unknown")
    path = tokenizer_path(folder, vocab_size)
    if path.exists():
        tokenizer = Tokenizer.load(path)
        if exact and tokenizer.vocab_size != vocab_size:
            raise UserError(
                f"vocab_size {vocab_size} is more than this text yields; use at most {tokenizer.vocab_size}"
            )
        return tokenizer
    with place_for(path) as file:
        tokenizer = train(texts(), vocab_size, max_chars=AUTO_MAX_CHARS, exact=exact)
        file.write(tokenizer.to_bytes())
    return tokenizer


def tokenizer_path(folder: Path, vocab_size: int) -> Path:
    """The file of a data set's own tokenizer; `folder` is Dataset.tokenizer_folder."""
    return Path(folder) / f"tokenizer-{vocab_size}.json"


def from_tiktoken(name: str, network: bool = True) -> Tokenizer:
    """One of tiktoken's encodings, with our special tokens instead of its own.

    Raises UserError if its files are not on this machine and cannot be downloaded, or must not (network).
    """
    from unittest import mock

    import requests
    import tiktoken

    get, where = functools.partial(requests.get, timeout=TIMEOUT_S), TIKTOKEN_HOST
    if not network:
        get, where = mock.Mock(side_effect=ConnectionError), "anywhere, since --plan uses no network"
    try:
        # By itself tiktoken waits for a blocked network without end
        with mock.patch("requests.get", get):
            encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network, or a damaged download
        raise UserError(
            f"the encoding {name} is not on this machine and cannot be had from {where} "
            f"({type(error).__name__}); connect to the internet once, point TIKTOKEN_CACHE_DIR at a folder "
            "that has it, or use --tokenizer=auto"
        ) from error
    ranks = encoding._mergeable_ranks
    return Tokenizer(name, sorted(ranks, key=ranks.__getitem__), encoding._pat_str)
