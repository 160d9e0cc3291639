"""Training of a byte-level BPE vocabulary with the library `tokenizers`.

BPE starts from the 256 bytes. It joins the most frequent pair of neighbours to a new token, again and again.
"""

from collections.abc import Iterable, Iterator

from nanochat.data.progress import bar


def train_tokens(
    texts: Iterable[str], max_tokens: int, pattern: str, max_chars: int = -1, show_progress: bool = False
) -> list[bytes]:
    """The byte strings of a vocabulary, in merge order: 256 single bytes, then up to max_tokens - 256 merges.

    The regular expression `pattern` cuts the text first, so that no token spans a word boundary. Training
    stops after `max_chars` characters (-1: all). The same texts give the same tokens on any number of
    threads.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=max_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_limited(texts, max_chars, show_progress), trainer)

    byte_of = _bytes_of_characters()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[character] for character in text) for text, _ in vocabulary if len(text) > 1]
    return [bytes([b]) for b in range(256)] + merged


def without_surrogates(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced by U+FFFD, as tiktoken does."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _limited(texts: Iterable[str], max_chars: int, show_progress: bool) -> Iterator[str]:
    """The texts up to `max_chars` characters in all (-1: all of them), as valid Unicode."""
    with bar("training the tokenizer", "chars", hidden=not show_progress) as progress:
        for text in texts:
            if max_chars >= 0:
                text = text[:max_chars]
                max_chars -= len(text)
            progress.update(len(text))
            yield without_surrogates(text)
            if max_chars == 0:
                return


def _bytes_of_characters() -> dict[str, int]:
    """{character: byte} for the printable characters that GPT-2, and so `tokenizers`, writes for bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
