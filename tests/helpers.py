"""What several test modules share: tiny runs of the training script, small checkpoints, a small disk."""

import ast
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import configurator
from nanochat import checkpoint
from nanochat.checkpoint import save_and_load
from nanochat.machine import precision
from nanochat.machine.compiling import missing_to_compile
from nanochat.machine.watchdog import is_gone
from nanochat.plan import planning, wording

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(missing_to_compile(CPU) != "", reason="torch cannot compile here")
has_bfloat16 = precision.resolve_dtype("auto", CPU)[0] == torch.bfloat16
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16, reason="this CPU emulates it: that takes minutes")
TINY = [
    "--depth=2", "--aspect_ratio=16", "--head_dim=16", "--max_seq_len=32", "--vocab_size=300",
    "--device_batch_size=2", "--total_batch_size=256", "--num_iterations=8", "--dtype=float32",
    "--eval_every=-1", "--save_every=3", "--sample_every=-1", "--core_metric_every=-1", "--compile=off",
    "--window_pattern=L", "--spelling=auto", "--bigrams=-1", "--keep_checkpoints=2",
]  # fmt: skip
DEFAULTS = configurator.defaults(ROOT / "scripts" / "base_train.py")
TINY = [word for word in TINY if word[2:].split("=")[0] in DEFAULTS]  # also without samples, or without CORE


def command(corpus: Path, out: Path, *more: str) -> list[str]:
    data = [f"--data={corpus}", f"--val_data={corpus / 'val.parquet'}", f"--out_dir={out}"]
    return ["scripts.base_train", *TINY, *data, f"--base_dir={corpus.parent / 'base'}", *more]


# Imports of torch and other libraries, and matplotlib's first pictures, would take most of a tiny run.
# The starter makes them once, and each run is a fork of the starter: a process of its own, which runs the
# script as `python -m` does and ends as any Python program. Its parent, another fork, waits for it and writes
# its exit status to a file.
STARTER = """
import gc, io, json, os, runpy, signal, sys
import numpy.random, pyarrow.compute, pyarrow.parquet, safetensors.torch, tiktoken, torch
from matplotlib.figure import Figure

for kind in ("png", "svg"):
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    figure.savefig(io.BytesIO(), format=kind)

# At its end a run would copy the memory of all that was imported, and it would go through it once more
gc.collect()
gc.freeze()
gc.unfreeze = lambda: None
orders = open(os.dup(0))  # sys.stdin stays unread, for the script
while line := orders.readline():
    if not os.fork():
        break
    os.waitpid(-1, os.WNOHANG)  # one that has ended
else:
    sys.exit()
orders.close()
arguments, folder, environment, encoding, ended, streams = json.loads(line)
if child := os.fork():
    print(child, flush=True)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(ended, "w") as file:
        print(status, file=file)
    os._exit(0)
for number, path in enumerate(streams):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
sys.stdout.reconfigure(encoding=encoding, line_buffering=True)
sys.stderr.reconfigure(encoding=encoding)
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
sys.path[:1] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
sys.argv = arguments
signal.alarm(900)  # seconds; a run that hangs is killed
if arguments[0].endswith(".py"):
    runpy.run_path(arguments[0], run_name="__main__")
else:
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
"""


@functools.cache
def starter() -> subprocess.Popen:
    """It ends when this process does, with its input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", STARTER], **pipes)


class Process:
    """`python -m MODULE ...` or `python FILE.py ...` in a folder, which goes on; its methods are those of
    subprocess.Popen. encoding: of what it prints (Linux). environment: variables besides this process's."""

    def __init__(self, arguments: list[str], folder: Path = ROOT, encoding="utf-8", **environment):
        self.arguments, self.encoding, self.returncode = arguments, encoding, None
        self.files = tempfile.TemporaryDirectory()
        self.streams = [Path(self.files.name, name) for name in ("out", "err")]
        self.ended = Path(self.files.name, "ended")
        for path in self.streams:
            path.touch()  # it can be read before the process has begun
        environment = {**os.environ, "COLUMNS": "1000", **environment}  # no line is broken for a terminal
        environment.pop("PYTEST_CURRENT_TEST", None)
        if sys.platform == "linux":
            streams = [os.devnull, *map(str, self.streams)]
            order = [arguments, str(folder), environment, encoding, str(self.ended), streams]
            print(json.dumps(order), file=starter().stdin, flush=True)
            self.pid = int(starter().stdout.readline())
        else:  # a fork of a program with threads is not safe
            out, err = (path.open("wb") for path in self.streams)
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            command = [sys.executable, *["-m"][arguments[0].endswith(".py") :], *arguments]
            environment["PYTHONPATH"] = str(folder)
            self.plain = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
            self.pid = self.plain.pid

    def poll(self) -> int | None:
        if self.returncode is None and sys.platform != "linux":
            self.returncode = self.plain.poll()
        elif self.returncode is None and self.ended.exists():
            status = self.ended.read_text()
            self.returncode = int(status) if status.endswith("\n") else None
        return self.returncode

    def wait(self, timeout: float = 900) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.arguments, timeout)
            time.sleep(0.005)
        return self.returncode

    def communicate(self, timeout: float = 900) -> tuple[str, str]:
        """(stdout, stderr) when it has ended."""
        self.wait(timeout)
        return self.stdout, self.stderr

    stdout = property(lambda self: self.streams[0].read_text(self.encoding))  # so far
    stderr = property(lambda self: self.streams[1].read_text(self.encoding))

    def send_signal(self, number: int):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def python_m(arguments: list[str], folder: Path = ROOT, encoding="utf-8") -> subprocess.CompletedProcess:
    """Run `python -m ARGUMENTS` in a folder to its end. encoding: of what it prints (Linux)."""
    process = Process(arguments, folder, encoding)
    status = process.wait()
    return subprocess.CompletedProcess(arguments, status, process.stdout, process.stderr)


