"""From a checkpoint to text: load a model for inference, and generate with a KV cache, where each new token
costs one forward pass of that token alone."""

import codecs
import contextlib
import os
from pathlib import Path

import torch

from nanochat import UserError
from nanochat.checkpoint import Checkpoint, checkpoints_in, find, is_checkpoint, open_checkpoint
from nanochat.gpt import GPT, GPTConfig
from nanochat.precision import autocast

# Loading


def find_source(source: str | None, base_dir: Path, say=print) -> Checkpoint:
    """The verified checkpoint that the setting `source` means: a run's tag, its folder, or a checkpoint's.

    None is the newest under base_dir/mid_checkpoints, or where there is none base_checkpoints; a tag is
    looked up in the same order. Of a run the newest good checkpoint counts; damaged ones are named to `say`.
    Raises UserError where there is none.
    """
    places = [Path(base_dir) / name for name in ("mid_checkpoints", "base_checkpoints")]
    runs = [
        sorted((run for run in place.glob("*") if checkpoints_in(run)), key=_last_saved) for place in places
    ]
    if source is None:
        folders = [of_place[-1] for of_place in runs if of_place]
    else:
        folders = [*(place / source for place in places), Path(source).expanduser()]
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
    """When the newest checkpoint of a run was written, in seconds since 1970."""
    times = [0.0]
    for folder in checkpoints_in(run).values():
        try:
            times.append(os.path.getmtime(folder))
        except FileNotFoundError:  # just now pruned by the run that writes here
            continue
    return max(times)


def cast_weights(model: GPT, dtype: torch.dtype) -> GPT:
    """Cast the matrices and embeddings of a model to `dtype`, in place, once; returns the model.

    For inference, in place of autocast, which casts every matrix anew for every token. The stream takes the
    dtype of the embeddings. What stays float32: the two scalars of each block and the rotary tables, rounded
    where they are used, as under autocast; a rounded table would be wrong for whoever turns to float32
    again. The sums in norms and softmax are float32 inside their kernels, and the logits after the head.
    """
    for p in model.parameters():
        if p.ndim == 2:
            p.data = p.data.to(dtype)
    return model


def load_for_inference(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model of a checkpoint with its weights cast once to `dtype`; UserError if it has none of ours."""
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
    """Keys and values of one layer for the positions so far, (B, H, length, D) inside buffers of
    max_seq_len."""

    def __init__(self, max_seq_len: int):
        self.max_seq_len, self.length, self.k, self.v = max_seq_len, 0, None, None

    def append(self, k, v):
        """Add k and v (B, H, T, D) and return all there are."""
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
    """One LayerCache a layer; `length` is the number of positions held."""

    def __init__(self, config: GPTConfig):
        self.layers = [LayerCache(config.max_seq_len) for _ in range(config.depth)]

    @property
    def length(self) -> int:
        return self.layers[0].length


def sample_token(logits, temperature: float, top_k: int, top_p: float, generator):
    """Draw from logits (B, V) float32 -> (B, 1) int64. temperature 0 takes the likeliest, and so does one so
    near to it that dividing by it might overflow.

    top_k > 0 keeps the k likeliest; then top_p < 1 the fewest likeliest that together have at least that
    share of what is left (nucleus sampling, arXiv 1904.09751), and never none.
    """
    if temperature < 1e-6:
        return logits.argmax(-1, keepdim=True)
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    p = (logits / temperature).softmax(-1)
    if top_p < 1:
        sorted_p, order = p.sort(-1, descending=True)
        before = sorted_p.cumsum(-1) - sorted_p  # what all likelier tokens have
        p = torch.zeros_like(p).scatter(-1, order, sorted_p.masked_fill(before >= top_p, 0))
    return torch.multinomial(p, 1, generator=generator)


@torch.inference_mode()
def generate(
    model, prompt, max_tokens, dtype=torch.float32, temperature=1.0, top_k=-1, seed=0, stop_ids=(), top_p=1.0
):
    """Yield up to `max_tokens` token ids that continue `prompt` (a list of ids, its first normally <|bos|>).

    dtype: autocast's; float32, for none, also where weights are cast already (`cast_weights`). Ends early at
    an id of `stop_ids` (not yielded) or where the model's max_seq_len is full: no position beyond it was ever
    trained, and dropping old ones would mean to compute all others anew. Of a longer prompt the end counts.
    The same seed gives the same text, whatever was drawn before. Raises UserError for logits that are NaN.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    cache = KVCache(model.config)
    idx = torch.tensor([prompt[-(model.config.max_seq_len - 1) :]], device=device)  # (1, T)
    for _ in range(min(max_tokens, model.config.max_seq_len - idx.size(1))):
        with autocast(device, dtype):
            logits = model(idx, cache=cache)[:, -1]  # (1, V)
        if not logits.amax().isfinite():  # drawing from them would end a GPU's process
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
    """The prompts, each with the text that the model goes on with, or the reason why it cannot."""
    texts, options = [], {"temperature": 0.8, "top_k": 50, "seed": seed, "stop_ids": {tokenizer.bos_id}}
    for prompt in prompts:
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
        try:
            texts.append(prompt + tokenizer.decode(list(generate(model, ids, max_tokens, dtype, **options))))
        except UserError as error:  # not a reason to lose a run
            texts.append(f"{prompt} ({error})")
    return texts


def text_pieces(tokens, tokenizer):
    """The text of a stream of token ids, as it comes. The bytes of a character that is not whole yet are held
    back; what never becomes one is U+FFFD. Joined it is tokenizer.decode of all of them."""
    specials = {token: text.encode() for text, token in tokenizer.special_tokens.items()}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        if piece := decoder.decode(specials.get(token) or tokenizer.tokens[token]):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest
