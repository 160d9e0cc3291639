"""Trains karpathy/nanochat on our text with our tokenizer, for the benches that set ours beside it.

    text = peer_run.text_of("embedded", 4096, base_dir)     # made once: the peer's form of text and tokenizer
    settings = {"depth": 4, "max_seq_len": 512, "device_batch_size": 4, "total_batch_size": 2048}
    run = peer_run.train(checkout, text, place, settings | {"num_iterations": 30}, "bfloat16")
    run.tok_per_sec, run.peak_memory_bytes, run.first_step_s, run.seconds

checkout: a folder with its source, commit 92d63d4 or one near it. Nothing of it is changed or imported here:
its own `python -m scripts.base_train` runs in a process of its own, on a CPU if the settings do not say more.
Not on Windows, which has no os.wait4.
"""

import ast
import contextlib
import importlib.util
import os
import pickle
import re
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from experiments.sides import peer_folder
from nanochat import UserError
from nanochat.data.dataset import Dataset, writing
from nanochat.data.parquet import Documents, write_sorted
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import Tokenizer
from nanochat.files import building, user_path
from nanochat.machine.compiling import EAGER_STEPS

FORMAT = 1  # of the folder that `prepare` makes; part of its name
VALIDATION = "shard_06542.parquet"  # the peer validates on the shard that is last by name
SHORT = 1000  # characters that a short document has at least
STEP = re.compile(r"step \d+/\d+ .*?loss: (\S+) .*? tok/sec: ([\d,]+)")  # the peer's line about a step
FULL_SPEED = EAGER_STEPS + 2  # the step of ours that is as fast as all later ones: the one before compiles
# What it imports, and a run that logs to the terminal does not use
UNUSED = ("rustbpe", "wandb")
# Nothing but training; a checkpoint at the end
QUIET = {"eval_every": -1, "core_metric_every": -1, "sample_every": -1, "save_every": -1}
OUR_QUIET = QUIET | {"save_minutes": -1, "eval_tokens": 1, "sample_prompts": ""}


def our_command(settings: dict, *files: str) -> list[str]:
    """Our base_train with settings files and settings. It only trains, unless they say more."""
    arguments = [f"--{name}={value}" for name, value in (OUR_QUIET | settings).items()]
    return [sys.executable, "-m", "scripts.base_train", *files, *arguments]


# ------------------------------------------------------------------------------------------------------
# The same text and tokens


def prepare(dataset: Dataset, tokenizer: Tokenizer, base_dir: str | Path, cut: bool = True) -> Path:
    """The folder with our text and tokenizer in the peer's form; made at the first use, for both to read.

    cut: documents of Python code are cut into `pieces`. The peer trains on the first row of a document only,
    so with whole files it would see little of the text. Our base_train reads the same documents with
    `our_settings`. Raises UserError if the folder cannot be written.
    """
    name = f"peer-{FORMAT}-{'short' if cut else 'whole'}-{tokenizer.fingerprint[:12]}"
    target = dataset.tokenizer_folder(Path(base_dir)) / name
    if target.exists():
        return target
    with writing(target), building(target) as temporary:
        _write_text(dataset, temporary / "base_data_climbmix", cut)
        _write_tokenizer(tokenizer, temporary / "tokenizer")
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
    return target


def text_of(
    data: str, vocab_size: int, base_dir: Path, val_data: str | None = None, cut: bool = True
) -> Path:
    """`prepare` for a data set by its name or path, with the tokenizer that base_train would take. A folder
    that `prepare` has made, here or on another machine, is taken as it is. Raises UserError if it is given
    with val_data."""
    if (folder := user_path("data", data).resolve()).joinpath("tokenizer", "tokenizer.pkl").exists():
        if val_data:
            raise UserError(f"--data={data} has a validation text of its own; leave --val_data out")
        return folder
    dataset = open_dataset(data, val_data, base_dir=base_dir)
    return prepare(dataset, dataset.open_tokenizer("auto", vocab_size, base_dir), base_dir, cut)


def our_settings(text: Path) -> dict:
    """Settings of our base_train for the text and the tokenizer of `prepare`."""
    data, tokenizer = text / "base_data_climbmix", text / "tokenizer" / "tokenizer.json"
    size = Tokenizer.load(tokenizer).vocab_size
    return {"data": data, "val_data": data / VALIDATION, "tokenizer": tokenizer, "vocab_size": size}


def _write_text(dataset: Dataset, folder: Path, cut: bool):
    """Parquet shards in the order of the documents' hashes, which is as good as random."""
    folder.mkdir()
    splits = {"train": dataset.train_shards, "val": dataset.val_shards}
    texts = ((split, text) for split, shards in splits.items() for text in Documents(shards))
    documents = ((split, piece) for split, text in texts for piece in (pieces(text) if cut else [text]))
    written = write_sorted(documents, folder)
    for number, name in enumerate(sorted(written["train"])):
        os.rename(folder / name, folder / f"shard_{number:05d}.parquet")
    (val,) = written["val"]
    os.rename(folder / val, folder / VALIDATION)


def _write_tokenizer(tokenizer: Tokenizer, folder: Path):
    """The peer's two files: a pickle of its tiktoken.Encoding, and the bytes of each token; and our JSON."""
    folder.mkdir()
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(tokenizer._encoding))
    torch.save(torch.from_numpy(tokenizer.token_bytes()).int(), folder / "token_bytes.pt")
    tokenizer.save(folder / "tokenizer.json")