@contextmanager
def python(code: str, *arguments, **how):
    """A child that runs `code` with this project on its path; its output is read through pipes. It ends with
    the block, and after five minutes: if a signal gets lost, a test fails and does not hang."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, cwd=ROOT, **{"text": True, **pipes, **how}) as child:
        watchdog = threading.Timer(300, child.kill)
        watchdog.start()
        try:
            yield child
        finally:
            watchdog.cancel()
            child.kill()


def together(arguments: list[str], ranks=(0, 1), folder: Path = ROOT, world_size=0) -> list[Process]:
    """Processes of one run, each with the variables that torchrun or srun gives it."""
    world_size = str(world_size or len(ranks))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        all_ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    all_ |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return [Process(arguments, folder, RANK=str(rank), LOCAL_RANK=str(rank), **all_) for rank in ranks]


def run(arguments: list[str], status: int = 0, processes: int = 1, folder: Path = ROOT) -> str:
    """Run the script to its end and return what it printed."""
    alone = processes == 1
    started = [Process(arguments, folder)] if alone else together(arguments, range(processes), folder)
    printed = "\n".join("".join(process.communicate()) for process in started)
    assert [process.returncode for process in started] == [status] * processes, printed
    assert status == 0 or "Traceback" not in printed
    return printed


def run_stages(program: str, folder: Path, *stages: tuple) -> list[str]:
    """Run a program, Python text with a function `main(argument)`: of each stage (number of processes,
    argument) so many processes, one stage after the other. Returns what each stage printed."""
    path = folder / "program.py"
    path.write_text(f"{program}\nimport json, sys\nmain(json.loads(sys.argv[1]))\n")
    return [run([str(path), json.dumps(argument)], processes=processes) for processes, argument in stages]


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def whole_lines(out: Path) -> int:
    """Whole lines of metrics.jsonl; a run that is writing, or was killed while it wrote, leaves half one."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def losses(out: Path) -> dict[int, float]:
    steps = [r for r in records(out) if "loss" in r]
    assert len({r["step"] for r in steps}) == len(steps), "a step stands twice"
    return {r["step"]: r["loss"] for r in steps}


