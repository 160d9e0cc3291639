"""Text <-> token ids: byte-level BPE, trained by `tokenizers`, encoded by `tiktoken`, kept as one JSON file.

A vocabulary is a list of byte strings whose position is their id (and their merge priority), followed by the
special tokens. Every one of the 256 bytes is in it, so any text can be written and read back. Text is first
cut by a regular expression, so that no token spans a word boundary; inside a cut, pairs merge by priority.

    tokenizer = train(texts, vocab_size=4096)
    tokenizer.save(path); tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode("hello")             # (n,) uint32; text that looks like a special token stays text
"""

import base64
import binascii
import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from nanochat import UserError

# GPT-4's split (cl100k_base), but with numbers cut into at most two digits: a small vocabulary cannot afford
# the thousand three-digit tokens.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

# Reserved from the start, so that a base model can later be taught to converse without growing its embedding.
SPECIAL_TOKENS = (
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)

FORMAT = "nanochat-tokenizer-1"
AUTO_MAX_CHARS = 500_000_000  # of text that trains a tokenizer at the first use of a data set

# The files of GPT-2's and GPT-4's encodings, which tiktoken fetches at their first use and keeps
TIKTOKEN_HOST = "https://openaipublic.blob.core.windows.net"
TIKTOKEN_FILES = {
    "gpt2": ["gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"],
    "cl100k_base": ["encodings/cl100k_base.tiktoken"],
}
_LONG_BLANK = re.compile(r"\s{20000}")


class Tokenizer:
    """A vocabulary with its encoder. `fingerprint` identifies what it does; `name` is only a label."""

    def __init__(
        self,
        name: str,
        tokens: Sequence[bytes],
        pattern: str = PATTERN,
        specials: Sequence[str] = SPECIAL_TOKENS,
    ):
        """`tokens[i]` are the bytes of id i, in merge order; `specials` get the ids after them."""
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
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:8]})"

    def copy(self) -> "Tokenizer":
        """An equal tokenizer for another thread.

        The scratch memory of a regular expression in Rust belongs to the thread that uses it first; any other
        thread takes a lock for each match. With its own copy a thread encodes 1.45 times as fast.
        """
        return Tokenizer(self.name, self.tokens, self.pattern, list(self.special_tokens))

    # -- text to ids and back

    def encode(self, text: str) -> np.ndarray:
        """Ids of ordinary text, (n,) uint32, read-only, no special token; lone surrogates become U+FFFD."""
        try:  # numpy straight from Rust: no Python integer is made
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self.encode(_without_surrogates(text))
        except ValueError:
            # tiktoken's regular expression gives up on some hundred thousand blanks in a row: cut them up.
            cuts = [0, *(match.end() for match in _LONG_BLANK.finditer(text)), len(text)]
            if len(cuts) == 2:
                raise
            return np.concatenate([self.encode(text[a:b]) for a, b in itertools.pairwise(cuts)])

    def encode_ordinary(self, text: str) -> list[int]:
        """tiktoken's own path to a list of the same ids, for comparison."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Iterable[str], num_threads: int = 1) -> list[np.ndarray]:
        """`encode` of each text; tiktoken releases the GIL, so threads help."""
        if num_threads <= 1:
            return [self.encode(text) for text in texts]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(self.encode, texts))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids (list, array or tensor); broken UTF-8 becomes U+FFFD, special tokens their own text."""
        return self._encoding.decode([int(i) for i in ids], errors="replace")

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each id stands for, (vocab_size,) int64; 0 for special tokens (bits per byte)."""
        return np.array(
            [len(token) for token in self.tokens] + [0] * len(self.special_tokens), dtype=np.int64
        )

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
        """Write the JSON file; it appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self.to_bytes())
            os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide it from other users
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def from_bytes(cls, content: bytes, source: str = "the tokenizer") -> "Tokenizer":
        """The tokenizer whose file has this content; a UserError naming `source` where it is damaged."""
        advice = "train it again or copy it from a checkpoint"
        try:
            data = json.loads(content)
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
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise UserError(f"{source} is not a readable tokenizer ({error!r}); {advice}") from error
        if tokenizer.fingerprint != fingerprint:
            raise UserError(f"{source} is damaged: its content does not match its fingerprint; {advice}")
        return tokenizer

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read the JSON file; UserError where it is missing, unreadable or damaged."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(
                f"no tokenizer can be read at {path} ({error.strerror}); give the path of its JSON file"
            ) from error
        return cls.from_bytes(content, f"tokenizer {path}")


