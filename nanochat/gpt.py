"""The model: a GPT in the nanochat line, as equations.

    x0 = norm(embedding[token] + ngrams[token and the two before])    B rows, T positions, C width
    x = x0_scales[0] * x0 + copying * norm(embedding[follower])       what followed the same tokens before
    x += x_before_scale * gate(x0) * smear(x)                         in each block,
    x += out(gate * attention(q, shifted k, v + value embedding))     then attention, H heads of size D
    x += down(leaky_relu(up(norm(x)))^2)                              then the MLP
    logits = 15 tanh(head @ norm(x) / 15)                             softcap (Gemma 2), V vocabulary

The last block begins with x += x0_scales[1] * x0 + copying * norm(head[follower]). No biases, norms without
weights, untied embedding and head. Parameters are float32; under autocast products of matrices and the
residual stream have its dtype. docs/ablations.md has what the parts are worth.

To add a parameter: make it in a module, give it a value in `init_weights`, and use it in `forward`, with
`.to(x.dtype)` where it meets x. PARAMETER_TABLE in optim.py says how it is trained. What is missing is named.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.ops.attention import attention, previous_token, visible_from
from nanochat.ops.copying import Copying
from nanochat.ops.elementwise import gated, norm, norm_and_rotate, rotary_tables, scaled, stream_and_norm
from nanochat.ops.loss import softcap, softcapped_cross_entropy
from nanochat.ops.mlp import feed_forward
from nanochat.ops.operators import compute_dtype
from nanochat.ops.products import product, products
from nanochat.ops.subword import SubwordEmbedding
from nanochat.ops.tables import NgramEmbedding, embedding, look_up

ROPE_BASE = 100_000  # RoPE: longer wavelengths than the usual 10,000
GATE_INPUTS = 16  # channels of a token's embedding that the gates of the smear depend on
QK_SCALE = 1.2  # on q and on k after their norm: attention a little sharper than 1 / sqrt(D) gives
ZERO_AT_START = ("pairs.weight", "triples.weight", "values.weight", "out.weight", "down.weight",
                 "gate.weight", "x_before_scale", "copying.scales")  # fmt: skip


@dataclass(frozen=True)
class GPTConfig:
    """The architecture, and nothing else: two models of equal GPTConfig have the same parameters."""

    depth: int
    width: int
    num_heads: int
    vocab_size: int
    max_seq_len: int
    window_pattern: str = "L"  # one letter a layer, repeated: L sees all of the past, S a quarter of T
    spelled: bool = False  # sub-word embeddings: tokens that are spelled alike share a part of their rows
    value_tables: int = 1  # value embeddings are 0: rows of the head, 1: tables, 2: with rows of pairs, too
    bigrams: int = 0  # rows that pairs and triples of tokens share, for each of the vocabulary (0: none)
    copying: bool = False  # add the rows of the token that followed the same tokens before

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def windows(self) -> list[int]:
        """Positions each layer may look back on, itself included. The last layer always sees everything."""
        letters = (self.window_pattern * self.depth)[: self.depth - 1] + "L"
        return [self.max_seq_len if letter == "L" else max(1, self.max_seq_len // 4) for letter in letters]

    def has_value_embedding(self, layer: int) -> bool:
        """Every second layer, counted from the last."""
        return (self.depth - 1 - layer) % 2 == 0

    def has_table(self, layer: int) -> bool:
        """Whether its value embedding is a table of its own. The last layer's is the rows of the head."""
        return self.value_tables > 0 and self.has_value_embedding(layer) and layer < self.depth - 1


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        C = config.width
        self.num_heads, self.window = config.num_heads, config.windows[layer]
        self.attend = attention  # the default backend; attention.use puts a faster one in its place
        self.query = nn.Linear(C, C, bias=False)
        self.key = nn.Linear(C, C, bias=False)
        self.value = nn.Linear(C, C, bias=False)
        self.out = nn.Linear(C, C, bias=False)
        if config.has_value_embedding(layer):
            self.value_gate = nn.Linear(C, config.num_heads, bias=False)
        self.head_gate = nn.Linear(C, config.num_heads, bias=False)

    def forward(self, x, normed, value_embedding, rotary, cache=None, visible=None):
        """x + attention of normed = norm(x), (B, T, C) each. value_embedding: (B, T, C), or None."""
        B, T, C = x.shape
        gates = [self.head_gate] if value_embedding is None else [self.head_gate, self.value_gate]
        q, k, *gates, v = products(normed, (self.query, self.key, *gates), (self.value,))
        q, k, v = (part.view(B, T, self.num_heads, -1) for part in (q, k, v))
        # Value embedding (ResFormer): each head adds a row of the token itself, not mixed by earlier layers
        if value_embedding is not None:
            v = v + gated(value_embedding, gates[1]).view_as(v)
        # RoPE and QK norm: a score depends on distance and direction, and is at most 1.2^2 sqrt(D)
        q = norm_and_rotate(q, *rotary, QK_SCALE)
        # Shifted keys: position t has the key of t - 1, so one layer copies what followed a token (induction)
        k = norm_and_rotate(k, *rotary, QK_SCALE, cache is None, visible)
        q, k, v = (part.to(v.dtype).transpose(1, 2) for part in (q, k, v))  # (B, H, T, D)
        if cache is not None:  # it shifts its keys itself
            k, v, visible = cache.append(k, v)
        y = self.attend(q, k, v, self.window, visible)  # (B, H, T, D)
        # Gated attention: a head that finds nothing can be silent
        return product(gated(y.transpose(1, 2), gates[0]).reshape(B, T, C), self.out, added_to=x)


