"""The chat script: what it writes, how it ends, and what it says about bad settings."""

import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from exporting import TOKENIZER, make_model, save
from helpers import disk, names_in, python

from nanochat import engine
from nanochat.engine import generate
from nanochat.terminal import printable

ROW = 48  # positions of the model


@pytest.fixture(scope="module")
def model():
    model = make_model(2, 32, 2, ROW, stir=0.1, bigrams=2)
    model.head.weight[TOKENIZER.bos_id] = 0  # rarely drawn, so that texts are long
    return model


@pytest.fixture(scope="module")
def base(model, tmp_path_factory) -> Path:
    """A base folder with a run `tiny`."""
    folder = tmp_path_factory.mktemp("base")
    save(folder / "base_checkpoints" / "tiny", model)
    return folder


def continuation(model, text, many, seed=42, **options):
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode(text).tolist()]
    options = {"temperature": 0.8, "top_k": 50, "stop_ids": {TOKENIZER.bos_id}} | options
    return printable(TOKENIZER.decode(list(generate(model, ids, many, seed=seed, **options))))


@pytest.fixture
def chat(base, run_script, monkeypatch):
    """Runs the script with what is typed; returns what it wrote to stdout and stderr."""

    def chat(*arguments, typed=""):
        stdin = None if typed is None else io.TextIOWrapper(io.BytesIO(typed.encode()))  # None: closed
        monkeypatch.setattr(sys, "stdin", stdin)
        return run_script("chat", f"--base_dir={base}", "--dtype=float32", "--device_type=cpu", *arguments)

    return chat


def test_a_prompt_is_continued_as_the_model_continues_it(chat, model):
    written, notes = chat("--prompt=café 東", "--max_tokens=20")
    assert written == "café 東" + continuation(model, "café 東", 20) + "\n"
    assert chat("--prompt=café 東", "--max_tokens=20", typed=None).out == written, "a prompt needs no stdin"
    assert "tiny/step_000007" in notes and "float32 (as asked for)" in notes
    arguments = ["--prompt=a", "--max_tokens=20", "--temperature=1.5", "--top_k=9", "--top_p=0.7", "--seed=3"]
    options = {"temperature": 1.5, "top_k": 9, "top_p": 0.7, "seed": 3}
    assert chat("--source=tiny", *arguments).out == "a" + continuation(model, "a", 20, **options) + "\n"


def test_each_line_of_the_input_is_a_prompt_unless_it_is_empty(chat, model):
    written, _ = chat("--max_tokens=5", typed="a\n\nbé\n")
    expected = [line + continuation(model, line, 5, 42 + n) + "\n" for n, line in enumerate(["a", "bé"])]
    assert written == "".join(expected)
    assert chat("--max_tokens=5", typed="a\nbé").out == written, "the end of the input ends it too"
    assert chat("--max_tokens=5").out == ""


def test_a_full_row_ends_the_text_with_a_note(chat, model):
    written, notes = chat("--prompt=aa", "--max_tokens=-1", "--temperature=0")
    assert written == "aa" + continuation(model, "aa", 1000, temperature=0) + "\n"
    assert "(the model's 48 positions are full)" in notes
    assert "positions are full" not in chat("--prompt=aa", "--max_tokens=3").err


def test_a_prompt_that_is_too_long_keeps_its_end_and_a_note_says_so(chat, model):
    text = "ab" * 60
    written, notes = chat(f"--prompt={text}", "--max_tokens=10")
    assert written == text + continuation(model, text[-37:], 10) + "\n"  # 48 - 10 - <|bos|>
    assert f"has {len(TOKENIZER.encode(text))} tokens; the model sees the last 37, its row has 48)" in notes
    written, notes = chat(f"--prompt={text}", "--max_tokens=1000")
    assert written == text + continuation(model, text[-23:], 24) + "\n", "half of the row is left to write in"


@pytest.fixture
def answering(base, model) -> Path:
    """The same model, filed as one that mid_train has made."""
    yield save(base / "mid_checkpoints" / "talks", model, step=3, loss_on="assistant")
    shutil.rmtree(base / "mid_checkpoints")


def turn(model, ids: list[int], question: str, many: int, seed: int):
    """(all ids after a turn, its answer), by one pass over the whole conversation so far."""
    special = TOKENIZER.special_tokens
    user = [special["<|user_start|>"], *TOKENIZER.encode(question).tolist(), special["<|user_end|>"]]
    ids = [*ids, *user, special["<|assistant_start|>"]]
    ends = {special["<|assistant_end|>"], TOKENIZER.bos_id}
    written = list(generate(model, ids, many, seed=seed, temperature=0, stop_ids=ends))
    return [*ids, *written, special["<|assistant_end|>"]], printable(TOKENIZER.decode(written))


