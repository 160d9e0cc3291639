"""Let a checkpoint write: it continues a prompt, or each line that you type.

    python -m scripts.chat --prompt="def main("          # the newest checkpoint
    python -m scripts.chat --source=laptop               # a run's tag, its folder, or a checkpoint's
    echo "import" | python -m scripts.chat --top_p=0.9   # a line, a text

Without a prompt an empty line or Ctrl-D ends it. A base model knows no conversation: it continues the text,
and each line begins a new one. Text goes to stdout, everything else to stderr.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Literal

import configurator
from nanochat import UserError, precision, runtime
from nanochat.data.tokenizer import Tokenizer
from nanochat.engine import find_source, generate, load_for_inference, text_pieces

# What writes
source: str | None = None  # a run's tag, its folder or a checkpoint's (none = the newest, mid before base)
base_dir = "~/.cache/nanochat"  # where runs live (environment: NANOCHAT_BASE_DIR)

# What it writes
prompt: str | None = None  # text to continue (none = each line of the input)
temperature = 0.8  # below 1 likely tokens are drawn more often than the model says (0 = always the likeliest)
top_k = 50  # drawn from so many likeliest tokens (-1 = off)
top_p = 1.0  # drawn from the likeliest tokens that have this share of all probability (1 = off)
max_tokens = 256  # tokens to write (-1 = until the model's max_seq_len is full)
seed = 42  # of what is drawn; line n of the input has seed + n

# Machine
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of weights and arithmetic

settings = configurator.configure(globals())


def interrupted(number, frame):
    """Ctrl-C: no traceback."""
    os.write(2, b"\n")
    sys.exit(130)


signal.signal(signal.SIGINT, interrupted)
for name, fine, takes in (
    ("temperature", temperature >= 0, "a number from 0"),
    ("top_k", top_k == -1 or top_k >= 1, "a number from 1, or -1 for all tokens"),
    ("top_p", 0 < top_p <= 1, "a share above 0, up to 1"),
    ("max_tokens", max_tokens == -1 or max_tokens >= 1, "a number from 1, or -1 for as many as fit"),
):
    if not fine:
        raise UserError(f"{name} is {globals()[name]}; give {takes}")


def note(text: str):
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------
# Load: the checkpoint, its tokenizer, its weights cast once

machine = runtime.start(device_type, seed)
compute_dtype, dtype_reason = precision.resolve_dtype(dtype, machine.device)
checkpoint = find_source(source, Path(base_dir).expanduser(), note)
tokenizer = Tokenizer.load(checkpoint.path / "tokenizer.json")
model = load_for_inference(checkpoint, machine.device, compute_dtype)
room = model.config.max_seq_len
for stream in (sys.stdin, sys.stdout):  # what a terminal cannot show, or bytes that are no text, end nothing
    stream.reconfigure(errors="replace")
note(
    f"{checkpoint.path}: {sum(p.numel() for p in model.parameters()):,} parameters on {machine.device.type} "
    f"in {str(compute_dtype).removeprefix('torch.')} ({dtype_reason})"
)


def beginning(text: str) -> list[int]:
    """Ids that the model continues. The end of a text that is too long, so that half of the row is free."""
    ids = tokenizer.encode(text).tolist()
    wanted = room if max_tokens == -1 else max_tokens
    keep = max(room - 1 - wanted, room // 2 - 1)  # <|bos|> takes a place too
    if len(ids) > keep:
        note(f"(the prompt has {len(ids)} tokens; of its end the model sees {keep}, its row has {room})")
    return [tokenizer.bos_id, *ids[max(0, len(ids) - keep) :]]


def write(text: str, draw_seed: int):
    """Print the text and what the model adds, as it comes."""
    ids, written = beginning(text), []
    many = room if max_tokens == -1 else max_tokens
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop_ids": {tokenizer.bos_id}}

    def tokens():
        for token in generate(model, ids, many, seed=draw_seed, **options):
            written.append(token)
            yield token

    print(text, end="", flush=True)
    for piece in text_pieces(tokens(), tokenizer):
        print(piece, end="", flush=True)
    print(flush=True)
    if len(written) < many and len(written) == room - len(ids):
        note(f"(the model's {room} positions are full)")


def lines():
    """What is typed, up to an empty line or the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line:
            return
        yield line


# ------------------------------------------------------------------------------------------------------
# Write

try:
    for number, text in enumerate(lines() if prompt is None else [prompt]):
        write(text, seed + number)
except BrokenPipeError:  # whoever read it has gone, as `head` does
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
