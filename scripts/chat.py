"""Let a checkpoint write: a base model continues texts, a model of mid_train answers in turns.

    python -m scripts.chat --prompt="def main("          # with the newest checkpoint, mid before base
    python -m scripts.chat --source=laptop               # a run's tag, its folder or a checkpoint's folder
    echo "import" | python -m scripts.chat --top_p=0.9   # each line of the input is a prompt

Without --prompt, type a line and press Enter; /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends
the program. A base model continues each line as a text of its own. To a model of mid_train each line is your
next turn, and it remembers the earlier ones until its row is full. The text goes to stdout, everything else
to stderr.
"""

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Literal

import configurator
from nanochat import streams
from nanochat.data import chat_format
from nanochat.engine import Stream, find_source, load_for_inference, load_tokenizer, text_pieces
from nanochat.files import replacing, user_path
from nanochat.machine import precision, runtime
from nanochat.terminal import Typist, first_line, printable

# Model
source: str | None = None  # a run's tag, its folder or a checkpoint's (none = the newest, mid before base)
base_dir = "~/.cache/nanochat"  # where runs live (environment: NANOCHAT_BASE_DIR)

# Text
prompt: str | None = None  # text to continue or question, may be empty (none = each line that you type)
temperature = -1.0  # randomness (0 = always the likeliest token; -1 = 0.8, 0 if it answers) [-1, 0..100]
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
base_path = user_path("base_dir", base_dir)
checkpoint = find_source(source, base_path, note)
model = load_for_inference(checkpoint, machine.device, compute_dtype)
tokenizer = load_tokenizer(checkpoint, model.config)
room = model.config.max_seq_len
wanted = room if max_tokens == -1 else max_tokens
answers = "loss_on" in checkpoint.state["identity"]  # trained on conversations
if answers:
    chat_format.check(tokenizer)
if temperature == -1:
    temperature = 0.0 if answers else 0.8  # of a small model the likeliest answer is right most often
sys.stdin.reconfigure(errors="replace")  # bytes that are not text
note(
    f"{checkpoint.path}: {sum(p.numel() for p in model.parameters()):,} parameters on {machine.device.type} "
    f"in {precision.name_of(compute_dtype)} ({dtype_reason})"
)


