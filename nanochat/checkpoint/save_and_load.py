"""Checkpoints: written whole or not at all, on a background thread where asked, and verified when read."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_jobs
from dataclasses import dataclass
from pathlib import Path

import torch

from nanochat import UserError
from nanochat.checkpoint import files as io
from nanochat.checkpoint.files import Damaged
from nanochat.checkpoint.folder import STEP, checkpoints_in, remove_temporary, set_aside

VERSION = 1  # of the layout above; another one is refused by its number
MANIFEST, STATE, MODEL = "manifest.json", "state.json", "model.safetensors"


class SaveError(UserError):
    """A checkpoint could not be written (disk full, read-only, no permission). The others are untouched."""


# Saving


def save(
    out_dir, step, *, model, optimizer, state, files=None, before_publish=None,
    rank=0, world_size=1, token=None, timeout_s=600.0,
):  # fmt: skip
    """Write `out_dir/step_NNNNNN` and return its Path. Every process calls this with its own `optimizer`.

    model, optimizer: {parameter's name: tensor}, any device, stored bit for bit (only rank 0's model is).
    state: JSON-able dict; NaN or infinity in it is a ValueError. files: {name: path or bytes} to add.
    before_publish: called right before the rename, to sync what must be on disk before the checkpoint is.
    token: with several processes a string that they share and no other run has (rank 0 makes it up).

    No collectives: a process is done when its shard is written, and says so in a small file; rank 0 waits for
    these, up to `timeout_s`, and publishes. So rank 0 alone knows of success and raises SaveError, for all.
    A checkpoint of the same step is replaced, and stays good until the new one is in its place.
    """
    if world_size > 1 and not token:
        raise ValueError("save() by several processes needs a token that they share")
    final = Path(out_dir) / f"step_{step:06d}"
    temp = final.with_name(f".tmp-{final.name}-{token or os.getpid()}")
    shard = temp / f"optimizer-{rank:05d}-of-{world_size:05d}.safetensors"
    contents = {STATE: io.to_json(state), **(files or {})}  # first: a state that is no JSON costs nothing
    try:
        if rank == 0:  # what an earlier save left; the others may have begun to write this one
            remove_temporary(final.parent, keep=temp if world_size > 1 else None)
        temp.mkdir(parents=True, exist_ok=True)
        entries = {shard.name: io.write_tensors(shard, optimizer)}
        if rank > 0:
            _report(temp, rank, entries)
            return final
        entries[MODEL] = io.write_tensors(temp / MODEL, model)
        for name, content in contents.items():
            content = content if isinstance(content, bytes) else Path(content).read_bytes()
            entries[name] = io.write(temp / name, [content])
        entries |= _collect_reports(temp, world_size, timeout_s)
        body = {"version": VERSION, "step": step, "world_size": world_size, "files": entries}
        io.write(temp / MANIFEST, [_manifest(body)])
        io.sync_folder(temp)
        if before_publish:
            before_publish()
        _publish(temp, final)
        return final
    except OSError as e:
        if rank > 0:  # rank 0 says it, and clears the folder away
            io.attempt(os.unlink, shard)  # makes room for the report
            io.attempt(_report, temp, rank, {"error": io.reason(e)})
            return final
        io.attempt(shutil.rmtree, temp)
        raise SaveError(_sentence(e, final, [*model.values(), *optimizer.values()])) from e
    except BaseException:
        io.attempt(shutil.rmtree, temp)
        raise


def _publish(temp, final):
    """Give the finished folder its name. At every moment `final` or its `.old-` twin is a good checkpoint."""
    old = final.with_name(f".old-{final.name}")
    if final.exists():
        os.rename(final, old)
    os.rename(temp, final)
    io.sync_folder(final.parent)
    if old.exists():
        io.attempt(io.remove, old)


def _report(temp, rank, entries):
    """Tell rank 0 that this process is done: its manifest entries, or {"error": reason}."""
    io.write(temp / f".part-{rank:05d}", [io.to_json(entries)])
    os.rename(temp / f".part-{rank:05d}", temp / f".done-{rank:05d}")


def _collect_reports(temp, world_size, timeout_s):
    """Wait for the other processes' shards and return their manifest entries."""
    entries, deadline = {}, time.monotonic() + timeout_s
    for rank in range(1, world_size):
        report = temp / f".done-{rank:05d}"
        while not report.exists():
            if time.monotonic() > deadline:
                raise OSError(f"no shard from process {rank} in {timeout_s:.0f} s, is the folder not shared?")
            time.sleep(0.02)
        found = json.loads(report.read_bytes())
        if "error" in found:
            raise OSError(f"process {rank} failed: {found['error']}")
        entries |= found
        report.unlink()
    return entries


