"""Let a checkpoint write: a base model continues texts, a model of mid_train answers in turns.

    python -m scripts.chat --prompt="def main("          # with the newest checkpoint, mid before base
    python -m scripts.chat --source=laptop               # a run's tag, its folder or a checkpoint's folder
    echo "import" | python -m scripts.chat --top_p=0.9   # each line of the input is a prompt

Without --prompt, type a line and press Enter. An empty line or Ctrl-D ends the program. A base model
continues each line as a text of its own. To a model of mid_train each line is your next turn, and it
remembers the earlier ones until its row is full. The text goes to stdout, everything else to stderr.
"""

import signal
import sys
from typing import Literal

import configurator
from nanochat import streams
from nanochat.data import chat_format
from nanochat.data.tokenizer import Tokenizer
from nanochat.engine import Stream, find_source, load_for_inference, text_pieces
from nanochat.files import user_path
from nanochat.machine import precision, runtime
from nanochat.terminal import printable

# Model
source: str | None = None  # a run's tag, its folder or a checkpoint's (none = the newest, mid before base)
base_dir = "~/.cache/nanochat"  # where runs live (environment: NANOCHAT_BASE_DIR)

# Text
prompt: str | None = None  # text to continue or question, may be empty (none = each line that you type)
temperature = 0.8  # randomness (0 = always the likeliest token) [0..100]
top_k = 50  # draw from the k likeliest tokens (-1 = off) [-1, 1..1e9]
top_p = 1.0  # draw from the likeliest tokens that together have this probability (1 = off) [1e-6..1]
max_tokens = 256  # tokens to write (-1 = until the row is full) [-1, 1..1e9]
seed = 42  # of the draws; line n of the input has seed + n [0..2**62]

# Machine
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of weights and computation

settings = configurator.configure(globals())


signal.signal(signal.SIGINT, lambda number, frame: sys.exit(130))  # Ctrl-C: no traceback


def note(text: str):
    print(printable(text), file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------
# Load: the checkpoint, its tokenizer, its weights cast once

machine = runtime.start(device_type, seed)
compute_dtype, dtype_reason = precision.resolve_dtype(dtype, machine.device)
checkpoint = find_source(source, user_path("base_dir", base_dir), note)
tokenizer = Tokenizer.load(checkpoint.path / "tokenizer.json")
model = load_for_inference(checkpoint, machine.device, compute_dtype)
room = model.config.max_seq_len
wanted = room if max_tokens == -1 else max_tokens
answers = "loss_on" in checkpoint.state["identity"]  # trained on conversations
if answers:
    chat_format.check(tokenizer, model.config.vocab_size)
sys.stdin.reconfigure(errors="replace")  # bytes that are not text
note(
    f"{checkpoint.path}: {sum(p.numel() for p in model.parameters()):,} parameters on {machine.device.type} "
    f"in {precision.name_of(compute_dtype)} ({dtype_reason})"
)


def beginning(text: str) -> list[int]:
    """The ids that the model continues. A text that is too long keeps its end and leaves at least half of the
    row free."""
    ids = tokenizer.encode(text).tolist()
    keep = max(room - 1 - wanted, room // 2 - 1)  # <|bos|> takes a position too
    if len(ids) > keep:
        note(f"(the prompt has {len(ids)} tokens; the model sees the last {keep}, its row has {room})")
    return [tokenizer.bos_id, *ids[max(0, len(ids) - keep) :]]


def print_text(stream: Stream, draw_seed: int, stop_ids: set[int]):
    """Print what the model adds to the text of a stream, piece by piece."""
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop_ids": stop_ids}
    columns = stream.write(wanted, seeds=[draw_seed], **options)
    for piece in text_pieces((column[0] for column in columns), tokenizer):
        print(printable(piece), end="", flush=True)
    print(flush=True)
    if not stream.room(0):
        note(f"(the model's {room} positions are full)")


def write(text: str, draw_seed: int):
    """Print the text and what the model adds."""
    stream = Stream(model)
    stream.read([beginning(text)])
    print(printable(text), end="", flush=True)
    print_text(stream, draw_seed, {tokenizer.bos_id})


class Conversation:
    """Turns with the model. The KV cache stays between them, so only new tokens are computed."""

    def __init__(self):
        self.stream, self.begun = Stream(model), False

    def answer(self, question: str, draw_seed: int):
        """Print the model's answer. A conversation that no longer fits starts again, with this question."""
        ids = chat_format.next_turn_ids(tokenizer, question, self.begun)
        if self.begun and len(ids) >= self.stream.room(0):
            note(f"(the model's {room} positions are full; a new conversation begins)")
            self.__init__()
            ids = chat_format.next_turn_ids(tokenizer, question, self.begun)
        if len(ids) >= room:
            note(f"(the question has {len(ids)} tokens, the model has {room} positions; ask a shorter one)")
            return
        self.stream.read([ids])
        self.begun = True
        end = tokenizer.special_tokens["<|assistant_end|>"]
        print_text(self.stream, draw_seed, {end, tokenizer.bos_id})


def lines():
    """The lines of the input, up to an empty line or the end."""
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

act = Conversation().answer if answers else write
for number, text in enumerate(lines() if prompt is None else [prompt]):
    act(text, seed + number)
    if streams.nobody_reads():  # the reader of the output, such as `head`, has ended
        break
