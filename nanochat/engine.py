"""Generation with a KV cache: each new token costs one forward pass of that token alone."""

import torch

from nanochat.precision import autocast


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

    def __init__(self, config):
        self.layers = [LayerCache(config.max_seq_len) for _ in range(config.depth)]

    @property
    def length(self) -> int:
        return self.layers[0].length


def sample_token(logits, temperature: float, top_k: int, generator):
    """Draw from logits (B, V) float32 -> (B, 1) int64. temperature 0 takes the likeliest; top_k <= 0 keeps
    all."""
    if temperature <= 0:
        return logits.argmax(-1, keepdim=True)
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


@torch.inference_mode()
def generate(model, prompt, max_tokens, dtype=torch.float32, temperature=1.0, top_k=-1, seed=0, stop_ids=()):
    """Yield up to `max_tokens` token ids that continue `prompt` (a list of ids, its first normally <|bos|>).

    Ends early at an id of `stop_ids` (not yielded) or where the model's max_seq_len is full. The same seed
    gives the same text, whatever was drawn before.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    cache = KVCache(model.config)
    idx = torch.tensor([prompt[-(model.config.max_seq_len - 1) :]], device=device)  # (1, T)
    for _ in range(min(max_tokens, model.config.max_seq_len - idx.size(1))):
        with autocast(device, dtype):
            logits = model(idx, cache=cache)[:, -1]  # (1, V)
        idx = sample_token(logits, temperature, top_k, generator)
        token = idx.item()
        if token in stop_ids:
            return
        yield token
