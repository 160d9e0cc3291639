"""The KV cache, and a forward pass for one new token a row with few operations.

At batch 1 most of a small model's time goes into starting some 300 small operations from Python. DecodeStep
computes the equations of gpt.py with about a third of them. `decode_step` compares the two before it is used:
a change of gpt.py never gives wrong text, only slower text.
"""

import functools
import sys
import weakref

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.gpt import GPT, QK_SCALE
from nanochat.machine.precision import small_model
from nanochat.ops.attention import shift_keys
from nanochat.ops.attention_backends import error_in_a_line, for_any_length
from nanochat.ops.copying import LONGEST
from nanochat.ops.elementwise import SLOPE, norm
from nanochat.ops.fp8 import Float8Linear
from nanochat.ops.loss import softcap

# The parameters that DecodeStep knows, as they are called in gpt.py
KNOWN = {"embedding", "value_embeddings", "head", "query", "key", "value", "out", "up", "down"}
KNOWN |= {"ngrams", "value_gate", "head_gate", "x_before_gate", "x0_scales", "x_before_scale", "copying"}

SMALL = 2**27  # parameters of a small model: half a gigabyte in float32


class KVCache:
    """Keys, values and stream of every layer, for the tokens so far of B texts of different lengths.

    A slot holds one position of every text. All texts end in the same slot, so a shorter one begins later:
    row r begins in slot start[r], and the slots before it are masked. Block.forward gets `layers[i]`.
    """

    def __init__(self, config, dtype: torch.dtype | None = None):
        """dtype: of keys, values and stream in the cache (None: the model's)."""
        self.max_seq_len, self.slots, self.dtype = config.max_seq_len, 0, dtype
        self.ids = None  # (B, length) int64, the tokens in the slots
        self.start = None  # (B,) int64, or None while all texts begin in slot 0
        self.visible = None  # (B, 1, 1, slots) bool, False in slots before start; None as start
        self.layers = [LayerCache(self) for _ in range(config.depth)]

    @property
    def length(self) -> int:
        """Slots in use."""
        return self.layers[0].length

    def places(self, T: int):
        """Where the next T tokens stand in their texts: a slice, or (B, T) int64."""
        if self.start is None:
            return slice(self.length, self.length + T)
        slots = torch.arange(self.length, self.length + T, device=self.start.device)
        # Positions past the last one are padding
        return (slots - self.start[:, None]).clamp(max=self.max_seq_len - 1)

    def all_ids(self, idx):
        """Add the T new tokens idx (B, T); returns those of all slots, (B, length + T), -1 before a text
        begins."""
        self.ids = idx if self.ids is None else torch.cat((self.ids, idx), 1)
        return self.ids

    def align(self, lengths: list[int]):
        """Keep the first lengths[r] tokens of row r, and move rows so that all end in the same slot."""
        start = [0] * len(lengths) if self.start is None else self.start.tolist()
        if all(s + n == self.length for s, n in zip(start, lengths, strict=True)):
            return
        self.slots, stop = max(self.slots, max(lengths)), max(lengths)
        moves = [(s, stop - n, n) for s, n in zip(start, lengths, strict=True)]
        for layer in self.layers:
            layer.move(moves, stop)
        if self.ids is not None:
            rows = zip(self.ids, moves, strict=True)
            self.ids = torch.stack([F.pad(row[s : s + n], (to, 0), value=-1) for row, (s, to, n) in rows])
        self.start = self.visible = None
        if min(lengths) < stop:
            device = self.layers[0].v.device
            self.start = torch.tensor([stop - n for n in lengths], device=device)
            self._show()

    def _show(self):
        slots = torch.arange(self.layers[0].v.size(2), device=self.start.device)
        self.visible = (slots >= self.start[:, None])[:, None, None]

    def reserve(self, slots: int):
        """Take memory for at least `slots` slots."""
        self.slots = max(self.slots, slots)
        for layer in self.layers:
            if layer.v is not None and layer.v.size(2) < slots:
                layer.grow(slots)
        if self.start is not None and self.visible.size(-1) < slots:
            self._show()


