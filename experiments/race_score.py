"""Scores saved models, ours or karpathy/nanochat's, in the same way: for the race and for equal_tokens.

`score` starts this file in a process of its own: ours with this project on PYTHONPATH, the peer's with the
peer's folder there, so `nanochat` is another package in each. It prints a line for each checkpoint: what
bits_per_byte returns, as JSON.

Every token of every document is scored once. A document is cut into windows. A window is a row of its own,
which begins with <|bos|> and sees nothing else. Both compute in float32, whatever the training used.
"""

import itertools
import json
import math
import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}  # of a forward pass
EDGES = [0, *(4**k for k in range(2, 9))]  # of a token's context, in tokens
MULTIPLE = 16  # rows have a multiple of so many tokens: windows of about the same length share a batch
ANSWER = '{"bpb": '  # how a line with an answer begins; either side may print others

Window = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, (n,) int64


# ------------------------------------------------------------------------------------------------------
# Here


def write_job(text: Path, folder: Path, length: int):
    """The validation part of a text of peer_run.prepare as tokens, for race_score.py: folder / "job.pt".
    length: the most tokens of a window."""
    from experiments.peer_run import VALIDATION
    from nanochat.data.parquet import Documents
    from nanochat.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(text / "tokenizer" / "tokenizer.json")
    documents = map(tokenizer.encode, Documents([text / "base_data_climbmix" / VALIDATION]))
    job = {
        "documents": [torch.from_numpy(document.astype("int64")) for document in documents],
        "bos_id": tokenizer.bos_id,
        "token_bytes": torch.from_numpy(tokenizer.token_bytes()),
        "length": length,
    }
    torch.save(job, folder / "job.pt")


def score(side: str, checkpoints, place: Path, checkout: Path, device: str = "cpu") -> list[dict]:
    """What bits_per_byte finds for each checkpoint of one side, "ours" or "peer". place: the folder of
    `write_job`; checkout: the peer's; device: cpu or cuda. Raises UserError if it fails."""
    from experiments import peer_run

    folder = ROOT if side == "ours" else checkout
    environment = os.environ | {"PYTHONPATH": str(folder), "NANOCHAT_DTYPE": "float32"}
    command = [sys.executable, __file__, side, place / "job.pt", device, *checkpoints]
    failed = f"the checkpoints of {side} could not be scored"
    done = peer_run.watch(command, folder, environment, failed)
    return [json.loads(line) for _, line in done.lines if line.startswith(ANSWER)]


# ------------------------------------------------------------------------------------------------------
# In the process


def windows(documents: list[torch.Tensor], bos_id: int, length: int) -> list[Window]:
    """The windows of all documents, each of at most `length` tokens, longest first."""
    found = []
    for document in documents:
        for targets in document.split(length):
            found.append((torch.cat([torch.tensor([bos_id]), targets[:-1]]), targets))
    return sorted(found, key=lambda window: -len(window[1]))


def batches(found: list[Window], bos_id: int, length: int, tokens: int):
    """(inputs, targets), (rows, T) int64, of windows of about the same length; T is at most `length`, and
    rows x T at most `tokens`, or a row. Padding has target -1."""
    while found:
        T = min(length, math.ceil(len(found[0][1]) / MULTIPLE) * MULTIPLE)
        rows = max(1, tokens // T)
        batch, found = found[:rows], found[rows:]
        inputs = torch.full((len(batch), T), bos_id)
        targets = torch.full((len(batch), T), -1)
        for row, (before, wanted) in enumerate(batch):
            inputs[row, : len(before)], targets[row, : len(wanted)] = before, wanted
        yield inputs, targets


@torch.inference_mode()
def bits_per_byte(losses, job: dict, device: str = "cpu") -> dict:
    """{"bpb": of all tokens, "by_position": {"1-16": of tokens with so many before them in the row, ...}}.

    losses(inputs, targets) gives the loss of each target in nats, float32, anything where it is -1. Its
    tensors are on the device.

    job: documents, a list of (n,) int64; bos_id; length, the most tokens of a window; token_bytes (V,) int64.
    """
    nats, scored_bytes = torch.zeros(2, job["length"], dtype=torch.float64)  # by position
    bos_id, length = job["bos_id"], job["length"]
    found = windows(job["documents"], bos_id, length)
    for inputs, targets in batches(found, bos_id, length, BATCH_TOKENS[device]):
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


def main():
    side, job, device, *checkpoints = sys.argv[1:]
    job = torch.load(job)
    for checkpoint in checkpoints:
        losses = {"ours": ours, "peer": peer}[side](checkpoint, device)
        print("\n" + json.dumps(bits_per_byte(losses, job, device)), flush=True)  # on a line of its own


if __name__ == "__main__":
    main()
