"""A GPT of the nanochat line for Hugging Face transformers: configuration and model in one file.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

It needs torch and transformers alone. B rows, T positions, C width, H heads, D head size, V vocabulary.

    x0 = norm(embedding[token] + ngrams[token and the two before])
    x = x0_scales[0] * x0
    x += x_before_scale * gate(x0) * smear(x)                         in each block,
    x += out(gate * attention(q, shifted k, v + value embedding))     then attention,
    x += down(leaky_relu(up(norm(x)))^2)                              then the MLP
    logits = 15 tanh(head @ norm(x) / 15)

The last block begins with x += x0_scales[1] * x0. Three parts look one position back. Smear adds the residual
stream of the token before. Keys are shifted: position t has the key of t - 1. Before the first token both are
zeros. A pair of tokens has a row, which it shares with others; the token before the first is 0. With
`copying` a multiple of the row of what followed the same tokens before is added at the start and the end.
"""

# ruff: noqa: RUF012  (lists and dicts of a class, as transformers wants them)

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation import StoppingCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

ROPE_BASE = 100_000
GATE_INPUTS = 16  # channels of a token's embedding that the gates of the smear depend on
HASH = 40_503, 1_000_003  # spread pairs and triples of tokens over rows
QK_SCALE = 1.2  # on q and on k after their norm
SLOPE = 0.5  # slope of the leaky ReLU below 0
SOFTCAP = 15.0
LONGEST = 8  # tokens of a match; what is longer counts as this long
EPS = torch.finfo(torch.float32).eps  # under the root of a norm