def _manifest(body):
    """The manifest's bytes; the checksum covers all the rest of it."""
    return io.to_json({**body, "checksum": hashlib.sha256(io.to_json(body)).hexdigest()})


def _sentence(e, final, tensors):
    room = f"the tensors take {sum(t.nbytes for t in tensors) / 1e6:,.1f} MB"
    with contextlib.suppress(OSError):
        room += f", {shutil.disk_usage(final.parent).free / 1e6:,.1f} MB are free"
    return (
        f"could not save {final} ({io.reason(e)}; {room}); "
        "make room there or choose another --out_dir; the checkpoints before it are untouched"
    )


class AsyncSaver:
    """Saves on a background thread: training stands still only while tensors are copied to host memory.

    The buffers are reused (page-locked where tensors come from a GPU). At most one save runs at a time.
    """

    def __init__(self, out_dir, rank=0, world_size=1, token=None):
        self._where = dict(out_dir=out_dir, rank=rank, world_size=world_size)
        self._token, self._count = token, 0
        self._buffers, self._job = {}, None
        self._thread = ThreadPoolExecutor(1, "checkpoint", _step_back)

    def reserve(self, model, optimizer):
        """Have the buffers made in the background, so that the first save stalls no longer than the next."""
        self.wait()
        model = model if self._where["rank"] == 0 else {}
        self._job = self._thread.submit(self._reserve, model=model, optimizer=optimizer)

    def submit(self, step, *, model, optimizer, state, files=None, before_publish=None, after_publish=None):
        """Wait for the save before, copy everything, and start `save`; see there for the arguments.

        before_publish and after_publish (to prune, say) are called on the background thread of rank 0. If the
        save before has failed, its SaveError is raised here, after this one has been started.
        """
        failure = None
        try:
            self.wait()
        except SaveError as e:
            failure = e
        self._count += 1
        token = self._token and f"{self._token}-{self._count}"  # never mistake an older report for a new one
        what = dict(step=step, files=files, before_publish=before_publish, token=token, **self._where)
        what["state"] = json.loads(io.to_json(state))
        what["model"] = self._copy("model", model) if self._where["rank"] == 0 else {}
        what["optimizer"] = self._copy("optimizer", optimizer)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._job = self._thread.submit(self._save, what, after_publish)
        if failure:
            raise failure

    def _save(self, what, after_publish):
        path = save(**what)
        if after_publish and what["rank"] == 0:
            after_publish()
        return path

    def _buffer(self, kind, name, tensor):
        buffer = self._buffers.get((kind, name))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[kind, name] = buffer
        return buffer

    def _copy(self, kind, tensors):
        return {
            name: self._buffer(kind, name, tensor).copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            for name, tensor in tensors.items()
        }

    def _reserve(self, **kinds):
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                self._buffer(kind, name, tensor).zero_()  # the first touch is what takes the time

    def done(self):
        """Whether wait() would return, or raise, at once."""
        return self._job is None or self._job.done()

    def wait(self):
        """Wait for the save in flight and return its Path (None: there is none), or raise its SaveError."""
        job, self._job = self._job, None
        return job.result() if job else None

    def finish(self, timeout_s):
        """Give the save in flight so long to end; says nothing of how it ended."""
        if self._job:
            wait_for_jobs([self._job], timeout_s)

    def close(self):
        """Finish the save in flight and end the thread; returns and raises what wait() does."""
        try:
            return self.wait()
        finally:
            self._thread.shutdown()


def _step_back():
    """Let the training's threads go first where they compete with the writer for a core (Linux only)."""
    if sys.platform == "linux":
        io.attempt(os.setpriority, os.PRIO_PROCESS, threading.get_native_id(), 10)