def test_a_model_of_conversations_answers_in_turns_and_remembers_them(chat, model, answering):
    written, notes = chat("--max_tokens=4", typed="a\nbé\n")
    ids, first = turn(model, [TOKENIZER.bos_id], "a", 4, 42)
    _, second = turn(model, ids, "bé", 4, 43)
    assert written == f"{first}\n{second}\n" and "talks/step_000003" in notes


def test_a_full_conversation_says_so_and_begins_again(chat, model, answering):
    written, notes = chat("--max_tokens=-1", typed="aaa\nb\n")
    ids, first = turn(model, [TOKENIZER.bos_id], "aaa", 1000, 42)
    full = len(ids) + 3 + len(TOKENIZER.encode("b")) >= ROW  # no room for the next turn and an answer
    _, second = turn(model, [TOKENIZER.bos_id] if full else ids, "b", 1000, 43)
    assert written == f"{first}\n{second}\n"
    assert ("a new conversation begins" in notes) == full
    question = "ab" * 40
    _, notes = chat(f"--prompt={question}")
    assert "ask a shorter one" in notes
    _, notes = chat("--max_tokens=30", typed="aaaa\n" * 3)
    assert "a new conversation begins" in notes


def test_what_a_terminal_would_obey_is_written_as_an_escape(chat, monkeypatch):
    obeyed = "\x1b]0;title\x07\x9b"
    monkeypatch.setattr(engine, "text_pieces", lambda tokens, tokenizer: (obeyed for _ in tokens))
    written, _ = chat("--prompt=a\x1b[2J", "--max_tokens=2", "--seed=1")
    assert written.count("title") == 2 and r"\x1b[2J" in written
    assert all(character.isprintable() or character == "\n" for character in written)


def test_a_terminal_that_cannot_show_a_character_gets_its_escape(chat, monkeypatch):
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    chat("--prompt=東x", "--max_tokens=30")
    written = terminal.getvalue()
    assert written.startswith(rb"\u6771x") and max(written) < 128


# ------------------------------------------------------------------------------------------------------
# As people start it


CHAT = "import runpy; runpy.run_module('scripts.chat', run_name='__main__')"


@pytest.mark.skipif(os.name == "nt", reason="Windows sends its Ctrl-C to a whole console")
def test_ctrl_c_ends_it_without_a_traceback(base):
    with python(CHAT, f"--base_dir={base}", text=False) as process:
        assert b"tiny/step_000007" in process.stderr.readline()
        process.stdin.write(b"a \xff\n")  # a byte that is not text does not end it
        process.stdin.flush()
        assert process.stdout.read(2)
        process.send_signal(signal.SIGINT)
        _, notes = process.communicate()
    assert process.returncode == 130 and b"Traceback" not in notes


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe is another error there")
def test_a_closed_output_pipe_is_no_error(base):
    with python(CHAT, f"--base_dir={base}", "--max_tokens=40") as process:
        process.stdout.close()
        print("a", file=process.stdin, flush=True)  # one line; the input stays open, and ends nothing
        notes = process.stderr.read()
        assert process.wait() == 0 and "Traceback" not in notes and "BrokenPipe" not in notes


# ------------------------------------------------------------------------------------------------------
# At a terminal

AT_A_TERMINAL = """
import fcntl, itertools, runpy, termios, time
from nanochat import engine
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # its Ctrl-C comes to this process
text_pieces, answers = engine.text_pieces, itertools.count()

def endless(tokens):
    yield from (time.sleep(0.01) or f"{next(tokens) and 'endless'} " for _ in itertools.count())

def pieces(tokens, tokenizer):
    number = next(answers)
    if number == 0:
        return endless(itertools.cycle(tokens))
    return text_pieces(tokens, tokenizer) if number > 1 else ()

engine.text_pieces = pieces
runpy.run_module("scripts.chat", run_name="__main__")
"""


PROMPT = r"(\n|\x1b\[\?2004h)> "  # readline may ask the terminal to mark what is pasted


