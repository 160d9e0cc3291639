"""Saving on a background thread, so that training does not wait for the disk."""

import functools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_jobs

import torch

from nanochat import UserError
from nanochat.checkpoint.files import attempt, to_json
from nanochat.checkpoint.folder import newest_in_words
from nanochat.checkpoint.save_and_load import SaveError, save
from nanochat.machine.transfers import for_new_thread


def check_finite(model, step, out_dir):
    """Raise UserError if weights are infinite or not a number: nobody can use such a checkpoint."""
    finite = [tensor.isfinite().all() for tensor in model.values()]
    finite = torch.stack(finite).tolist() if finite else []  # one wait for the device, not one a tensor
    if bad := [name for name, good in zip(model, finite, strict=True) if not good]:
        raise UserError(
            f"after {step} steps the weights are not finite in {', '.join(bad[:3])}, so this model is not "
            f"saved; {newest_in_words(out_dir)}; lower the learning rates, or use --dtype=float32"
        )


class AsyncSaver:
    """Calls `save` on a background thread. Training stops only while tensors are copied to host memory.

    The buffers for the copies are reused; for tensors of a GPU they are page-locked. One save runs at a time.
    """

    def __init__(self, out_dir, rank=0, world_size=1, run_id=None):
        self._where = dict(out_dir=out_dir, rank=rank, world_size=world_size)
        self._run_id, self._count = run_id, 0
        self._buffers, self._job = {}, None  # {(kind, name): tensor}; the save that runs
        self._thread = ThreadPoolExecutor(1, "checkpoint", _prepare_thread, (for_new_thread(),))

    def reserve(self, model, optimizer):
        """Make the buffers in the background, so that the first save takes no longer than the next ones."""
        self.wait()
        kinds = {"model": model if self._where["rank"] == 0 else {}, "optimizer": optimizer}
        self._job = self._thread.submit(self._reserve, kinds)

    def submit(self, step, *, model, optimizer, state, make_room=None, after_publish=None, **more):
        """Wait for the previous save, copy all tensors and the state, and start `save` with them.

        The other arguments are those of `save`. What follows runs on the background thread of rank 0:
        make_room() before the save, make_room(failed=True) if it fails, before_publish, and after_publish (to
        prune, for example). If the previous save failed, this one starts, and then the SaveError of the
        previous one is raised.
        """
        check_finite(model, step, self._where["out_dir"])
        failure = None
        try:
            self.wait()
        except SaveError as e:
            failure = e
        self._count += 1
        run_id = self._run_id and f"{self._run_id}-{self._count}"  # notes of an older attempt do not count
        what = dict(step=step, run_id=run_id, **more, **self._where)
        what["state"] = json.loads(to_json(state))  # a copy: the loop changes its own while this one is saved
        what["model"] = self._copy("model", model) if self._where["rank"] == 0 else {}
        what["optimizer"] = self._copy("optimizer", optimizer)
        if torch.cuda.is_initialized():
            copied = torch.cuda.Event(blocking=True)  # sleeps; torch.cuda.synchronize keeps a core busy
            copied.record()
            copied.synchronize()
        self._job = self._thread.submit(self._save, what, after_publish, make_room)
        if failure:
            raise failure

    def _save(self, what, after_publish, make_room):
        if make_room and what["rank"] == 0:
            attempt(make_room)
        try:
            path = save(**what)
        except SaveError:
            if make_room:
                attempt(functools.partial(make_room, failed=True))
            raise
        if after_publish and what["rank"] == 0:
            attempt(after_publish)
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

    def _reserve(self, kinds):
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():  # the first write to new memory takes most of the time
                self._buffer(kind, name, tensor).zero_()

    def done(self):
        """Whether wait() would return, or raise, at once."""
        return self._job is None or self._job.done()

    def wait(self):
        """Wait for the running save. Return its Path, or None if no save runs; raise its SaveError."""
        job, self._job = self._job, None
        return job.result() if job else None

    def finish(self, timeout_s):
        """Wait up to timeout_s seconds for the running save. Its error, if any, is not raised."""
        if self._job:
            wait_for_jobs([self._job], timeout_s)

    def close(self):
        """Finish the running save and end the thread; returns and raises what wait() does."""
        try:
            return self.wait()
        finally:
            self._thread.shutdown()


def _prepare_thread(use_device):
    """Let training go first where it and this thread want the same core (Linux only)."""
    use_device()
    if sys.platform == "linux":
        attempt(os.nice, 10)  # of this thread alone
