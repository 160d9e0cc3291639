"""From a checkpoint to text: load a model for inference, and generate with a KV cache. With the cache, a new
token costs a forward pass of that token only."""

import codecs
import contextlib
import os
from pathlib import Path

import torch

from nanochat import UserError
from nanochat.checkpoint import Checkpoint, checkpoints_in, find, is_checkpoint, open_checkpoint
from nanochat.gpt import GPT, GPTConfig
from nanochat.paths import user_path
from nanochat.precision import autocast

# Loading


def find_source(source: str | None, base_dir: Path, say=print) -> Checkpoint:
    """The verified checkpoint that the setting `source` means.

    source: a run's tag, the folder of a run or of a checkpoint, or None for the run that was saved last. Runs
    are looked up under base_dir/mid_checkpoints, then under base_dir/base_checkpoints. A run stands for its
    newest good checkpoint; `say` gets the names of damaged ones. Raises UserError if nothing is found.
    """
    places = [Path(base_dir) / name for name in ("mid_checkpoints", "base_checkpoints")]
    runs = [
        sorted((run for run in place.glob("*") if checkpoints_in(run)), key=_last_saved) for place in places
    ]
    if source is None:
        folders = [of_place[-1] for of_place in runs if of_place]
    else:
        folders = [*(place / source for place in places), user_path("source", source)]
    for folder in folders:
        if is_checkpoint(folder):
            return open_checkpoint(folder)
        if checkpoints_in(folder):
            return find(folder, "auto", say)
    if source is None:
        raise UserError(f"no checkpoint under {base_dir}; train one with python -m scripts.base_train")
    tags = ", ".join(dict.fromkeys(run.name for of_place in runs for run in of_place)) or "none"
    raise UserError(
        f"no checkpoint at {source}; source is a run's tag (under {base_dir} there are: {tags}), its folder, "
        "or the folder of a checkpoint"
    )


def _last_saved(run: Path) -> float:
    """When a run's last checkpoint was written, in seconds since 1970."""
    times = [0.0]
    for folder in checkpoints_in(run).values():
        try:
            times.append(os.path.getmtime(folder))
        except FileNotFoundError:  # the run that writes here has just deleted it
            continue
    return max(times)


def cast_weights(model: GPT, dtype: torch.dtype) -> GPT:
    """Cast the matrices and embeddings of a model to `dtype`, in place; returns the model.

    It is for inference: autocast would cast every matrix again for every token. The residual stream takes the
    dtype of the embeddings. The two scalars of each block and the rotary tables stay float32 and are rounded
    where they are used, as under autocast; so the model can go back to float32 with exact tables. Norms
    and softmax sum in float32 inside their kernels, and the logits are float32 after the head.
    """
    for p in model.parameters():
        if p.ndim == 2:
            p.data = p.data.to(dtype)
    return model


def load_for_inference(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model of a checkpoint, on `device`, with its matrices in `dtype`. Raises UserError if it is a model
    that this project does not know."""
    tensors, fits = checkpoint.load_model(), False
    with contextlib.suppress(KeyError, TypeError), torch.device("meta"):
        model = GPT(GPTConfig(**checkpoint.state["identity"]["model"]))
        fits = {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in model.state_dict().items()}
    if not fits:
        raise UserError(
            f"{checkpoint.path} holds no model that this nanochat knows; use the version that wrote it"
        )
    cast_weights(model, dtype).to_empty(device=device)
    model.init_rotary()
    model.load_state_dict(tensors)
    return model.eval().requires_grad_(False)


# Generating


class LayerCache:
    """Keys and values of one layer for the positions so far: (B, H, length, D), in buffers of max_seq_len."""

    def __init__(self, max_seq_len: int):
        self.max_seq_len, self.length, self.k, self.v = max_seq_len, 0, None, None

    def append(self, k, v):
        """Add k and v (B, H, T, D) of T new positions; returns those of all positions."""
        if self.k is None:
            B, H, _, D = k.shape
            self.k, self.v = (
                torch.empty(B, H, self.max_seq_len, D, dtype=x.dtype, device=x.device) for x in (k, v)
            )
        stop = self.length + k.size(2)
        self.k[:, :, self.length : stop], self.v[:, :, self.length : stop] = k, v
        self.length = stop
        return self.k[:, :, :stop], self.v[:, :, :stop]


class KVCache:
    """A LayerCache for each layer; `length` is the number of positions in it."""

    def __init__(self, config: GPTConfig):
        self.layers = [LayerCache(config.max_seq_len) for _ in range(config.depth)]

    @property
    def length(self) -> int:
        return self.layers[0].length


def sample_token(logits, temperature: float, top_k: int, top_p: float, generator):
    """Draw a token for each row of logits (B, V) float32; returns ids (B, 1) int64.

    temperature: 0 takes the likeliest token; so does a value below 1e-6, since dividing by it may overflow.
    top_k: only the k likeliest tokens are drawn (k <= 0: all). top_p: of those, only the likeliest ones that
    together reach this share of the probability, at least one (nucleus sampling, arXiv 1904.09751).
    """
    if temperature < 1e-6:
        return logits.argmax(-1, keepdim=True)
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    p = (logits / temperature).softmax(-1)
    if top_p < 1:
        sorted_p, order = p.sort(-1, descending=True)
        before = sorted_p.cumsum(-1) - sorted_p  # the probability of all likelier tokens
        p = torch.zeros_like(p).scatter(-1, order, sorted_p.masked_fill(before >= top_p, 0))
    return torch.multinomial(p, 1, generator=generator)


@torch.inference_mode()
def generate(
    model, prompt, max_tokens, dtype=torch.float32, temperature=1.0, top_k=-1, seed=0, stop_ids=(), top_p=1.0
):
    """Yield up to `max_tokens` token ids that continue `prompt`, a list of ids that starts with <|bos|>.

    A prompt that is too long keeps its end. Generation ends early at an id in `stop_ids` (it is not yielded),
    or when max_seq_len positions are full: later positions were never trained, and without the oldest ones
    all others would have to be computed again. dtype is autocast's; float32 means no autocast, which is right
    after `cast_weights` too. The same seed gives the same text, whatever was drawn before. Raises UserError
    if the logits are not finite.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    cache = KVCache(model.config)
    idx = torch.tensor([prompt[-(model.config.max_seq_len - 1) :]], device=device)  # (1, T)
    for _ in range(min(max_tokens, model.config.max_seq_len - idx.size(1))):
        with autocast(device, dtype):
            logits = model(idx, cache=cache)[:, -1]  # (1, V)
        if not logits.amax().isfinite():  # on a GPU, drawing from such logits would kill the process
            raise UserError(
                "the model's logits are not numbers: its training went wrong, or they overflow in this "
                "dtype; use --dtype=float32 or an earlier checkpoint"
            )
        idx = sample_token(logits, temperature, top_k, top_p, generator)
        token = idx.item()
        if token in stop_ids:
            return
        yield token


def continuations(model, tokenizer, prompts, dtype, seed, max_tokens=96) -> list[str]:
    """Each prompt with its continuation by the model, or with the reason why there is none."""
    texts, options = [], {"temperature": 0.8, "top_k": 50, "seed": seed, "stop_ids": {tokenizer.bos_id}}
    for prompt in prompts:
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
        try:
            texts.append(prompt + tokenizer.decode(list(generate(model, ids, max_tokens, dtype, **options))))
        except UserError as error:  # a bad sample must not end a training run
            texts.append(f"{prompt} ({error})")
    return texts


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