class LayerCache:
    """One layer's values v (B, H, slots, D), its keys k, and the stream x (B, slots, C) that it reads. Keys
    and stream are shifted by one slot (attention.previous_token). The first `length` slots are used."""

    def __init__(self, cache: KVCache):
        self.cache, self.length, self.x, self.k, self.v = cache, 0, None, None, None

    def previous_token(self, x):
        """Add the stream x (B, T, C) of T new slots, before `append`; returns it shifted."""
        stop = self.length + x.size(1)
        if self.x is None:
            self.x = self._empty(x, max(stop, self.cache.slots) + 1)
        elif stop >= self.x.size(1):
            self.cache.reserve(2 * stop)
        self.x[:, self.length + 1 : stop + 1] = x
        return self.x[:, self.length : stop].to(x.dtype)

    def append(self, k, v):
        """Add k and v (B, H, T, D) of T new slots; returns the shifted keys and the values of all slots, and
        which are visible: (B, 1, 1, length) bool, None for all."""
        stop = self.length + k.size(2)
        if self.k is None:
            slots = self.x.size(1)
            self.k, self.v = self._empty(k, slots), self._empty(v, slots - 1)
        self.k[:, :, self.length + 1 : stop + 1], self.v[:, :, self.length : stop] = k, v
        first, self.length = self.length == 0, stop
        if first:
            return shift_keys(k), v, None
        visible = None if self.cache.visible is None else self.cache.visible[..., :stop]
        return self.k[:, :, :stop].to(k.dtype), self.v[:, :, :stop].to(v.dtype), visible

    def _empty(self, like, slots):
        """Zeros, since a masked value takes part in a sum with weight 0, and 0 * nan is nan."""
        *rows, _, channels = like.shape
        return like.new_zeros(*rows, slots, channels, dtype=self.cache.dtype or like.dtype)

    def grow(self, slots: int):
        more = (0, 0, 0, slots - self.v.size(2))
        self.x, self.k, self.v = (F.pad(old, more) for old in (self.x, self.k, self.v))

    def move(self, moves: list[tuple[int, int, int]], stop: int):
        """Move n slots of each row: (from, to, n). Afterwards `stop` slots are in use."""
        slots = max(self.cache.slots, stop)
        old, shifted = (self.x, self.k, self.v), (1, 1, 0)
        self.x, self.k, self.v = (self._empty(x, slots + more) for x, more in zip(old, shifted, strict=True))
        for new, x, more in zip((self.x, self.k, self.v), old, shifted, strict=True):
            for row, (source, to, n) in enumerate(moves):
                new[row, ..., to : to + n + more, :] = x[row, ..., source : source + n + more, :]
        self.length = stop