class Terminal:
    """A terminal with the script in it, whose first answer never ends by itself, and the second is empty."""

    def __init__(self, process, fd: int):
        self.process, self.fd = process, fd

    def read_until(self, wanted: str) -> str:
        """What is shown, up to a pattern. A signal that comes between the prompt and readline's wait for a
        key is seen at the next signal; that of a window's new size, each second, changes nothing else."""
        shown, idle = b"", 0
        while not re.search(wanted.encode(), shown):
            if select.select([self.fd], [], [], 1)[0]:
                shown, idle = shown + os.read(self.fd, 1), 0
            else:
                idle += 1
                assert idle < 180, shown
                self.process.send_signal(signal.SIGWINCH)
        return shown.decode()

    def ends_after_ctrl_c(self) -> int:
        """Its exit status."""
        os.write(self.fd, b"\x03")
        for _ in range(180):
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(timeout=1)
            self.process.send_signal(signal.SIGWINCH)  # as in read_until
        raise AssertionError("it does not end")

    def type(self, keys: str, until: str = PROMPT) -> str:
        """Type, and return what is shown until the next prompt."""
        os.write(self.fd, keys.encode())
        return self.read_until(until)


@contextmanager
def terminal(base, *arguments):
    pty = pytest.importorskip("pty")
    pytest.importorskip("readline")
    ours, theirs = pty.openpty()
    how = dict.fromkeys(("stdin", "stdout", "stderr"), theirs) | {"start_new_session": True}
    how["env"] = os.environ | {"TERM": "dumb", "INPUTRC": os.devnull}
    with open(ours), python(AT_A_TERMINAL, f"--base_dir={base}", *arguments, **how) as process:
        os.close(theirs)
        yield Terminal(process, ours)


def test_a_person_edits_lines_gives_commands_and_stops_an_answer_with_ctrl_c(base, answering, tmp_path):
    with terminal(base, "--max_tokens=2") as chat:
        assert "/help" in chat.read_until(PROMPT)
        chat.type("a\r", until="endless endless")
        chat.type("\x03")  # Ctrl-C stops the answer, not the program
        chat.type("\r")  # nor does an empty line end it
        assert "the temperature is 0.5;" in chat.type("/temperature 0.5\r")
        assert "the temperature is 0.5;" in chat.type("/temperature hot\r")
        answer = chat.type("/hepl\r")
        assert "no command /hepl" in answer and "/save FILE" in answer
        chat.type("/system B\r")
        chat.type("no answer\r")
        chat.type(f"/save {tmp_path / 'chat.jsonl'}\r")  # of no answer yet: no file
        chat.type("x\x1b[D\x1b[Dc\r")  # the arrows go to the left
        chat.type("\x1b[A\r")  # and up, into the history
        chat.type("d\\\r", until=r"\. ")
        chat.type("e\r")
        assert "saved" in chat.type(f"/save {tmp_path / 'chat.jsonl'}\r")
        assert "nothing is saved" in chat.type(f"/save {tmp_path / 'chat.jsonl'}\r")
        assert "ends the program" in chat.type("half a line\x03")
        chat.type("b\r")
        assert "ends the program" in chat.type("\x03"), "it was not the second one in a row"
        assert chat.ends_after_ctrl_c() == 0
    messages = json.loads((tmp_path / "chat.jsonl").read_text("utf-8"))["messages"]
    said = [(m["role"], m["content"]) for m in messages if m["role"] != "assistant"]
    assert said == [("system", "B"), *(("user", text) for text in ("cx", "cx", "d\ne"))]
    history = base / "chat_history"
    assert "cx\n" in history.read_text("utf-8") and not history.stat().st_mode & 0o077


def test_a_full_disk_gets_no_half_of_a_conversation(base, tmp_path):
    with disk(tmp_path / "disk", "4k") as full, terminal(base, "--max_tokens=2") as chat:
        (full / "other").write_bytes(bytes(4096))
        chat.read_until(PROMPT)
        chat.type("a\r", until="endless")
        chat.type("\x03")
        assert "No space left" in chat.type(f"/save {full / 'chat.jsonl'}\r")
        assert names_in(full) == ["other"]


def test_a_base_model_at_a_terminal_says_that_it_continues_texts(base, tmp_path):
    shutil.copytree(base / "base_checkpoints", tmp_path / "base_checkpoints")
    (tmp_path / "chat_history").mkdir()  # where the history cannot be kept there is none
    with terminal(tmp_path, "--max_tokens=2") as chat:
        assert "continues each text" in chat.read_until(PROMPT)
        assert "no system message" in chat.type("/system B\r")
        os.write(chat.fd, b"\x04")
        shown = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(chat.fd, 1000):
                shown += part
        assert chat.process.wait(timeout=120) == 0 and b"Traceback" not in shown