def beginning(text: str) -> list[int]:
    """The ids that the model continues. A text that is too long keeps its end: it leaves room for max_tokens,
    or for half a row if they need more."""
    ids = tokenizer.encode(text).tolist()
    keep = max(room - 1 - wanted, room // 2 - 1)  # <|bos|> takes a position too
    if len(ids) > keep:
        note(f"(the prompt has {len(ids)} tokens; the model sees the last {keep}, its row has {room})")
    return [tokenizer.bos_id, *ids[max(0, len(ids) - keep) :]]


def print_text(stream: Stream, draw_seed: int, stop_ids: set[int]) -> str:
    """Print what the model adds to the text of a stream, piece by piece, up to a Ctrl-C; returns it."""
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop_ids": stop_ids}
    columns = stream.write(wanted, seeds=[draw_seed], **options)
    pieces = []
    for piece in text_pieces((column[0] for column in columns), tokenizer):
        pieces.append(piece)
        print(printable(piece), end="", flush=True)
        if person and person.stopped:
            break
    print(flush=True)
    if not stream.room(0):
        note(f"(the model's {room} positions are full)")
    return "".join(pieces)


class Texts:
    """What a base model writes: it continues each text by itself."""

    about = "a base model: it continues each text that you type; a model of mid_train answers"

    def __init__(self):
        self.reset()

    def reset(self):
        """Forget what was written."""
        self.records = []  # what /save writes, an object a line

    def answer(self, text: str, draw_seed: int):
        """Print the text and what the model adds."""
        stream = Stream(model)
        stream.read([beginning(text)])
        print(printable(text), end="", flush=True)
        self.records.append({"text": text + print_text(stream, draw_seed, {tokenizer.bos_id})})


class Conversation:
    """Turns with the model. The KV cache stays between them, so only new tokens are computed."""

    about = "ask it something"

    def __init__(self):
        self.system = ""
        self.reset()

    def reset(self):
        """Begin a new conversation, with the same system message."""
        self.stream, self.turns = Stream(model), []

    def answer(self, question: str, draw_seed: int):
        """Print the model's answer. A conversation that no longer fits starts again, with this question."""
        turn = tokenizer, question, self.system
        ids = chat_format.next_turn_ids(*turn, begun=bool(self.turns))
        if self.turns and len(ids) >= self.stream.room(0):
            note(f"(the model's {room} positions are full; a new conversation begins)")
            self.reset()
            ids = chat_format.next_turn_ids(*turn, begun=False)
        if len(ids) >= room:
            note(f"(the question has {len(ids)} tokens, the model has {room} positions; ask a shorter one)")
            return
        self.stream.read([ids])
        stop_ids = {tokenizer.special_tokens["<|assistant_end|>"], tokenizer.bos_id}
        self.turns.append((question, print_text(self.stream, draw_seed, stop_ids)))

    @property
    def records(self) -> list[dict]:
        """What /save writes, as mid_train reads it: a turn without an answer is left out."""
        said = [("system", self.system)] if self.system else []
        for question, answer in self.turns:
            said += [("user", question), ("assistant", answer)] if answer.strip() else []
        messages = [{"role": role, "content": content} for role, content in said]
        return [{"messages": messages}] if len(messages) > 1 else []


# ------------------------------------------------------------------------------------------------------
# Commands

COMMANDS = """\
/help            this list
/reset           begin a new conversation
/temperature N   randomness of what follows (0 = always the likeliest token)
/system TEXT     begin a new conversation with this system message (without TEXT: with none)
/save FILE       write the conversation into a new .jsonl file, for --data of mid_train or base_train
/quit            end the program, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in a backslash goes on in the next one. A line that begins with a
blank is no command."""


def obey(command: str, value: str) -> str:
    """Carry out a command; returns what to tell."""
    global temperature
    if command == "/reset":
        partner.reset()
        return "a new conversation begins" if answers else "to a base model each text is a new one"
    if command == "/temperature":
        with contextlib.suppress(ValueError):
            if 0 <= float(value) <= 100:
                temperature = float(value)
        return f"the temperature is {temperature:g}; numbers from 0 to 100 change it"
    if command == "/system" and not answers:
        return "a base model knows no system message; python -m scripts.mid_train trains one that does"
    if command == "/system":
        partner.system = value
        partner.reset()
        return f"a new conversation begins, {'with this' if value else 'without a'} system message"
    if command == "/save":
        return save(value)
    return COMMANDS if command == "/help" else f"there is no command {command}\n{COMMANDS}"


def save(name: str) -> str:
    """Write what was said into a new file; returns what to tell."""
    if not partner.records:
        return "there is no answer to save yet"
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in partner.records)
    try:
        path = Path(name).expanduser()
        if path.exists():
            return f"nothing is saved ({path} exists already); name a new file"
        with replacing(path) as file:  # a disk that is full gets no half of it
            file.write(text.encode())
    except (OSError, ValueError, RuntimeError) as error:
        return f"nothing is saved ({first_line(error)}); name a new file"
    return f"saved in {name}"


def without_commands(typed):
    """The texts for the model. Commands are carried out."""
    for text in typed:
        command, _, value = text.partition(" ")
        if command == "/quit":
            return
        if text.startswith("/"):
            note(obey(command, value.strip()))
        else:
            yield text


# ------------------------------------------------------------------------------------------------------
# Write

partner, person = Conversation() if answers else Texts(), None
if prompt is not None:
    texts = [prompt]
elif sys.stdin.isatty() and sys.stdout.isatty():
    note(f"{partner.about}; /help lists the commands, Ctrl-D ends the program")
    person = Typist(base_path / "chat_history")
    texts = without_commands(person.texts())
else:
    texts = (line.rstrip("\n") for line in sys.stdin if line.strip())
for number, text in enumerate(texts):
    partner.answer(text, seed + number)
    if streams.nobody_reads():  # the reader of the output, such as `head`, has ended
        break