class MLP(nn.Module):
    """down(leaky_relu(up(norm(x)))^2). Primer has ReLU^2; with a leaky one a unit below zero still learns."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x):
        return feed_forward(x, self.up, self.down)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attention = Attention(config, layer)
        self.mlp = MLP(config)
        self.x_before_scale = nn.Parameter(torch.empty(config.width))
        self.x_before_gate = nn.Linear(min(GATE_INPUTS, config.width), 1, bias=False)

    def forward(self, x, branch, gate, share, value_embedding, rotary, cache=None, visible=None):
        """(x, branch) -> (x, branch), whose sum is the residual stream, (B, T, C): the next block adds the
        MLP's output, in its first kernel. gate: of the smear, (B, T, 1). share: of x0, (B, T, C), or None.
        value_embedding: None, (B, T, C), or tables and which of their rows: ((table, idx), ...).
        """
        x = x + branch
        before = previous_token(x, visible) if cache is None else cache.previous_token(x)  # (B, T, C)
        if share is not None:  # the last block still sees the token itself
            x = x + share
        # Smear: add a share of the stream of the token before, so pairs of tokens are seen without attention
        x = torch.addcmul(x, self.x_before_scale.to(x.dtype), gated(before, gate))
        if isinstance(value_embedding, tuple):
            value_embedding = sum(look_up(*rows) for rows in value_embedding).to(x.dtype)
        x, normed = stream_and_norm(x)
        x = self.attention(x, normed, value_embedding, rotary, cache, visible)
        return x, self.mlp(x)


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        V, C, rows = config.vocab_size, config.width, config.bigrams * config.vocab_size
        self.embedding = embedding(V, C)
        tables = {str(i): embedding(V, C) for i in range(config.depth) if config.has_table(i)}
        self.ngrams = NgramEmbedding(rows, C, config.value_tables == 2 and bool(tables)) if rows else None
        self.value_embeddings = nn.ModuleDict(tables)
        self.copying = Copying() if config.copying else None
        self.x0_scales = nn.Parameter(torch.empty(2))  # the stream at its start, what the last block adds
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))
        self.head = nn.Linear(C, V, bias=False)
        self.pieces = SubwordEmbedding(V, C) if config.spelled else None  # its name in checkpoints
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None):
        """Fill parameters and rotary tables in place, on the device the model is on.

        Queries, keys and values are uniform with standard deviation 1 / sqrt(C), an MLP's first matrix with
        half of it. Keys begin equal to queries, so induction works before anything is learned. A small head
        makes the first loss ln(V). With zeros gates multiply by 1, and attention, MLP and smear add nothing.
        """
        bound = math.sqrt(3 / self.config.width)  # uniform on [-b, b] has standard deviation b / sqrt(3)
        nn.init.normal_(self.embedding.weight, std=0.8, generator=generator)
        nn.init.normal_(self.head.weight, std=0.001, generator=generator)
        if self.pieces is not None:
            self.pieces.init_weights(generator)
        for table in self.value_embeddings.values():
            nn.init.uniform_(table.weight, -bound, bound, generator=generator)
        for block in self.blocks:
            for linear in (block.attention.query, block.attention.value):
                nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
            block.attention.key.weight.copy_(block.attention.query.weight)
            nn.init.uniform_(block.mlp.up.weight, -0.5 * bound, 0.5 * bound, generator=generator)
        for p in [p for name, p in self.named_parameters() if name.endswith(ZERO_AT_START)]:
            nn.init.zeros_(p)
        self.x0_scales.copy_(torch.tensor([1.1, 0.1]))
        self.init_rotary()

    def init_rotary(self):
        """Make the rotary tables on the device the model is on. No checkpoint holds them."""
        config, device = self.config, self.embedding.weight.device
        self.cos, self.sin = rotary_tables(config.max_seq_len, config.head_dim, ROPE_BASE, device)

    def tables(self):
        """The rows of embedding and head, (V, C) each, float32."""
        tables = self.embedding.weight, self.head.weight
        return tables if self.pieces is None else self.pieces(*tables)

    def forward(self, idx, targets=None, reduction="mean", cache=None, positions=None, documents=None):
        """idx (B, T) int64 -> logits (B, T, V) float32; with targets (B, T) int64, the loss in nats instead.

        Targets of -1 are not scored. `reduction` is that of F.cross_entropy; "none" gives (B * T,). idx
        continues the tokens of a `cache` (decode.KVCache). `positions` (N,) int64, of B * T: logits (N, V)
        of these. `documents`, from Attention.boundaries or their numbers (B, T) int64: a token sees its own.
        """
        tables, visible = self.tables(), visible_from(documents)
        x, branch, share, gates, rows_of_head, pairs, *rotary = self.begin(*tables, idx, cache, visible)
        values = {i: rows_of_head for i in range(self.config.depth) if self.config.has_value_embedding(i)}
        values |= {int(i): ((table.weight, idx),) for i, table in self.value_embeddings.items()}
        if pairs is not None:
            values[min(values)] += ((self.ngrams.values.weight, pairs),)
        for i, block in enumerate(self.blocks):
            own_share = share if i == self.config.depth - 1 else None
            layer_cache = None if cache is None else cache.layers[i]
            x, branch = block(x, branch, gates[i], own_share, values.get(i), rotary, layer_cache, visible)
        return self.end(x, branch, tables[1], targets, reduction, positions)

    def begin(self, embedding_rows, head_rows, idx, cache, visible):
        """Before the blocks: x, branch and share (B, T, C), for each block the gate of its smear (B, T, 1),
        rows_of_head (B, T, C), the rows of pairs (B, T) or None, and the rotary tables (T, 1, D)."""
        places = slice(idx.size(1)) if cache is None else cache.places(idx.size(1))
        dtype = compute_dtype(embedding_rows)  # of the residual stream, too
        x, pairs = look_up(embedding_rows, idx), None  # (B, T, C)
        ids = idx if cache is None else cache.all_ids(idx)  # (B, tokens so far)
        if self.ngrams is not None:
            x, pairs = self.ngrams(x, ids, visible)
        x0 = norm(x, dtype)
        # Not in a comprehension: there torch.compile takes T for a constant, and compiles once for each T
        cos, sin = self.cos[places].to(dtype), self.sin[places].to(dtype)
        # The last layer's value embeddings are rows of the head: a token that is attended to raises its logit
        rows_of_head = norm(look_up(head_rows, idx), dtype)
        gates = products(x0[..., :GATE_INPUTS], [block.x_before_gate for block in self.blocks])
        x, share = scaled(x0, self.x0_scales.to(dtype))
        if self.copying is not None:
            x, share = self.copying(x, share, ids, embedding_rows, head_rows, visible)
        gates = [gate.contiguous() for gate in gates]  # compiled blocks would copy parts of one tensor
        # 0 * x and not zeros: a branch without gradients would be compiled as another kind of block
        return x, 0 * x, share, gates, rows_of_head, pairs, cos, sin

    def end(self, x, branch, head_rows, targets, reduction, positions):
        """After the blocks: logits or the loss."""
        x = norm(x + branch)
        if positions is not None:
            x = x.flatten(0, 1)[positions]  # (N, C)
        if targets is None:
            return softcap(self.head(x) if self.pieces is None else F.linear(x, head_rows))
        return softcapped_cross_entropy(x.flatten(0, 1), head_rows, targets.flatten(), reduction)
