"""Scores saved models, ours or karpathy/nanochat's, in the same way: for the race and for equal_tokens.

Every token of every validation document is scored once, in the batches of our own evaluation: a row is a
window of one document, begins with <|bos|> and sees nothing else. Both sides get the same batches and compute
in float32, whatever the training used. Each is scored in a process of its own, where `nanochat` is another
package.
"""

import io
import itertools
import json
import math
from pathlib import Path

import torch

from experiments.sides import ROOT, Side

BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}  # of a forward pass
EDGES = [0, *(4**k for k in range(2, 9))]  # of a token's context, in tokens


# ------------------------------------------------------------------------------------------------------
# Here


def write_job(text: Path, folder: Path, length: int, device: str = "cpu"):
    """The validation part of a text of peer_run.prepare in batches, for `scores`: folder / "job.pt".
    length: the most tokens of a row. Raises UserError if it cannot be written."""
    from experiments.peer_run import VALIDATION
    from nanochat.data.dataset import writing
    from nanochat.data.tokenizer import Tokenizer
    from nanochat.data.validation import ValidationBatches, tokenize_validation
    from nanochat.files import replacing

    tokenizer = Tokenizer.load(text / "tokenizer" / "tokenizer.json")
    tokens = tokenize_validation([text / "base_data_climbmix" / VALIDATION], tokenizer, -1, folder)
    batches = ValidationBatches(tokens, length, max(1, BATCH_TOKENS[device] // length))
    job = {"batches": list(batches), "token_bytes": torch.from_numpy(tokenizer.token_bytes())}
    packed = io.BytesIO()  # torch.save to a full disk would be a RuntimeError
    torch.save(job | {"length": length}, packed)
    with writing(folder):
        folder.mkdir(exist_ok=True)
        with replacing(folder / "job.pt") as file:  # another command may read the old one now
            file.write(packed.getbuffer())


def score(side: str, checkpoints, place: Path, checkout: Path, device: str = "cpu") -> list[dict]:
    """What bits_per_byte finds for each checkpoint of one side, "ours" or "peer". place: the folder of
    `write_job`; checkout: the peer's; device: cpu or cuda. Raises UserError if it fails."""
    from nanochat import UserError

    job = {"side": side, "checkpoints": list(map(str, checkpoints)), "place": str(place)}
    job |= {"device": device, "dtype": "float32"}
    folder = ROOT if side == "ours" else checkout
    try:
        with Side("experiments.race_score.scores", job, folder) as process:
            return process.facts["scores"]
    except (RuntimeError, MemoryError) as error:
        raise UserError(f"the checkpoints of {side} could not be scored: {error}") from None


# ------------------------------------------------------------------------------------------------------
# In the process


def scores(job: dict) -> dict:
    model_of = {"ours": ours, "peer": peer}[job["side"]]
    text, device = torch.load(Path(job["place"], "job.pt")), job["device"]
    return {"scores": [bits_per_byte(model_of(path, device), text, device) for path in job["checkpoints"]]}


@torch.inference_mode()
def bits_per_byte(losses, job: dict, device: str = "cpu") -> dict:
    """{"bpb": of all tokens, "by_position": {"1-16": of tokens with so many before them in the row, ...}}.

    losses(inputs, targets) gives the loss of each target in nats, float32, anything where it is -1. Its
    tensors are on the device.

    job: batches of (inputs, targets), (rows, T) int64; length, the most of T; token_bytes (V,) int64.
    """
    length = job["length"]
    nats, scored_bytes = torch.zeros(2, length, dtype=torch.float64)  # by position
    for inputs, targets in job["batches"]:
        scored = targets >= 0
        of_each = losses(inputs.to(device), targets.to(device)).view_as(targets).cpu()
        nats[: targets.shape[1]] += torch.where(scored, of_each, 0).double().sum(0)
        scored_bytes[: targets.shape[1]] += (job["token_bytes"][targets] * scored).sum(0)
    bits = nats / math.log(2)
    edges = [pair for pair in itertools.pairwise(EDGES) if pair[0] < length]
    by_position = {f"{a + 1}-{b}": (bits[a:b].sum() / scored_bytes[a:b].sum()).item() for a, b in edges}
    return {"bpb": (bits.sum() / scored_bytes.sum()).item(), "by_position": by_position}


def ours(checkpoint: str, device: str):
    from nanochat.checkpoint import open_checkpoint
    from nanochat.engine import load_for_inference

    model = load_for_inference(open_checkpoint(checkpoint), torch.device(device), torch.float32)
    return lambda inputs, targets: model(inputs, targets, reduction="none")


def peer(checkpoint: str, device: str):
    """checkpoint: a file model_NNNNNN.pt. NANOCHAT_DTYPE is float32."""
    from nanochat.gpt import GPT, GPTConfig

    path = Path(checkpoint)
    meta = json.loads(path.with_name(path.name.replace("model_", "meta_")).with_suffix(".json").read_text())
    with torch.device("meta"):
        model = GPT(GPTConfig(**meta["model_config"]))
    model.to_empty(device=device)
    model.init_weights()  # makes what no checkpoint holds, too
    model.load_state_dict(torch.load(path, map_location=device))
    model.eval()
    return lambda inputs, targets: model(inputs, targets, loss_reduction="none")