class NanochatConfig(PretrainedConfig):
    """The sizes of a model. Other tools know some of them by the names in `attribute_map`."""

    model_type = "nanochat_gpt"
    attribute_map = {
        "num_hidden_layers": "depth",
        "hidden_size": "width",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "max_seq_len",
    }
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        depth=4,
        width=256,
        num_heads=2,
        vocab_size=32768,
        max_seq_len=2048,
        window_pattern="L",  # one letter a layer, repeated: L sees all of the past, S a quarter of a row
        value_tables=1,  # value embeddings are 0: rows of the head, 1: tables, 2: with rows of pairs, too
        bigrams=0,  # rows that pairs and triples of tokens share, for each of the vocabulary (0: none)
        copying=False,  # add what followed the same tokens before
        **kwargs,
    ):
        self.depth, self.width, self.num_heads = depth, width, num_heads
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.window_pattern, self.value_tables, self.bigrams = window_pattern, value_tables, bigrams
        self.copying = copying
        super().__init__(**{"tie_word_embeddings": False, **kwargs})

    def window(self, layer: int) -> int:
        """Positions that a layer may look back on, itself included. The last layer sees everything."""
        letter = self.window_pattern[layer % len(self.window_pattern)]
        short = letter == "S" and layer < self.depth - 1
        return max(1, self.max_seq_len // 4) if short else self.max_seq_len

    def has_value_embedding(self, layer: int) -> bool:
        return (self.depth - 1 - layer) % 2 == 0

    def has_table(self, layer: int) -> bool:
        """Whether its value embedding is a table of its own. The last layer's is the rows of the head."""
        return self.value_tables > 0 and self.has_value_embedding(layer) and layer < self.depth - 1


def norm(x):
    """RMSNorm over the last dimension, without weights."""
    return F.rms_norm(x.float(), (x.size(-1),), eps=EPS).to(x.dtype)


def shift(x, dim: int):
    """x moved by one position along `dim`; zeros come first."""
    first = torch.zeros_like(x.narrow(dim, 0, 1))
    return torch.cat((first, x.narrow(dim, 0, x.size(dim) - 1)), dim)


class Row(NamedTuple):
    """Where the T new tokens stand. `slots` counts them and those in the cache, padding included."""

    past: int  # slots in the cache
    cos: torch.Tensor  # (1 or B, 1, T, D / 2), of the rotary embedding
    sin: torch.Tensor
    follows: torch.Tensor  # (1 or B, slots): whether a token, not padding, stands before a slot
    masks: dict  # {window: (1 or B, 1, T, slots) bool}, what each new token sees

    @classmethod
    def of(cls, config, past: int, T: int, attention_mask, device):
        """Raises ValueError for more tokens than max_seq_len."""
        slots = torch.arange(past + T, device=device)
        shown = torch.ones_like(slots)[None] if attention_mask is None else attention_mask.long()
        positions = (shown.cumsum(-1) - 1).clamp(min=0)[:, past:]
        if past + T > config.max_seq_len and positions.max() >= config.max_seq_len:
            raise ValueError(
                f"a row of {int(positions.max()) + 1} tokens is too long: this model has positions for "
                f"{config.max_seq_len}; cut the text"
            )
        D = config.width // config.num_heads
        frequencies = ROPE_BASE ** (-torch.arange(0, D, 2, dtype=torch.float32, device=device) / D)
        angles = (positions[..., None] * frequencies)[:, None]
        distance = slots[past:, None] - slots
        seen = (distance >= 0) & shown.bool()[:, None, None]
        # Padding sees itself, since a softmax over nothing is not a number
        masks = {
            window: seen & (distance < window) | (distance == 0)
            for window in {config.window(layer) for layer in range(config.depth)}
        }
        return cls(past, angles.cos(), angles.sin(), shift(shown, 1), masks)


def rotate(x, row: Row):
    """Rotary embedding of x (B, H, T, D)."""
    (a, b), cos, sin = x.chunk(2, -1), row.cos.to(x.dtype), row.sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, config: NanochatConfig, layer: int):
        super().__init__()
        C = config.width
        self.layer, self.num_heads, self.window = layer, config.num_heads, config.window(layer)
        self.query = nn.Linear(C, C, bias=False)
        self.key = nn.Linear(C, C, bias=False)
        self.value = nn.Linear(C, C, bias=False)
        self.out = nn.Linear(C, C, bias=False)
        if config.has_value_embedding(layer):
            self.value_gate = nn.Linear(C, config.num_heads, bias=False)
        self.head_gate = nn.Linear(C, config.num_heads, bias=False)

    def heads(self, x):
        """(B, T, C) -> (B, H, T, D); gates (B, T, H) -> (B, H, T, 1)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x, stream, value_embedding, row: Row, cache):
        """x (B, T, C), the normalised stream; stream (B, T, C), what the block read, for the cache."""
        q, k = (QK_SCALE * rotate(norm(self.heads(part(x))), row) for part in (self.query, self.key))
        v = self.heads(self.value(x))
        if value_embedding is not None:
            gates = 2 * torch.sigmoid(self.heads(self.value_gate(x)))
            v = v + gates * self.heads(value_embedding).to(v.dtype)
        if cache is not None:
            # The cache's "key" is the key and, beside it, the stream, which has as many channels. So beam
            # search and assisted generation reorder and cut both
            k, v = cache.update(torch.cat((k, self.heads(stream).to(k.dtype)), -1), v, self.layer)
            k, _ = k.chunk(2, -1)
        k = shift(k, 2) * row.follows[:, None, :, None].to(k.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=row.masks[self.window])
        y = 2 * torch.sigmoid(self.heads(self.head_gate(x))) * y
        return self.out(y.transpose(1, 2).flatten(2))

    def last_stream(self, cache):
        """The stream at the cache's last slot, (B, 1, C)."""
        _, stream = cache.layers[self.layer].keys[:, :, -1:].chunk(2, -1)
        return stream.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    def __init__(self, config: NanochatConfig):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x):
        return self.down(F.leaky_relu(self.up(x), SLOPE).square())


