"""From a checkpoint to text: load a model for inference, and generate with a KV cache. With the cache, a new
token costs a forward pass of that token only."""

import codecs
import contextlib
import itertools
from dataclasses import replace
from pathlib import Path

import torch

from nanochat import UserError
from nanochat.checkpoint import Checkpoint, checkpoints_in, open_in
from nanochat.data.tokenizer import Tokenizer
from nanochat.decode import KVCache, decode_step
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine.precision import autocast
from nanochat.ops.subword import SubwordEmbedding

NOT_NUMBERS = (
    "the model's logits are not numbers: its training went wrong, or they overflow in this dtype; use "
    "--dtype=float32 or an earlier checkpoint"
)

# Loading


def find_source(
    source: str | None, base_dir: Path, say=print, kinds=("mid_checkpoints", "base_checkpoints")
) -> Checkpoint:
    """The verified checkpoint that the setting `source` means.

    source: a run's tag, the folder of a run or of a checkpoint, or None for the newest run of the first
    of `kinds` that has any. Runs are looked up under the folders `kinds` of base_dir, in this order. A run
    stands for its newest good checkpoint; `say` gets the names of damaged ones, and which run None means if
    there are several. Raises UserError if nothing is found.
    """
    places, runs = [Path(base_dir) / name for name in kinds], []
    for place in places:
        saved = {run: when for run in place.glob("*") if (when := _last_saved(run)) >= 0}
        runs += sorted(saved, key=saved.get, reverse=True)  # the newest first
    if source is None and len(runs) > 1:
        names = [f"{r.name} ({r.parent.name}, step {max(checkpoints_in(r), default=0)})" for r in runs]
        say(f"source: {runs[0].name}, the newest of its kind; there are {', '.join(names)}")
    for path in runs[:1] if source is None else [*(place / source for place in places), source]:
        if checkpoint := open_in(path, say, "source"):
            return checkpoint
    if source is None:
        raise UserError(f"no checkpoint under {base_dir}; train one with python -m scripts.base_train")
    tags = ", ".join(dict.fromkeys(run.name for run in runs)) or "none"
    raise UserError(
        f"no checkpoint at {source}; source is a run's tag (under {base_dir} there are: {tags}), its folder, "
        "or the folder of a checkpoint"
    )


def _last_saved(run: Path) -> float:
    """When a run's last checkpoint was written, in seconds since 1970; -1 if it has none for this user."""
    times = [-1.0]
    with contextlib.suppress(UserError):  # the folder may be closed to this user
        for folder in checkpoints_in(run).values():
            with contextlib.suppress(OSError):  # the run that writes here has just deleted it
                times.append(folder.stat().st_mtime)
    return max(times)


def cast_weights(model: GPT, dtype: torch.dtype) -> GPT:
    """Cast the matrices and embeddings of a model to `dtype` for inference, in place; returns the model.

    Autocast would cast every matrix again for every token. The residual stream takes the dtype of the
    embeddings. Scalars and rotary tables stay float32 and are rounded where they are used, as under autocast.
    """
    for p in model.parameters():
        if p.ndim == 2:
            p.data = p.data.to(dtype)
    return model


def model_config(checkpoint: Checkpoint, tensors: dict) -> GPTConfig:
    """The configuration of a checkpoint with these tensors, {name: tensor}; UserError if GPT has others."""
    differs = ""
    with contextlib.suppress(KeyError, TypeError, ValueError, ArithmeticError, RuntimeError):
        config = GPTConfig(**checkpoint.state["identity"]["model"])
        with torch.device("meta"):
            expected = GPT(config).state_dict()
        theirs, ours = ({n: t.shape for n, t in model.items()} for model in (tensors, expected))
        if not (wrong := [n for n in ours | theirs if theirs.get(n) != ours.get(n)]):
            return config
        differs = f" (they differ in {', '.join(wrong[:5])})"
    raise UserError(
        f"{checkpoint.path} holds no model that this nanochat knows{differs}; use the version that wrote it"
    )