def train(
    texts: Iterable[str],
    vocab_size: int,
    *,
    name: str | None = None,
    pattern: str = PATTERN,
    specials: Sequence[str] = SPECIAL_TOKENS,
    max_chars: int = -1,
    exact: bool = True,
    progress: bool = False,
) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` ids, specials included, on the first `max_chars` (-1: all).

    The same texts give the same tokenizer, on any number of threads. Too little text for so many ids is a
    UserError, or where not `exact` gives as many as it yields. `progress` shows a bar on stderr.
    """
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trainee

    smallest = 256 + len(specials)
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size {vocab_size} is too small; use at least {smallest} (all bytes and special tokens)"
        )
    trainee = Trainee(models.BPE())
    trainee.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trainee.train_from_iterator(_limited(texts, max_chars, progress), trainer)

    byte_of = _bytes_of_characters()
    vocabulary = sorted(trainee.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[character] for character in text) for text, _ in vocabulary if len(text) > 1]
    tokens = [bytes([b]) for b in range(256)] + merged
    if exact and len(tokens) + len(specials) != vocab_size:
        raise UserError(
            f"vocab_size {vocab_size} is more than this text yields; "
            f"use at most {len(tokens) + len(specials)} or train on more text"
        )
    return Tokenizer(name or f"bpe{len(tokens) + len(specials)}", tokens, pattern, specials)


def open_tokenizer(
    setting: str, vocab_size: int, folder: Path, texts: Callable[[], Iterable[str]], exact: bool = True
) -> Tokenizer:
    """The tokenizer that the setting `tokenizer` means: a JSON file, the name of one of tiktoken's encodings
    ("gpt2"), or for "auto" the one kept in `folder`.

    `folder` belongs to one data set, whose documents `texts()` yields: they train the tokenizer when there is
    none of `vocab_size` ids yet, or where not `exact` of as many up to that as they yield.
    """
    import tiktoken

    if setting in tiktoken.list_encoding_names():
        return from_tiktoken(setting)
    if setting != "auto":
        return Tokenizer.load(Path(setting).expanduser())
    path = tokenizer_path(folder, vocab_size)
    if path.exists():
        tokenizer = Tokenizer.load(path)
        if exact and tokenizer.vocab_size != vocab_size:
            raise UserError(
                f"vocab_size {vocab_size} is more than this text yields; use at most {tokenizer.vocab_size}"
            )
        return tokenizer
    tokenizer = train(texts(), vocab_size, max_chars=AUTO_MAX_CHARS, exact=exact, progress=True)
    try:
        tokenizer.save(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); make room or change --base_dir"
        ) from error
    return tokenizer


def tokenizer_path(folder: Path, vocab_size: int) -> Path:
    """Where the tokenizer of a data set is kept."""
    return Path(folder) / f"tokenizer-{vocab_size}.json"


def from_tiktoken(name: str) -> Tokenizer:
    """One of tiktoken's encodings, with our special tokens in place of its own."""
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network; a damaged download
        raise UserError(
            f"the encoding {name} is not on this machine and cannot be fetched ({type(error).__name__}); "
            "connect to the internet once, point TIKTOKEN_CACHE_DIR at a folder that has it, or use "
            "--tokenizer=auto"
        ) from error
    ranks = encoding._mergeable_ranks
    return Tokenizer(name, sorted(ranks, key=ranks.__getitem__), encoding._pat_str)


def is_cached(name: str) -> bool:
    """Whether an encoding of TIKTOKEN_FILES lies where tiktoken looks before it asks the network."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    folder = Path(tempfile.gettempdir(), "data-gym-cache") if cache is None else Path(cache)
    files = [hashlib.sha1(f"{TIKTOKEN_HOST}/{path}".encode()).hexdigest() for path in TIKTOKEN_FILES[name]]
    return cache != "" and all((folder / file).exists() for file in files)


def _limited(texts: Iterable[str], max_chars: int, progress: bool = False) -> Iterable[str]:
    """The texts up to `max_chars` characters in all, as valid Unicode."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 10
    options = {"unit": "chars", "unit_scale": True, "mininterval": interval, "disable": not progress}
    with tqdm(desc="training the tokenizer", **options) as bar:
        for text in texts:
            if max_chars >= 0:
                text = text[:max_chars]
                max_chars -= len(text)
            bar.update(len(text))
            yield _without_surrogates(text)
            if max_chars == 0:
                return


def _without_surrogates(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced by U+FFFD, as tiktoken does."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, which `tokenizers` uses: character -> byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