class Block(nn.Module):
    def __init__(self, config: NanochatConfig, layer: int):
        super().__init__()
        self.attention = Attention(config, layer)
        self.mlp = MLP(config)
        self.x_before_scale = nn.Parameter(torch.zeros(config.width))
        self.x_before_gate = nn.Linear(min(GATE_INPUTS, config.width), 1, bias=False)

    def forward(self, x, x0, share, value_embedding, row: Row, cache):
        stream = x
        before = shift(x, 1)
        if row.past:
            last = self.attention.last_stream(cache).to(x)
            before = torch.cat((last, x[:, :-1]), 1)
        before = before * row.follows[:, row.past :, None].to(x.dtype)
        before = 2 * torch.sigmoid(self.x_before_gate(x0[..., :GATE_INPUTS])) * before
        x = x + self.x_before_scale * before
        if share is not None:
            x = x + share
        x = x + self.attention(norm(x), stream, value_embedding, row, cache)
        return x + self.mlp(norm(x))


class NgramEmbedding(nn.Module):
    """Rows that pairs of tokens share, and rows that triples share. With `values`, pairs have a second row,
    which is added to a value embedding."""

    def __init__(self, rows: int, width: int, values: bool):
        super().__init__()
        self.pairs, self.triples = nn.Embedding(rows, width), nn.Embedding(rows, width)
        self.values = nn.Embedding(rows, width) if values else None

    def forward(self, idx, before, second):
        """The token idx, the one before it and the second before it, (B, T) each -> (B, T, C) for the stream,
        and for the values (None: without)."""
        number = before * HASH[0] + idx
        pair, triple = (n % self.pairs.num_embeddings for n in (number, second * HASH[1] + number))
        return self.pairs(pair) + self.triples(triple), None if self.values is None else self.values(pair)