class DecodeStep:
    """The forward pass of a GPT for one token a row, (B, 1) int64 -> logits (B, V) float32.

    It takes the model's weights as they are when it is made, cast to `dtype`, as matrices (inputs, outputs).
    Weights that have that dtype already share memory with the model. Query, key, value and gates are one
    matrix. In float32 on a CPU, the matrices of a small model are copied: products with few rows are faster
    when outputs lie side by side.
    """

    def __init__(self, model: GPT, dtype: torch.dtype):
        config = model.config
        self.dtype, self.windows, self.num_heads = dtype, config.windows, config.num_heads
        size, on_cpu = sum(p.numel() for p in model.parameters()), model.head.weight.device.type == "cpu"
        self.copies = on_cpu and dtype == torch.float32 and size < SMALL
        self.embedding, self.head_rows = (table.detach() for table in model.tables())
        self.ngrams = model.ngrams
        self.head = self._matrix(self.head_rows)
        # The gates of the smear, of all layers in one: they depend on the embedding alone
        self.x_before_gates = self._matrix(torch.cat([block.x_before_gate.weight for block in model.blocks]))
        self.layers = [self._layer(model, i) for i in range(config.depth)]
        self.x0_scales = model.x0_scales.detach().to(dtype)
        scales = None if model.copying is None else model.copying.scales.detach().to(dtype)
        self.copy_scales = None if scales is None else F.pad(scales, (1, 0))[..., None]  # by length, from 0
        self.x_before_scales = torch.stack([b.x_before_scale.detach() for b in model.blocks]).to(dtype)
        self.cos, self.sin = (QK_SCALE * model.cos).to(dtype), (QK_SCALE * model.sin).to(dtype)  # (T, 1, D)

    def _layer(self, model, i: int):
        """A layer's matrices (query, key, value and gates in one; out; up; down), and its value embedding."""
        attention, mlp = model.blocks[i].attention, model.blocks[i].mlp
        readers = [attention.query, attention.key, attention.value, attention.head_gate]
        table = None
        if model.config.has_value_embedding(i):
            readers.append(attention.value_gate)
            own = str(i) in model.value_embeddings
            table = model.value_embeddings[str(i)].weight.detach() if own else self.head_rows
        qkvg = torch.cat([linear.weight.detach().to(self.dtype) for linear in readers])
        matrices = qkvg, attention.out.weight, mlp.up.weight, mlp.down.weight
        return *map(self._matrix, matrices), table

    def _matrix(self, weight):
        """weight (outputs, inputs) -> (inputs, outputs), in the compute dtype."""
        weight = weight.detach().to(self.dtype).t()
        return weight.contiguous() if self.copies else weight

    @for_any_length()
    def __call__(self, idx, cache: KVCache):
        """Logits (B, V) float32 after the tokens idx (B, 1) int64, which are added to the cache."""
        B, C, H = idx.size(0), self.embedding.size(1), self.num_heads
        place = cache.places(1)
        cos, sin = self.cos[place].view(-1, 1, 1, C // H), self.sin[place].view(-1, 1, 1, C // H)
        x, pairs = F.embedding(idx, self.embedding), None
        ids = cache.all_ids(idx)
        if self.ngrams is not None:
            x, pairs = self.ngrams(x, ids)
        idx = idx.view(B)
        x0 = norm(x.view(B, C)).to(self.dtype)
        x, share = self._with_copied(self.x0_scales[:, None, None] * x0, ids)
        before_gates = 2 * (x0[:, : self.x_before_gates.size(0)] @ self.x_before_gates).sigmoid()  # (B, L)
        for i, (qkvg, out, up, down, table) in enumerate(self.layers):
            before = before_gates[:, i : i + 1] * cache.layers[i].previous_token(x[:, None])[:, 0]  # (B, C)
            x = torch.addcmul(x, self.x_before_scales[i], before)
            if i == len(self.layers) - 1:
                x = x + share
            qkvg = norm(x) @ qkvg  # (B, 3 * C + H), with a value embedding (B, 3 * C + 2 * H)
            qk = norm(qkvg[:, : 2 * C].view(B, 2, H, C // H))
            qk = torch.addcmul(qk * cos, qk.roll(C // H // 2, -1), sin)
            v = qkvg[:, 2 * C : 3 * C].view(B, H, C // H)
            gates = 2 * qkvg[:, 3 * C :].sigmoid().unsqueeze(-1)  # (B, H or 2 * H, 1)
            if table is not None:
                rows = F.embedding(idx, table)
                if table is self.head_rows:
                    rows = norm(rows)
                elif pairs is not None:  # in the first layer that has a table
                    rows, pairs = rows + F.embedding(pairs.view(B), self.ngrams.values.weight), None
                v = torch.addcmul(v, gates[:, H:], rows.to(self.dtype).view(B, H, C // H))
            y = gates[:, :H] * self._attend(qk, v, cache, i).to(self.dtype)
            x = torch.addmm(x, y.view(B, C), out)
            x = torch.addmm(x, F.leaky_relu_(norm(x) @ up, SLOPE).square_(), down)
        return softcap(norm(x) @ self.head)

    def _with_copied(self, x_and_share, ids):
        """x and share, (2, B, C), with what Copying adds to them after the tokens ids (B, length)."""
        n = ids.size(1)
        if self.copy_scales is None or n == 1:
            return x_and_share
        ngrams = F.pad(ids, (LONGEST - 1, 0), value=-1).unfold(1, LONGEST, 1)  # those that end at each token
        lengths = (ngrams[:, :-1] == ngrams[:, -1:]).flip(-1).cumprod(-1).sum(-1)  # of matches, (B, n - 1)
        places = torch.arange(n - 1, device=ids.device)
        best = torch.add(places, lengths, alpha=n).amax(-1)  # of the longest the last, in one number
        token = ids.gather(1, (best % n + 1)[:, None])[:, 0]
        rows = torch.stack((self.embedding[token], self.head_rows[token]))
        rows = F.rms_norm(rows, rows.shape[-1:]).to(self.dtype)
        return torch.addcmul(x_and_share, self.copy_scales[:, best // n], rows)

    def _attend(self, qk, v, cache: KVCache, i: int):
        """Add a key and a value to layer i, and attend to its window; returns (B, H, D)."""
        layer, (q, k) = cache.layers[i], qk.unbind(1)  # (B, H, D)
        layer.k.select(2, layer.length + 1).copy_(k)
        layer.v.select(2, layer.length).copy_(v)
        layer.length += 1
        first = max(0, layer.length - self.windows[i])
        k, v = layer.k[:, :, first : layer.length], layer.v[:, :, first : layer.length]
        mask = None if cache.visible is None else cache.visible[..., first : layer.length]
        y = F.scaled_dot_product_attention(q.unsqueeze(2).to(k.dtype), k, v, attn_mask=mask)
        return y.squeeze(2)


# ------------------------------------------------------------------------------------------------------
# Does it compute what gpt.py computes?

# model -> (state of its weights, DecodeStep), for models that do not train
MADE = weakref.WeakKeyDictionary()


def decode_step(model, dtype: torch.dtype) -> DecodeStep | None:
    """A DecodeStep of the model that computes in `dtype`, or None if the model needs its own forward pass:
    its code differs from the equations here, or a hook waits for its modules."""
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return None
    kinds, reason = examine(type(model), model.config)
    if reason or kinds != kinds_of(model):
        return None
    if any(p.requires_grad for p in model.parameters()):
        return DecodeStep(model, dtype)
    state = dtype, [(p.data_ptr(), p.is_inference() or p._version) for p in model.parameters()]
    if MADE.get(model, (None,))[0] != state:
        MADE[model] = state, DecodeStep(model, dtype)
    return MADE[model][1]


def kinds_of(model) -> list[type]:
    """The types of a model's modules. A layer of fp8.py counts as nn.Linear: without gradients it is one."""
    return [nn.Linear if type(module) is Float8Linear else type(module) for module in model.modules()]


@functools.cache
def examine(kind: type, config) -> tuple[list[type], str]:
    """The types of a model's modules, and how its code differs from DecodeStep: a sentence, empty if equal.

    All logits of a small float32 model of this code are compared; none of its parameters is zero, so no
    difference hides.
    """
    kinds = []
    try:
        model = small_model(kind, config)
        kinds = kinds_of(model)
        with torch.device("cpu"):
            reason = _difference(model)
    except Exception as error:  # whatever an edited model raises, its own forward pass can still be used
        reason = error_in_a_line(error)
    if reason:
        print(
            f"note: text is written with the model's own forward pass, which is slower ({reason})",
            file=sys.stderr,
            flush=True,
        )
    return kinds, reason


def _difference(model) -> str:
    """How a small model differs from DecodeStep: a sentence, empty if equal. Changes the model's weights."""
    unknown = [name for name, _ in model.named_parameters() if not KNOWN & set(name.split("."))]
    if unknown:
        return f"decode.py does not know {', '.join(unknown)}"
    T, V = model.config.max_seq_len, model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.5 if p.ndim == 2 else 1))
        idx = torch.randint(V, (2, T), generator=generator)
        expected, cache = model(idx), KVCache(model.config)
        model(idx[:, :2], cache=cache)
        step = DecodeStep(model, torch.float32)
        found = torch.stack([step(idx[:, i : i + 1], cache) for i in range(2, T)], 1)
    if not torch.allclose(found, expected[:, 2:], rtol=1e-3, atol=1e-3):
        return "gpt.py computes something else than decode.py"
    return ""