def assert_same_run(out: Path, other: Path):
    """Two runs have the same losses, validations and last weights."""
    assert losses(out) == losses(other)
    scores = [[(r["step"], r["val_bpb"]) for r in records(o) if "val_bpb" in r] for o in (out, other)]
    assert scores[0] == scores[1]
    weights = [checkpoint.find(o).load_model() for o in (out, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def wait_until(is_true, process=None, every_s=0.01):
    """Return when is_true() is, which may take ten minutes, and while the process goes on."""
    deadline = time.monotonic() + 600
    while not is_true():
        assert time.monotonic() < deadline, "it has not come to that"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(every_s)


def wait_for_step(process, out: Path, step: int):
    """Return when metrics.jsonl holds that step."""
    path = out / "metrics.jsonl"
    wait_until(lambda: path.exists() and f'"step": {step}, "loss"' in path.read_text(), process)


def assert_ended(*pids: int):
    wait_until(lambda: all(map(is_gone, pids)))


# ------------------------------------------------------------------------------------------------------
# Checkpoints


def numbers(seed: int, n: int = 300) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def save_step(out_dir: Path, step: int, **more) -> Path:
    """Save a small checkpoint; every part of it tells its step."""
    what = dict(
        model={"wte": numbers(step), "head.weight": numbers(-step)},
        optimizer={"wte.momentum": numbers(step + 1000)},
        state={"step": step},
        files={"tokenizer.json": b'{"pattern": "."}'},
    )
    return checkpoint.save(out_dir, step, **{**what, **more})


def read_manifest(folder: Path) -> dict:
    """The manifest of a checkpoint without its checksum."""
    body = json.loads((folder / "manifest.json").read_bytes())
    del body["checksum"]
    return body


def write_manifest(folder: Path, body: dict):
    """Write a manifest whose checksum fits."""
    (folder / "manifest.json").write_bytes(save_and_load._manifest(body))


def craft(folder: Path, files: dict[str, bytes]):
    """Replace files of a checkpoint, and give it a manifest with checksums that fit, as a stranger would."""
    body = read_manifest(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)
        body["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(folder, body)


def check(found: checkpoint.Checkpoint, step: int):
    """The checkpoint is the one that `save_step` made of that step."""
    assert found.step == found.state["step"] == step
    assert torch.equal(found.load_model()["wte"], numbers(step))
    assert torch.equal(found.load_optimizer()["wte.momentum"], numbers(step + 1000))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def disk(path: Path, size: str):
    """A real file system of that size, mounted at a new folder; skips the test without the right to mount."""
    path.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root on Linux")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]).returncode:
        pytest.skip("no right to mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def copy_sources(folder: Path) -> Path:
    """Copy what a training needs to a new folder, to edit it there; returns the folder."""
    for name in ("nanochat", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "configurator.py", folder)
    return folder


def conversation(question: str, answer: str) -> str:
    """A line of a file of conversations."""
    turns = {"user": question, "assistant": answer}
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns.items()]}) + "\n"


def insert(tree: Path, after_settings="", at_step_end="", script="base_train"):
    """Insert code into a training script of a copy of the sources: after its settings, where it can replace
    what the script imports, and in the loop, where `step` is the number of the step that ends."""
    path = tree / "scripts" / f"{script}.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    body = ast.parse("\n".join(lines)).body
    (call,) = (n for n in body if "configurator.configure(" in ast.unparse(n))
    *_, loop = (n for n in body if isinstance(n, ast.While))
    (next_step,) = (n for n in loop.body if re.match(r"step \+?= ", ast.unparse(n)))
    lines.insert(next_step.lineno - 1, textwrap.indent(at_step_end, " " * next_step.col_offset))
    lines.insert(call.end_lineno, after_settings)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def multiply_loss(tree: Path, factor: str, script="base_train"):
    """Have a training script take the gradient of its loss times a factor, an expression that may name
    `step`. The log shows the loss without it."""
    code = f"""
def scale(self, loss, plain=torch.amp.GradScaler.scale, inf=float("inf")):
    return plain(self, loss * ({factor}) if loss.requires_grad else loss)

torch.amp.GradScaler.scale = scale
"""
    insert(tree, after_settings=code, script=script)


def run_tree(tree: Path, arguments: list[str], status: int = 0) -> str:
    printed = run(arguments, status, folder=tree)
    assert status == 0 or printed.count("error:") == 1, printed
    return printed


# ------------------------------------------------------------------------------------------------------
# Plans

# What figures in tests of plans are worked out for, whatever the script's defaults are
USUAL = DEFAULTS | {
    "aspect_ratio": -1, "head_dim": 128, "max_seq_len": 2048, "window_pattern": "L", "vocab_size": -1,
    "spelling": "auto", "bigrams": -1, "copying": "auto", "target_param_data_ratio": 12.0,
    "unembedding_lr": 0.004, "table_decay": -1.0, "warmup_steps": 40, "dtype": "auto", "compile": "auto",
    "price_per_hour": -1.0,
}  # fmt: skip
LAPTOP = USUAL | {"depth": 4, "aspect_ratio": 48, "head_dim": 64, "max_seq_len": 512}


def make_plan(
    data_tokens=10**9,
    memory=2**40,
    world_size=1,
    peak_flops=1e15,
    resolved=None,
    device_type="cpu",
    **settings,
):
    tokenizer = types.SimpleNamespace(vocab_size=4096, name="t", fingerprint="f" * 64)
    dataset = types.SimpleNamespace(
        estimated_tokens=lambda tokenizer: data_tokens, text_bytes=3 * data_tokens, **DATASET
    )
    hardware = planning.Hardware(
        device_type, world_size, torch.float32, "asked for", memory, peak_flops, "told"
    )
    plan = planning.derive(LAPTOP | settings, tokenizer, dataset, hardware, resolved or {})
    sections = wording.sections(plan, dataset, tokenizer, "runs/d4")
    return plan, wording.text(sections, plan.warnings(""))


DATASET = {"more_text": "", "name": "corpus", "note": "3 documents", "fingerprint": "e" * 64}