def pieces(text: str, at_least: int = SHORT) -> Iterator[str]:
    """A Python text cut at top-level definitions and methods, each piece of `at_least` characters or more.

    The last piece may be shorter. A text that is no Python stays whole. The pieces together are the text.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of code that is read and not run
            starts = set(_definitions(ast.parse(text).body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        starts = set()
    piece = ""
    for number, line in enumerate(re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text), start=1):
        if number in starts and len(piece) >= at_least:
            yield piece
            piece = ""
        piece += line
    if piece:
        yield piece


def _definitions(body: list[ast.stmt]) -> Iterator[int]:
    """The lines at which functions, classes and their methods begin, decorators included."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body)


# ------------------------------------------------------------------------------------------------------
# A run


@dataclass
class Finished:
    """What a command printed, and what it took."""

    status: int  # of the exit; negative: the signal that ended it
    seconds: float  # from the command to its end
    peak_memory_bytes: int  # largest resident memory of the process
    lines: list[tuple[float, str]]  # seconds since the command, a line of stdout or stderr
    began: float  # time.time() of the command

    def tail(self) -> str:
        return "\n".join(line for _, line in self.lines).strip()[-1500:]


@dataclass
class Run(Finished):
    """A run of the peer. Lists have one value for each step."""

    step_loss: list[float] = field(default_factory=list)  # as it prints it, smoothed
    step_tok_per_sec: list[float] = field(default_factory=list)
    step_done_s: list[float] = field(default_factory=list)  # from the command

    @property
    def first_step_s(self) -> float:
        """From the command to the first step done."""
        return self.step_done_s[0]

    @property
    def tok_per_sec(self) -> float:
        """Median of the steps after the first third."""
        return statistics.median(self.step_tok_per_sec[len(self.step_tok_per_sec) // 3 :])


def train(checkout: Path, text: Path, place: Path, settings: dict, dtype: str) -> Run:
    """Run the peer's base_train; `settings` are its options, with _ for -. They may have a device_type.

    It neither evaluates nor samples unless `settings` say so. place: an empty or missing folder; checkpoints
    go to place / "base_checkpoints" / "run". dtype: what it computes in. Raises UserError, with the end of
    what it printed, if it fails.
    """
    Path(place).mkdir(parents=True, exist_ok=True)
    place = Path(place).resolve()
    for name in ("base_data_climbmix", "tokenizer"):
        (place / name).symlink_to((text / name).resolve())
    options = QUIET | {"window_pattern": "L", "device_type": "cpu"} | settings | {"model_tag": "run"}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    environment = os.environ | {"NANOCHAT_BASE_DIR": str(place), "NANOCHAT_DTYPE": dtype}
    environment |= {"PYTHONPATH": str(_stand_ins(place)), "PYTHONUNBUFFERED": "1"}
    done = watch([sys.executable, "-m", "scripts.base_train", *arguments], peer_folder(checkout), environment)
    run = Run(**vars(done))
    steps = [(second, found) for second, line in run.lines if (found := STEP.match(line))]
    if run.status or not steps:
        raise UserError(f"the peer's base_train in {checkout} failed: {run.tail()}")
    run.step_done_s = [second for second, _ in steps]
    run.step_loss = [float(found[1]) for _, found in steps]
    run.step_tok_per_sec = [float(found[2].replace(",", "")) for _, found in steps]
    return run


def _stand_ins(place: Path) -> Path:
    """A folder with an empty module for each unused package that is not installed here."""
    folder, content = place / "stand_ins", "# This package is not installed, and the run does not use it.\n"
    folder.mkdir()
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            (folder / f"{name}.py").write_text(content)
    return folder


# A small process between us and the command. The largest memory that the system counts for a process begins
# with that of the process which started it, and ours holds torch. When we are gone, our end of its stdin is
# closed, and it kills itself, the command and what that has started
STARTER = """
import os, signal, sys, threading

parent = os.dup(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
pid = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])

def end_with_parent():
    os.read(parent, 1)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
_, status, usage = os.wait4(pid, 0)
print()  # the command's last line may have no end
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""


def watch(
    command: list, folder: Path | None = None, environment: dict | None = None, failed: str = ""
) -> Finished:
    """Run a command to its end, in `folder`. If we are interrupted, it and what it started are killed.

    failed: words for a command that fails, "base_train failed" say. They begin the UserError that is raised
    then, and the end of what it printed follows. Without them nothing is raised.
    """
    at = time.time()
    with contextlib.closing(lines_of(command, folder, environment)) as running:
        *lines, (seconds, last) = running
    status, peak = map(int, last.split())
    peak *= 1 if sys.platform == "darwin" else 1024  # KiB, on macOS bytes
    done = Finished(status, seconds, peak, lines, at)
    if failed and status:
        raise UserError(f"{failed}: {done.tail()}")
    return done


def until_steps(command: list, steps: tuple[int, ...]) -> list[float]:
    """Seconds until our base_train, run by the command, prints each of these steps, in their order; then it
    is killed.

    Raises UserError, with the end of what it printed, if it ends before.
    """
    said, found = [], []
    with contextlib.closing(lines_of(command)) as running:
        for seconds, line in running:
            # "step 12/500", or "step 12 (5%)" where minutes decide
            if line.startswith((f"step {steps[len(found)]}/", f"step {steps[len(found)]} (")):
                found.append(seconds)
                if len(found) == len(steps):
                    return found
            said.append(line)
    end = "\n".join(said[:-1]).strip()[-1500:]
    raise UserError(f"base_train ended before its step {steps[len(found)]}: {end}")


def lines_of(
    command: list, folder: Path | None = None, environment: dict | None = None
) -> Iterator[tuple[float, str]]:
    """Run a command: for each line of its stdout and stderr the seconds since the command, and the line. The
    last line is STARTER's. Closing the generator kills the command and what it started."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", STARTER, *command], cwd=folder, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        for line in process.stdout:
            yield time.perf_counter() - began, line.rstrip("\n")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()
