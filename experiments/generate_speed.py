"""Times generation for `python -m scripts.bench --what=generate --peer=FOLDER`, ours and that of
karpathy/nanochat in turn.

The bench calls `bench`, which starts this file twice, in this project and in the peer's folder, so `nanochat`
is another package in each. The first line of stdin has the shapes as JSON. Every further line is a batch size
and asks for one turn; the answer is its time in seconds. A turn reads a prompt and writes tokens, streaming,
at temperature 0.8 from the 50 likeliest. Both write the same number of tokens, since no token ends a text.
The weights are random.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

import torch

PROMPT = list(range(1, 17))  # ids
TOKENS = 128  # that a turn writes in each row
BATCH_SIZES = 1, 8


def ours(job: dict):
    """A function of the batch size that writes with our engine."""
    from nanochat.engine import cast_weights, generate_batch
    from nanochat.gpt import GPT, GPTConfig
    from nanochat.machine.precision import DTYPES

    heads = job["width"] // job["head_dim"]
    sizes = job["depth"], job["width"], heads, job["vocab_size"], job["max_seq_len"]
    model = GPT(GPTConfig(*sizes, job["window_pattern"]))
    model.init_weights()
    randomize(model)
    cast_weights(model, DTYPES[job["dtype"]]).requires_grad_(False)
    options = {"temperature": 0.8, "top_k": 50}

    def write(rows: int) -> int:
        return len(list(generate_batch(model, [PROMPT] * rows, job["tokens"], **options)))

    return write


def peers(job: dict):
    """The same with the peer's engine."""
    sys.modules["nanochat.checkpoint_manager"] = types.SimpleNamespace(load_model=None)  # needs its tokenizer
    from nanochat.engine import Engine
    from nanochat.gpt import GPT, GPTConfig

    heads = job["width"] // job["head_dim"]
    sizes = {"n_layer": job["depth"], "n_embd": job["width"], "n_head": heads, "n_kv_head": heads}
    sizes |= {"vocab_size": job["vocab_size"], "sequence_len": job["max_seq_len"]}
    model = GPT(GPTConfig(**sizes, window_pattern=job["window_pattern"]))
    model.init_weights()
    randomize(model)
    nothing = types.SimpleNamespace(encode_special=lambda name: -1, get_bos_token_id=lambda: -1)
    engine = Engine(model.eval(), nothing)
    options = {"max_tokens": job["tokens"], "temperature": 0.8, "top_k": 50}

    def write(rows: int) -> int:
        return len(list(engine.generate(PROMPT, num_samples=rows, **options)))

    return write


@torch.no_grad()
def randomize(model):
    for p in model.parameters():  # fresh models have zeros, and their logits are all alike
        p.add_(0.05 * torch.randn_like(p))


def start(whose: str, job: dict, folder: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(folder), "NANOCHAT_DTYPE": job["dtype"]}
    environment["OMP_NUM_THREADS"] = str(job["threads"])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, __file__, whose], cwd=folder, env=environment, **pipes)
    print(json.dumps(job), file=process.stdin, flush=True)
    return process


def bench(settings: dict) -> dict:
    """The results of `measure` in each dtype of the bench's settings. Raises UserError if `peer` is no folder
    of karpathy/nanochat, or if one of the two fails."""
    from nanochat import UserError
    from nanochat.machine.precision import resolve_dtype
    from nanochat.plan.scaling import model_config

    peer = Path(settings["peer"]).resolve() if settings["peer"] else None
    if peer and not (peer / "nanochat" / "engine.py").exists():
        raise UserError(f"{peer} has no nanochat/engine.py; --peer is a folder of karpathy/nanochat")
    names = ("depth", "head_dim", "vocab_size", "max_seq_len", "window_pattern")
    job = {name: settings[name] for name in names}
    job["width"] = model_config(**job, aspect_ratio=settings["aspect_ratio"]).width
    job |= {"tokens": min(TOKENS, job["max_seq_len"] - len(PROMPT)), "threads": torch.get_num_threads()}
    results = {}
    for dtype in map(str.strip, settings["dtypes"].split(",")):
        resolve_dtype(dtype, torch.device("cpu"))  # refuses an unknown one
        try:
            results |= measure(job | {"dtype": dtype}, settings["rounds"], peer)
        except RuntimeError as error:
            raise UserError(str(error)) from None
    return results


def measure(job: dict, rounds: int, peer: Path | None) -> dict:
    """Tokens per second of ours, of the peer's (peer: its folder), and the median of their ratios.

    job: depth, width, head_dim, vocab_size, max_seq_len, window_pattern, dtype, threads, and the number of
    tokens of a turn.
    """
    processes = {"ours": start("ours", job, Path(__file__).resolve().parent.parent)}
    if peer:
        processes["peers"] = start("peers", job, peer)
    times = {(name, rows): [] for rows in BATCH_SIZES for name in processes}
    try:
        for _ in range(rounds + 1):  # the first round warms up
            for (name, rows), taken in times.items():
                print(rows, file=processes[name].stdin, flush=True)
                answer = processes[name].stdout.readline()
                if not answer:
                    raise RuntimeError(f"the engine of {name} ended, its message stands above")
                taken.append(float(answer))
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return {
        f"batch {rows}, {job['dtype']}": row_of(
            {n: times[n, rows][1:] for n in processes}, rows * job["tokens"]
        )
        for rows in BATCH_SIZES
    }


def row_of(seconds: dict[str, list[float]], tokens: int) -> dict[str, float]:
    """Medians over turns of `tokens` tokens each: {"ours": seconds of each turn, "peers": the same}."""
    row = {f"{name}_tok_per_sec": tokens / statistics.median(taken) for name, taken in seconds.items()}
    if "peers" in seconds:
        ratios = [theirs / mine for mine, theirs in zip(seconds["ours"], seconds["peers"], strict=True)]
        row["speed_relative_to_peer"] = statistics.median(ratios)
    return row


def main():
    write = {"ours": ours, "peers": peers}[sys.argv[1]](job := json.loads(sys.stdin.readline()))
    torch.set_num_threads(job["threads"])
    for line in sys.stdin:
        began = time.perf_counter()
        steps = write(int(line))
        seconds = time.perf_counter() - began
        if steps != job["tokens"]:
            sys.exit(f"{steps} tokens instead of {job['tokens']}")
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
