"""How many tokens a data set has: counted if it is small, estimated from a sample if it is not."""

import math

from nanochat import UserError
from nanochat.data.parquet import Documents
from nanochat.data.tokenizer import Tokenizer

SAMPLE_BYTES = 2_000_000  # tokenized in about 0.2 s
SAMPLE_WINDOWS = 16  # places in the data set that the sample is taken from
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 4096, 32768  # tokens, unless a person asks for another number
TEXT_OF_SMALLEST = 30_000_000  # bytes of text; with more, the vocabulary grows
SCARCE = 16  # bytes of text a token of a batch; with fewer, the tokens are counted


def vocabulary_size(size: int) -> int:
    """The default vocabulary size for a text of `size` UTF-8 bytes.

    A power of two that doubles when the text grows fourfold. With too many tokens, each is seen too rarely to
    be learned (docs/ablations.md).
    """
    best = SMALLEST_VOCABULARY * math.sqrt(max(1, size) / TEXT_OF_SMALLEST)
    return min(LARGEST_VOCABULARY, max(SMALLEST_VOCABULARY, 2 ** round(math.log2(best))))


def count_tokens(documents: Documents, tokenizer: Tokenizer) -> int:
    """The tokens of all documents, without `<|bos|>`. Tokenizes everything."""
    return sum(len(tokenizer.encode(text)) for text in documents)


def estimate_tokens(documents: Documents, tokenizer: Tokenizer) -> int:
    """About how many tokens all documents have, without `<|bos|>`; the same number on every call.

    The sample is SAMPLE_WINDOWS windows of text, evenly spread over the row groups. The first window is at
    the start of its row group, the last one at the end, the others between. This is fair to long documents: a
    row group ends with the document that makes it large enough, which is often a long one.
    """
    if documents.text_bytes <= SAMPLE_BYTES:
        return count_tokens(documents, tokenizer)
    windows = min(SAMPLE_WINDOWS, len(documents.sizes))
    size = SAMPLE_BYTES // windows
    sampled_bytes = sampled_tokens = 0
    for i in range(windows):
        text, group = "", (2 * i + 1) * len(documents.sizes) // (2 * windows)
        while len(text) < size and group < len(documents.sizes):  # if it is short, the next ones too
            text += "".join(documents.read(group))
            group += 1
        start = max(0, len(text) - size) * i // max(1, windows - 1)
        window = text[start : start + size]
        sampled_bytes += len(window.encode("utf-8", "replace"))
        sampled_tokens += len(tokenizer.encode(window))
    return round(documents.text_bytes * sampled_tokens / max(1, sampled_bytes))


def check_amount(documents: Documents, tokenizer: Tokenizer, rows_per_step: int, max_seq_len: int) -> None:
    """Raise UserError if the data set is smaller than one batch. A large data set is not tokenized for it."""
    batch = rows_per_step * max_seq_len
    documents.need(documents=rows_per_step, text_bytes=SCARCE * batch)
    if (number := len(documents)) < rows_per_step:
        raise UserError(
            f"the training data has {number} documents, fewer than the {rows_per_step} rows of a batch; "
            f"use a total_batch_size of at most {number * max_seq_len} tokens, or more data"
        )
    scarce = documents.text_bytes < SCARCE * batch
    if scarce and (tokens := count_tokens(documents, tokenizer)) < batch:
        most = tokens // max_seq_len * max_seq_len
        raise UserError(
            f"the training data has {tokens} tokens, fewer than the {batch} of a batch; use "
            f"{f'a total_batch_size of at most {most}' if most else 'a smaller max_seq_len'}, or more data"
        )