class Copying(nn.Module):
    """The rows of the token that followed the longest match, which is up to LONGEST tokens that a row had
    before, times factors for each length of a match. Of equally long ones the last counts."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.zeros(2, LONGEST))  # of its row of the embedding, and of the head

    def forward(self, x, share, ids, row: Row, embedding_rows, head_rows):
        """ids: the tokens of all slots, (B, slots)."""
        slots, T = torch.arange(ids.size(1), device=ids.device), x.size(1)
        # Tokens after padding are others than those before: no match begins in padding
        ours = theirs = ids + len(head_rows) * (1 - row.follows).cumsum(-1)
        same, length = (slots < slots[:, None])[-T:], 0
        for _ in range(LONGEST):
            same = same & (ours[:, -T:, None] == theirs[:, None])  # (B, T, slots)
            length = length + same.long()
            ours, theirs = F.pad(ours[:, :-1], (1, 0), value=-1), F.pad(theirs[:, :-1], (1, 0), value=-2)
        best = torch.where(length > 0, length * len(slots) + slots, 0).amax(-1)
        token = ids.gather(1, (best % len(slots) + 1).clamp(max=len(slots) - 1))
        into, onto = F.pad(self.scales, (1, 0))[:, best // len(slots)].unsqueeze(-1).to(x.dtype)
        x = x + into * norm(F.embedding(token, embedding_rows)).to(x.dtype)
        return x, share + onto * norm(F.embedding(token, head_rows)).to(x.dtype)


class RowIsFull(StoppingCriteria):
    """`generate` ends when max_seq_len positions are full, whatever max_new_tokens says."""

    def __init__(self, max_seq_len: int):
        self.max_seq_len = max_seq_len

    def __call__(self, input_ids, scores, **kwargs):
        full = input_ids.size(1) >= self.max_seq_len
        return torch.full((input_ids.size(0),), full, device=input_ids.device)


class NanochatForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanochatConfig
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config: NanochatConfig):
        super().__init__(config)
        V, C = config.vocab_size, config.width
        self.embedding = nn.Embedding(V, C)
        with_table = [i for i in range(config.depth) if config.has_table(i)]
        values = config.value_tables == 2 and bool(with_table)
        self.ngrams = NgramEmbedding(config.bigrams * V, C, values) if config.bigrams else None
        self.copying = Copying() if config.copying else None
        self.value_embeddings = nn.ModuleDict({str(i): nn.Embedding(V, C) for i in with_table})
        self.x0_scales = nn.Parameter(torch.zeros(2))
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))
        self.head = nn.Linear(C, V, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    @can_return_tuple
    def forward(
        self,
        input_ids,
        attention_mask=None,
        past_key_values=None,
        cache=None,
        labels=None,
        use_cache=False,
        logits_to_keep=0,
    ):
        """input_ids (B, T) int64 -> logits (B, T, V) float32; with labels, also the loss in nats a token.

        attention_mask (B, slots), of any dtype: 0 for padding, for the tokens in the cache and the new ones.
        cache: a DynamicCache, called past_key_values before transformers 5.24. labels (B, T): the input_ids,
        -100 where a token is not scored; they are shifted here. logits_to_keep: only the last so many
        positions get logits (0: all). Raises ValueError for a row of more than max_seq_len tokens or another
        cache.
        """
        cache = past_key_values if cache is None else cache
        if cache is not None and not isinstance(cache, DynamicCache):
            raise ValueError(
                f"the past of this model is kept in a DynamicCache, not in a {type(cache).__name__}"
            )
        if cache is None and use_cache:
            cache = DynamicCache()
        past = 0 if cache is None else cache.get_seq_length()
        row = Row.of(self.config, past, input_ids.size(1), attention_mask, input_ids.device)
        x, of_pairs = self.embedding(input_ids), None
        ids = self.all_ids(input_ids, cache)
        if self.ngrams is not None:
            of_ngrams, of_pairs = self.ngrams(input_ids, *self.previous_ids(ids, row))
            x = x + of_ngrams
        x0 = norm(x)
        x, share = self.x0_scales[:, None, None, None] * x0
        if self.copying is not None:
            x, share = self.copying(x, share, ids, row, self.embedding.weight, self.head.weight)
        rows_of_head = norm(F.embedding(input_ids, self.head.weight))
        for i, block in enumerate(self.blocks):
            value_embedding = None
            if self.config.has_table(i):
                value_embedding = self.value_embeddings[str(i)](input_ids)
                if of_pairs is not None:  # in the first layer that has a table
                    value_embedding, of_pairs = value_embedding + of_pairs, None
            elif self.config.has_value_embedding(i):
                value_embedding = rows_of_head
            own_share = share if i == self.config.depth - 1 else None
            x = block(x, x0, own_share, value_embedding, row, cache)
        logits = self.head(norm(x[:, -logits_to_keep:]))
        logits = SOFTCAP * torch.tanh(logits.float() / SOFTCAP)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss, logits, cache)

    def all_ids(self, ids, cache):
        """The tokens of the cache, and the new ones, ids (B, T): (B, slots).

        The cache has the tokens as one more layer, so beam search and assisted generation reorder and cut
        them with the others.
        """
        if cache is None or (self.ngrams is None and self.copying is None):
            return ids
        while len(cache.layers) <= self.config.depth:
            cache.layers.append(DynamicLayer())
        column = ids[:, None, :, None]  # as a key of one head and one channel
        return cache.update(column, column, self.config.depth)[0][:, 0, :, 0]

    def previous_ids(self, ids, row: Row):
        """The token before each new one and the second before it, (B, T) each, from the ids of all slots.
        It is 0 before a text begins."""
        before = shift(ids, 1) * row.follows
        return before[:, row.past :], (shift(before, 1) * row.follows)[:, row.past :]

    def generate(
        self,
        inputs=None,
        generation_config=None,
        logits_processor=None,
        stopping_criteria=None,
        *args,
        **kwargs,
    ):
        criteria = [*(stopping_criteria or ()), RowIsFull(self.config.max_seq_len)]
        return super().generate(inputs, generation_config, logits_processor, criteria, *args, **kwargs)