def fold_subwords(config: GPTConfig, tensors: dict) -> tuple[GPTConfig, dict]:
    """The same model without sub-word embeddings: the rows of its tensors {name: tensor} have them added."""
    subword, prefix = SubwordEmbedding(config.vocab_size, config.width), "pieces."
    theirs = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    subword.load_state_dict(theirs, assign=True)
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    names = "embedding.weight", "head.weight"
    with torch.no_grad():
        rest.update(zip(names, subword(*(tensors[name] for name in names)), strict=True))
    return replace(config, spelled=False), rest


def load_for_inference(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model of a checkpoint, on `device`, with its matrices in `dtype` and its sub-word rows added to
    those of tokens. Raises UserError as `model_config` does."""
    tensors = checkpoint.load_model()
    config = model_config(checkpoint, tensors)
    if config.spelled:
        config, tensors = fold_subwords(config, tensors)
    with torch.device("meta"):
        model = GPT(config)
    cast_weights(model, dtype).to_empty(device=device)
    model.init_rotary()
    model.load_state_dict(tensors)
    return model.eval().requires_grad_(False)


def load_tokenizer(checkpoint: Checkpoint, config: GPTConfig) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises UserError if it is not that of a model of this configuration."""
    tokenizer = Tokenizer.load(checkpoint.path / "tokenizer.json")
    if tokenizer.vocab_size != config.vocab_size:
        raise UserError(
            f"{checkpoint.path} has the tokenizer of another model; copy the right tokenizer.json into it"
        )
    return tokenizer


# Generating


def sample_token(logits, temperature: float, top_k: int, top_p: float, draw):
    """Draw a token for each row of logits (B, V) float32; returns ids (B, 1) int64, -1 if the row has nan.

    temperature: 0 takes the likeliest token; so does a value below 1e-6, since dividing by it may overflow.
    top_k: only the k likeliest tokens are drawn (k <= 0: all). top_p: among those, only the likeliest that
    together reach this share of the probability, at least one (nucleus sampling, arXiv 1904.09751).
    draw: (B, 1), of `uniform_draws`. The tokens share [0, 1) by their probabilities, and the one at
    `draw` is taken; so a row's token does not depend on other rows.
    """
    if temperature < 1e-6:
        top, ids = logits.max(-1, keepdim=True)
        return torch.where(top.isfinite(), ids, -1)
    ids = None
    if 0 < top_k < logits.size(-1):
        logits, ids = logits.topk(top_k)  # likeliest first
    elif top_p < 1:
        logits, ids = logits.sort(-1, descending=True)
    p = (logits / temperature).softmax(-1)
    reached = p.cumsum(-1, dtype=draw.dtype)
    total = reached[:, -1:]
    if top_p < 1:
        kept = (reached - p < top_p * total).sum(-1, keepdim=True)  # the likelier ones do not reach top_p yet
        total = reached.gather(-1, kept - 1)
    place = (reached <= draw * total).sum(-1, keepdim=True).clamp(max=p.size(-1) - 1)
    token = place if ids is None else ids.gather(-1, place)
    return torch.where(total.isfinite(), token, -1)


def uniform_draws(seeds, device):
    """Yield uniform random numbers on [0, 1), (B, 1) on `device`, without end, a stream for each seed. They
    are float64, on MPS, which has none, float32.

    They come from the CPU, 64 of each stream at a time, so a seed means the same numbers on every device.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    while True:
        rows = [torch.rand(64, generator=g, dtype=torch.float64) for g in generators]
        yield from torch.stack(rows).to(dtype).to(device).split(1, dim=1)


class Stream:
    """Texts that a model reads and continues, one a row, with one KV cache for all of them.

        stream = Stream(model, dtype)
        stream.read([[bos, 5, 7], [bos, 8]])             # any lengths
        for column in stream.write(100, seeds=[0, 1]):   # [12, 9], then [31, None]: the second text has ended
            ...
        stream.read([[], [4]])                           # what follows, such as the next turn of a chat
        for column in stream.write(100, seeds=[2, 3]):
            ...

    The model's own forward pass reads. A DecodeStep writes if it computes the same, else the forward pass.
    dtype is autocast's; float32 means no autocast, which is right after `cast_weights` too.
    """

    def __init__(self, model, dtype: torch.dtype = torch.float32, fast: bool = True):
        self.model, self.dtype = model, dtype
        weight = model.embedding.weight
        self.device, self.max_seq_len = weight.device, model.config.max_seq_len
        compute_dtype = weight.dtype if dtype == torch.float32 else dtype
        self.step = decode_step(model, compute_dtype) if fast else None
        # On a CPU, attention of one token is several times as slow in 16 bits as in float32
        in_float32 = self.step and self.device.type == "cpu"
        self.cache = KVCache(model.config, dtype=torch.float32 if in_float32 else None)
        self.lengths = []  # each text's number of tokens in the cache
        self.waiting = []  # each text's tokens that the cache does not have yet
        self.logits = None  # (B, V) float32, after the last token of each text in the cache
        self.live = []  # whether `write` may continue the text

    def room(self, row: int) -> int:
        """Tokens that fit after the text: later positions were never trained, and without the oldest ones all
        others would have to be computed again."""
        return self.max_seq_len - self.lengths[row] - len(self.waiting[row])

    @torch.inference_mode()
    def read(self, texts: list[list[int]]):
        """Add tokens to each text. Raises ValueError if there is no room for them."""
        if not self.lengths:
            self.lengths, self.live = [0] * len(texts), [False] * len(texts)
            self.waiting = [[] for _ in texts]
        for row, tokens in enumerate(texts):
            if len(tokens) > self.room(row):
                raise ValueError(f"{len(tokens)} tokens do not fit, the row has room for {self.room(row)}")
        for row, tokens in enumerate(texts):
            self.waiting[row] += tokens
            self.live[row] = self.live[row] or bool(tokens)
        self._read_waiting()

    def _read_waiting(self):
        """One forward pass over the waiting tokens, padded on the right; then the cache drops the padding."""
        counts = [len(tokens) for tokens in self.waiting]
        if not any(counts):
            return
        if self.cache.length:
            self.cache.align(self.lengths)
        block = [tokens + [0] * (max(counts) - len(tokens)) for tokens in self.waiting]
        idx = torch.tensor(block, device=self.device)
        last = [row * idx.size(1) + max(0, n - 1) for row, n in enumerate(counts)]
        with autocast(self.device, self.dtype):
            logits = self.model(idx, cache=self.cache, positions=torch.tensor(last, device=self.device))
        self.lengths = [a + n for a, n in zip(self.lengths, counts, strict=True)]
        self.waiting = [[] for _ in counts]
        self.cache.align(self.lengths)
        if not all(counts) and self.logits is not None:  # texts without new tokens keep their logits
            logits = torch.where(torch.tensor(counts, device=self.device)[:, None] > 0, logits, self.logits)
        self.logits = logits

    def _read_column(self, column):
        """The same for one token of every row, (B, 1). Those of rows that have ended are dropped later."""
        column = column.clamp(min=0)  # -1 in a row that has ended
        if self.step:
            self.logits = self.step(column, self.cache)
        else:
            with autocast(self.device, self.dtype):
                self.logits = self.model(column, cache=self.cache)[:, -1]
        for row, tokens in enumerate(self.waiting):
            self.lengths[row] += len(tokens)
            tokens.clear()

    @torch.inference_mode()
    def write(self, max_tokens, temperature=1.0, top_k=-1, top_p=1.0, seeds=(0,), stop_ids=()):
        """Continue each text; yield the next token of every row, None for a text that has ended.

        A text ends at an id in `stop_ids` (it is not yielded, and not part of the text), or when its
        max_seq_len positions are full; it goes on when it has read more. All end after `max_tokens` tokens.
        seeds: one a row; a row's text depends on its own seed and tokens, and on the other rows at most by
        the rounding of sums. Raises UserError if logits are not finite.
        """
        draws, column = uniform_draws(seeds, self.device), None
        self.cache.reserve(min(max(self.lengths) + max_tokens, 2 * self.max_seq_len))
        for _ in range(max_tokens if any(self.live) else 0):
            if column is None:
                self._read_waiting()  # the last token of an earlier `write`
            else:
                self._read_column(column)
            column = sample_token(self.logits, temperature, top_k, top_p, next(draws))
            tokens = column.flatten().tolist()
            for row, token in enumerate(tokens):
                if self.live[row] and token == -1:
                    raise UserError(NOT_NUMBERS)
                if token in stop_ids or not self.room(row):
                    self.live[row] = False
                if self.live[row]:
                    self.waiting[row].append(token)
            if not any(self.live):
                return
            yield [token if live else None for token, live in zip(tokens, self.live, strict=True)]


def generate_batch(model, prompts, max_tokens, dtype=torch.float32, seeds=None, **options):
    """Yield the next token of every prompt, None for those that have ended. `options`: of Stream.write.

    A prompt is a list of ids that starts with <|bos|>; one that is too long keeps its end. A model of another
    class than GPT has no cache: each token costs a forward pass over all tokens so far.
    """
    prompts = [prompt[-(model.config.max_seq_len - 1) :] for prompt in prompts]
    seeds = seeds or [0] * len(prompts)
    if not isinstance(model, GPT):
        pairs = zip(prompts, seeds, strict=True)
        texts = [_uncached(model, prompt, max_tokens, dtype, seed, **options) for prompt, seed in pairs]
        yield from map(list, itertools.zip_longest(*texts))
        return
    stream = Stream(model, dtype)
    stream.read(prompts)
    yield from stream.write(max_tokens, seeds=seeds, **options)


@torch.inference_mode()
def _uncached(model, ids, max_tokens, dtype, seed, temperature=1.0, top_k=-1, top_p=1.0, stop_ids=()):
    """Yield the tokens that continue `ids`, by model(idx) alone."""
    device = next(model.parameters()).device
    draws, ids = uniform_draws([seed], device), list(ids)
    for _ in range(min(max_tokens, model.config.max_seq_len - len(ids))):
        with autocast(device, dtype):
            logits = model(torch.tensor([ids], device=device))[:, -1].float()
        token = sample_token(logits, temperature, top_k, top_p, next(draws)).item()
        if token == -1:
            raise UserError(NOT_NUMBERS)
        if token in stop_ids:
            return
        ids.append(token)
        yield token


def generate(model, prompt, max_tokens, dtype=torch.float32, seed=0, **options):
    """Yield up to `max_tokens` token ids that continue one prompt; see `generate_batch`."""
    for column in generate_batch(model, [prompt], max_tokens, dtype, [seed], **options):
        yield column[0]


def continuations(model, tokenizer, prompts, dtype, seed, max_tokens=96) -> list[str]:
    """Each prompt with its continuation by the model, or with the reason why there is none."""
    ids = [[tokenizer.bos_id, *tokenizer.encode(prompt).tolist()] for prompt in prompts]
    options = {"temperature": 0.8, "top_k": 50, "stop_ids": {tokenizer.bos_id}}
    try:
        columns = list(generate_batch(model, ids, max_tokens, dtype, [seed] * len(ids), **options))
    except UserError as error:  # a bad sample must not end a training run
        return [f"{prompt} ({error})" for prompt in prompts]
    rows = [[column[row] for column in columns if column[row] is not None] for row in range(len(prompts))]
    return [prompt + tokenizer.decode(row) for prompt, row in zip(prompts, rows, strict=True)]


def text_pieces(tokens, tokenizer):
    """Yield the text of a stream of token ids as they come; joined, the pieces are tokenizer.decode(ids).

    The bytes of an incomplete character wait for the next token. Bytes that never become a character give
    U+FFFD.
    """
    specials = {token: text.encode() for text, token in tokenizer.special_tokens.items()}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        if piece := decoder.decode(specials.get(token) or tokenizer.tokens[token]):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest
