"""Writing a checkpoint, whole or not at all; finding, verifying and reading one."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from nanochat import UserError
from nanochat.checkpoint import schema
from nanochat.checkpoint.files import (
    Damaged,
    attempt,
    damaged,
    read_json,
    read_tensors,
    reason,
    remove_folder,
    sync_folder,
    to_json,
    verify_file,
    write_file,
    write_tensors,
)
from nanochat.checkpoint.folder import STEP, checkpoints_in, remove_temporary, set_aside
from nanochat.files import replacing, user_path

# A checkpoint of another version is refused, because this code would compute something else with its weights.
# 2: keys are shifted by one position. 3: blocks have an x_before_scale. 4: the last layer's value embeddings
# are rows of the head. 5: heads and the smeared stream have gates. 6: the MLP's ReLU is leaky, blocks have no
# residual_scale, and the config says whether value embeddings have tables. 7: the gates of the smeared stream
# depend on 16 channels of the token's embedding. 8: there is one of them for each position, and
# the first embedding has two scales
VERSION = 8
MANIFEST, STATE, MODEL = "manifest.json", "state.json", "model.safetensors"


class SaveError(UserError):
    """A checkpoint could not be written (disk full, read-only, no permission). Older ones are untouched."""


# Saving


def save(
    out_dir, step, *, model, optimizer, state, files=None, before_publish=None,
    rank=0, world_size=1, run_id=None, timeout_s=600.0,
):  # fmt: skip
    """Write `out_dir/step_NNNNNN` and return its Path. Every process calls this with its own `optimizer`.

    model, optimizer: {parameter's name: tensor}, on any device, stored bit for bit; the model is rank 0's.
    state: a dict for JSON; NaN or infinity in it is a ValueError. files: {name: bytes} to add.
    before_publish: rank 0 calls it just before the rename, to sync what must be on disk first.
    run_id: a text that the processes share and no other run has (`check_shared`); one process needs none.

    The processes do not communicate: each writes its part of the optimizer and leaves a note in a small file.
    Rank 0 waits up to `timeout_s` seconds for the notes and then publishes the checkpoint. So rank 0 alone
    knows whether the save succeeded, and it raises SaveError for all of them.
    A checkpoint of the same step is replaced. It stays good until the new one takes its place.
    """
    if world_size > 1 and not run_id:
        raise ValueError("save() by several processes needs a run_id that they share")
    final = Path(out_dir) / f"step_{step:06d}"
    temp = final.with_name(f".tmp-{final.name}-{run_id or os.getpid()}")
    part = temp / _part(rank, world_size)
    contents = {STATE: to_json(state), **(files or {})}  # a ValueError here leaves nothing behind
    try:
        if rank == 0:  # other processes may write into `temp` already
            remove_temporary(final.parent, "*step_*", keep=temp if world_size > 1 else None)
        temp.mkdir(parents=True, exist_ok=True)
        entries = {part.name: write_tensors(part, optimizer)}
        if rank > 0:
            _leave_note(temp, rank, entries)
            return final
        entries[MODEL] = write_tensors(temp / MODEL, model)
        for name, content in contents.items():
            entries[name] = write_file(temp / name, [content])
        entries |= _wait_for_parts(temp, world_size, timeout_s)
        body = {"version": VERSION, "step": step, "world_size": world_size, "files": entries}
        write_file(temp / MANIFEST, [_manifest(body)])
        sync_folder(temp)
        if before_publish:
            before_publish()
        _publish(temp, final)
        return final
    except OSError as e:
        if rank > 0:  # rank 0 raises the error and removes the folder
            attempt(os.unlink, part)  # makes room for the note
            attempt(_leave_note, temp, rank, {"error": reason(e)})
            return final
        attempt(shutil.rmtree, temp)
        raise SaveError(_sentence(e, final, [*model.values(), *optimizer.values()])) from e
    except BaseException:
        attempt(shutil.rmtree, temp)
        raise


def _publish(temp, final):
    """Give the finished folder its name. At every moment `final` or its `.old-` twin is a good checkpoint."""
    old = final.with_name(f".old-{final.name}")
    if final.exists():
        os.rename(final, old)
    os.rename(temp, final)
    sync_folder(final.parent)
    if old.exists():
        attempt(remove_folder, old)


def _leave_note(temp, rank, entries):
    """Tell rank 0 that this process has written its part: its manifest entries, or {"error": reason}."""
    with replacing(temp / f".done-{rank:05d}") as file:
        file.write(to_json(entries))


def _wait_for_parts(temp, world_size, timeout_s):
    """Wait until the other processes have written their parts; returns their manifest entries."""
    entries, deadline = {}, time.monotonic() + timeout_s
    for rank in range(1, world_size):
        note = temp / f".done-{rank:05d}"
        while not note.exists():
            if time.monotonic() > deadline:
                raise OSError(f"nothing from process {rank} in {timeout_s:.0f} s, is the folder not shared?")
            time.sleep(0.02)
        found = json.loads(note.read_bytes())
        if "error" in found:
            raise OSError(f"process {rank} failed: {found['error']}")
        entries |= found
        note.unlink()
    return entries


def _manifest(body):
    """The manifest's bytes. Its checksum covers everything else in it."""
    return to_json({**body, "checksum": hashlib.sha256(to_json(body)).hexdigest()})


def _sentence(e, final, tensors):
    room = f"the tensors take {sum(t.nbytes for t in tensors) / 1e6:,.1f} MB"
    with contextlib.suppress(OSError):
        room += f", {shutil.disk_usage(final.parent).free / 1e6:,.1f} MB are free"
    return (
        f"could not save {final} ({reason(e)}; {room}); make room there, lower --keep_checkpoints or choose "
        "another --out_dir; the checkpoints before it are untouched"
    )


# Restoring


def whole_model(model: dict) -> dict:
    """The values of a GPTConfig, also of one from before it had all its names."""
    added = {"spelled": False, "value_tables": 1, "bigrams": 0, "copying": False}
    return added | model if model else {}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. `step` updates were made before it; `state` is the dict that was saved."""

    path: Path
    step: int
    state: dict
    files: tuple  # names of all its files

    @property
    def run_folder(self):
        """The folder of its run, or its own if it was copied out of there. Absolute: `.` has no name."""
        path = Path(os.path.abspath(self.path))
        return path.parent if STEP.fullmatch(path.name) else path

    @property
    def model(self):
        """The values of its model's GPTConfig; {} for a model of another program."""
        return whole_model(self.state.get("identity", {}).get("model", {}))

    @property
    def resolved(self):
        """What the run resolved at its first start: settings that were auto, number of steps, batch."""
        numbers = {"num_iterations": max(1, self.state["num_iterations"])}
        numbers["total_batch_size"] = self.state["identity"].get("total_batch_size")
        return numbers | self.state["resolved"]

    @property
    def config(self):
        """The content of its run's config.json, {} without one. Raises Damaged."""
        path = self.path / "config.json"
        if path.name not in self.files:
            return {}
        _, config = read_json(path)
        schema.check(path, config, schema.CONFIG)
        return config

    @property
    def fingerprint(self):
        """SHA-256 of the model's file, hexadecimal."""
        return _read_manifest(self.path)["files"][MODEL]["sha256"]

    def load_model(self):
        """{parameter's name: tensor on the CPU}; 16-bit floats come back as float32. Raises Damaged."""
        tensors = read_tensors(self.path / MODEL)
        return {n: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for n, t in tensors.items()}

    def load_optimizer(self, needs=lambda name: True):
        """{name: tensor on the CPU} from the parts of all processes, where needs(name) is true. Raises
        Damaged."""
        tensors = {}
        for part in sorted(name for name in self.files if name.startswith("optimizer-")):
            tensors |= read_tensors(self.path / part, needs)
        return tensors


def find(out_dir, resume="auto", say=print, to_continue=False):
    """The verified Checkpoint to continue from, or None to start from step 0.

    resume: "auto" (the newest good one; `say` gets the names of damaged ones), "never" (none, and the old run
    in the folder is set aside), the number of a step, or the path of a checkpoint or of another run.
    to_continue: a checkpoint whose state lacks something that a run needs counts as damaged. Raises UserError
    if the named one does not exist or is damaged, or if all are damaged.
    """
    resume = str(resume)
    if resume == "never":
        if aside := set_aside(out_dir):
            say(f"the old run in {out_dir} is now in {aside}")
        return None
    if resume == "auto":
        return _newest(out_dir, say, to_continue)
    if number := re.fullmatch(r"(?:step_)?(\d+)", resume):
        steps = checkpoints_in(out_dir)
        if int(number[1]) not in steps:
            there = ", ".join(map(str, sorted(steps))) or "none"
            raise UserError(f"{out_dir} has no checkpoint of step {number[1]}; there are: {there}")
        return open_checkpoint(steps[int(number[1])], to_continue=to_continue)
    if (checkpoint := open_in(resume, say, "resume", to_continue)) is None:
        raise UserError(f"no checkpoint in {resume}; resume is auto, never, a step or a checkpoint's folder")
    return checkpoint


def is_checkpoint(path):
    """Whether a folder is a checkpoint, good or damaged, rather than the folder of a run."""
    path = Path(path)
    return (path / MANIFEST).exists() or (path.is_dir() and STEP.fullmatch(path.name) is not None)


def open_in(path, say, setting, to_continue=False):
    """The checkpoint at a path, else the newest good one in that folder, else None. setting: where the path
    comes from."""
    path = user_path(setting, path)
    if is_checkpoint(path):
        return open_checkpoint(path, to_continue=to_continue)
    return _newest(path, say, to_continue)


def open_checkpoint(path, verify=True, to_continue=False):
    """The Checkpoint in a folder. verify=False skips the checksums, which another process has checked.

    to_continue: the state must have all that a run needs to resume. Raises Damaged, or UserError for another
    version of the format.
    """
    path = Path(path)
    body = _read_manifest(path)
    if verify:
        paths, entries = [path / name for name in body["files"]], body["files"].values()
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing releases Python's lock
            list(pool.map(verify_file, paths, entries))
    _, state = read_json(path / STATE)
    schema.check(path / STATE, state, schema.STATE_TO_CONTINUE if to_continue else schema.STATE)
    for name in body["files"]:
        if name.endswith(".safetensors"):
            read_tensors(path / name, wanted=lambda name: False)  # checks their headers
    return Checkpoint(path, body["step"], state, tuple(body["files"]))


def _read_manifest(path):
    """The content of a checkpoint's manifest, after checks of its checksum and its form."""
    raw, body = read_json(path / MANIFEST)
    version = body.get("version")
    try:
        intact = body.pop("checksum", None) and _manifest(body) == raw
    except (ValueError, RecursionError):  # of a stranger: 1e999 is infinity, which nobody can write
        intact = False
    if version != VERSION and intact:
        raise UserError(
            f"checkpoint {path} has format version {version!r:.40}; this nanochat reads {VERSION}. Use the "
            "nanochat that wrote it, or train again"
        )
    if not intact:
        raise damaged(path / MANIFEST, f"(format version {version!r:.40}) does not match its own checksum")
    schema.check(path / MANIFEST, body, schema.MANIFEST)
    if (name := STEP.fullmatch(path.name)) and int(name[1]) != body["step"]:
        raise damaged(path / MANIFEST, f"is that of step {body['step']}")
    if outside := [name for name in body["files"] if not re.fullmatch(r"[\w -][\w .-]*", name)]:
        raise damaged(path / MANIFEST, f"names a file outside of the folder, {outside[0]!r:.200}")
    parts = sum(name.startswith("optimizer-") for name in body["files"])
    if parts != body["world_size"] or not {STATE, MODEL} <= body["files"].keys():
        raise damaged(path / MANIFEST, "does not name all files of a checkpoint")
    return body


def _part(rank, world_size):
    return f"optimizer-{rank:05d}-of-{world_size:05d}.safetensors"


def _newest(out_dir, say, to_continue):
    steps = checkpoints_in(out_dir)
    for step in sorted(steps, reverse=True):
        try:
            return open_checkpoint(steps[step], to_continue=to_continue)
        except Damaged as e:
            say(f"{e}; trying the one before it")
    if steps:
        raise UserError(
            f"no checkpoint in {out_dir} is intact; name another run, or start again with --resume=never"
        )
    return None
