"""The tokenizer and the chat format as the files that Hugging Face's `transformers` reads.

    write_text(tokenizer, folder, chat=True, max_seq_len=2048)
    AutoTokenizer.from_pretrained(folder)("hello")     # <|bos|>, then the ids of tokenizer.encode("hello")

`transformers` takes text that looks like a special token for one; our encoder does not. With
`split_special_tokens=True` in the call it stays text there too.
"""

import itertools
import json
import re
from pathlib import Path

from nanochat.data.bpe import characters_of_bytes
from nanochat.data.tokenizer import Tokenizer

# What data/chat_format.py renders. {% generation %} stands around what --loss_on=assistant trains on, for
# return_assistant_tokens_mask.
CHAT_TEMPLATE = """\
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{{- bos_token }}
{%- for message in (messages[1:] if system else messages) %}
    {%- if message.role != ['user', 'assistant'][loop.index0 % 2] %}
        {{- raise_exception('after a system message, if any, the user and the assistant take turns') }}
    {%- elif message.role == 'user' %}
        {{- '<|user_start|>' + (system if loop.first else '') + message.content + '<|user_end|>' }}
    {%- else %}
        {{- '<|assistant_start|>' }}
        {%- generation %}{{ message.content + '<|assistant_end|>' }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{{- '<|assistant_start|>' if add_generation_prompt }}"""


def write_text(tokenizer: Tokenizer, folder: str | Path, chat: bool, max_seq_len: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    chat: the model is of mid_train, so it gets a chat template, and its texts end at <|assistant_end|>.
    max_seq_len: tokens of the longest text, <|bos|> included. Raises OSError if a file cannot be written.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": _end(chat),
        "pad_token": _padding(tokenizer),
        "model_max_length": max_seq_len,
        "padding_side": "left",  # generation goes on at the right
        "clean_up_tokenization_spaces": False,
    } | ({"chat_template": CHAT_TEMPLATE} if chat else {})
    folder = Path(folder)
    (folder / "tokenizer.json").write_bytes(_fast_tokenizer(tokenizer).to_str(pretty=True).encode())
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def generation_config(tokenizer: Tokenizer, chat: bool) -> dict:
    """The content of generation_config.json: where a text begins and ends."""
    special = tokenizer.special_tokens
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": sorted({special[_end(chat)], tokenizer.bos_id}),  # as in scripts/chat.py
        "pad_token_id": special[_padding(tokenizer)],
    }


def _end(chat: bool) -> str:
    """The token after which a text is complete. Without a chat it is the beginning of the next document."""
    return "<|assistant_end|>" if chat else "<|bos|>"


def _padding(tokenizer: Tokenizer) -> str:
    """A token that no training here uses. <|bos|> will not do: `generate` without an attention mask takes
    every padding token for padding, and fine-tuning elsewhere does not learn to write one."""
    return list(tokenizer.special_tokens)[-1]


# ------------------------------------------------------------------------------------------------------
# tokenizer.json


def _fast_tokenizer(tokenizer: Tokenizer):
    """A `tokenizers.Tokenizer` that gives the same ids."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as FastTokenizer

    character, ranks = characters_of_bytes(), {token: i for i, token in enumerate(tokenizer.tokens)}

    def written(token: bytes) -> str:
        return "".join(character[b] for b in token)

    merges = [
        tuple(map(written, parts)) for token in tokenizer.tokens if (parts := _last_merge(token, ranks))
    ]
    # ignore_merges: a cut that is a token as a whole becomes that token, as in tiktoken
    model = models.BPE({written(token): i for token, i in ranks.items()}, merges, ignore_merges=True)
    fast = FastTokenizer(model)
    fast.add_special_tokens([AddedToken(name, normalized=False) for name in tokenizer.special_tokens])
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_oniguruma(tokenizer.pattern)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", tokenizer.bos_id)]
    )
    return fast


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that merge into a token; None if merging never makes it.

    A vocabulary has no list of merges, but encoding the bytes of a token shows its last one.
    """
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        if (first := min(joined)) == len(ranks):
            return None
        i = joined.index(first)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts) if len(parts) == 2 else None


def _oniguruma(pattern: str) -> str:
    """A pattern of tiktoken (Rust) in the dialect of `tokenizers`: there, {1,3}+ repeats the repetition and
    `$` is the end of any line."""
    pattern = re.sub(r"(\\p\{\w+\}\{\d+,\d+\})\+", r"(?>\1)", pattern)
    return re.sub(r"(?<!\\)\$", r"\\z", pattern)