# Restoring


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. `step` updates were made before it; `state` is the dict that was saved."""

    path: Path
    step: int
    state: dict
    files: tuple  # names of all its files

    def load_model(self):
        """{parameter's name: tensor on the CPU}; half precisions come back as float32."""
        tensors = io.read_tensors(self.path / MODEL)
        return {n: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for n, t in tensors.items()}

    def load_optimizer(self, needs=lambda name: True):
        """{name: tensor on the CPU} from all shards, whoever wrote them; only those where needs(name) is."""
        tensors = {}
        for shard in sorted(f for f in self.files if f.startswith("optimizer-")):
            tensors |= io.read_tensors(self.path / shard, needs)
        return tensors


def find(out_dir, resume="auto", say=print):
    """The Checkpoint to go on from, verified, or None to start anew.

    resume: "auto", the newest good one (damaged ones are named to `say`); "never", none, and what is in the
    folder is set aside; a step's number; or the path of a checkpoint or of another run. UserError if that one
    does not exist or is damaged, or if all are.
    """
    resume = str(resume)
    if resume == "never":
        if aside := set_aside(out_dir):
            say(f"the old run in {out_dir} is now in {aside}")
        return None
    if resume == "auto":
        return _newest(out_dir, say)
    if number := re.fullmatch(r"(?:step_)?(\d+)", resume):
        steps = checkpoints_in(out_dir)
        if int(number[1]) not in steps:
            there = ", ".join(map(str, sorted(steps))) or "none"
            raise UserError(f"{out_dir} has no checkpoint of step {number[1]}; there are: {there}")
        return open_checkpoint(steps[int(number[1])])
    if (checkpoint := _in_folder(resume, say)) is None:
        raise UserError(f"no checkpoint in {resume}; resume is auto, never, a step or a checkpoint's folder")
    return checkpoint


def find_weights(path, identity, say=print):
    """The Checkpoint whose weights a new run of that `identity` starts from; `path` is its folder or a run's.

    UserError where there is none, or one of another model or tokenizer.
    """
    if (checkpoint := _in_folder(path, say)) is None:
        raise UserError(f"no checkpoint in {path}; init_from is the folder of a checkpoint or of a run")
    then = checkpoint.state["identity"]
    if then["model"] != identity["model"]:
        raise UserError(
            f"the model of {checkpoint.path} is {then['model']}, this one {identity['model']}; give the same "
            "settings of the model"
        )
    if then["tokenizer"] != identity["tokenizer"]:
        raise UserError(
            f"{checkpoint.path} has another tokenizer; give --tokenizer={checkpoint.path / 'tokenizer.json'}"
        )
    return checkpoint


def is_checkpoint(path):
    """Whether a folder is one checkpoint, good or not, and no run's folder."""
    path = Path(path)
    return (path / MANIFEST).exists() or (path.is_dir() and STEP.fullmatch(path.name) is not None)


def _in_folder(path, say):
    """The checkpoint that a path is, or else the newest good one in it; None where there is none."""
    path = Path(path).expanduser()
    if is_checkpoint(path):
        return open_checkpoint(path)
    return _newest(path, say)


def open_checkpoint(path, verify=True):
    """The Checkpoint in a folder. verify=False skips the checksums, where another process has checked.

    Raises Damaged, or UserError if its layout is of another version of this project.
    """
    path = Path(path)
    raw, body = io.read_json(path / MANIFEST)
    version, intact = body.get("version"), body.pop("checksum", None) and _manifest(body) == raw
    if version != VERSION and intact:
        raise UserError(f"checkpoint {path} has format version {version}; this nanochat reads {VERSION}")
    if not intact:
        raise io.damaged(path / MANIFEST, f"(format version {version}) does not match its own checksum")
    if (name := STEP.fullmatch(path.name)) and int(name[1]) != body["step"]:
        raise io.damaged(path / MANIFEST, f"is that of step {body['step']}")
    for name in body["files"]:
        if Path(name).name != name:
            raise io.damaged(path / MANIFEST, f"names a file outside of the folder, {name}")
    if verify:
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing releases Python's lock
            list(pool.map(lambda item: io.verify(path / item[0], **item[1]), body["files"].items()))
    return Checkpoint(path, body["step"], io.read_json(path / STATE)[1], tuple(body["files"]))


def _newest(out_dir, say):
    steps = checkpoints_in(out_dir)
    for step in sorted(steps, reverse=True):
        try:
            return open_checkpoint(steps[step])
        except Damaged as e:
            say(f"{e}; trying the one before it")
    if steps:
        raise UserError(f"no checkpoint in {out_dir} is intact; use --resume=never to set them aside")
    return None
