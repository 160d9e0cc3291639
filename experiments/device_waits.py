"""Where Python waits for the device in the steps of scripts/base_train.py.

    python -m experiments.device_waits --depth=4 --num_iterations=12  # and any other setting of the script

It runs the script and prints each place at which a step waits, then one JSON object: `steps` (how many steps
were watched) and `waits` (place -> how often, over these steps). A step is watched if the one before was, and
if no save or evaluation comes between them; the first two compile and make buffers, and do not count.

On CUDA torch itself tells of each wait (torch.cuda.set_sync_debug_mode); there must be none, because the loop
waits for one event. Elsewhere the calls are counted that would wait on a GPU: there must be one, which reads
what the log needs.
"""

import collections
import json
import runpy
import sys
import threading
import traceback
import warnings
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat.run import output as run_output

FIRST = 2  # steps of a process that are not watched
READS = ("tolist", "cpu", "numpy")  # methods of a tensor that copy it to the host, besides item()
# File and function of reads that are not made on a GPU
CPU_ONLY = {("gradients.py", "_limit"), ("optim.py", "known_bad")}
OURS = tuple(str(Path(__file__).parent.parent / name) for name in ("nanochat", "scripts"))


class Waits:
    """Counts waits from the end of one step's Python code to the end of the next one's."""

    def __init__(self):
        self.thread, self.ends, self.steps = threading.get_ident(), 0, 0
        self.here, self.counts = collections.Counter(), collections.Counter()
        self.disturbed = True  # a save or an evaluation came between

    def add(self, what: str):
        if threading.get_ident() == self.thread:
            frames = traceback.extract_stack()
            ours = [frame for frame in frames if frame.filename.startswith(OURS)]
            if ours and (Path(ours[-1].filename).name, ours[-1].name) in CPU_ONLY:
                return
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}" if ours else "?"
            self.here[f"{what} at {place}"] += 1

    def step_ends(self):
        self.ends += 1
        if self.ends > FIRST and not self.disturbed:
            self.steps += 1
            self.counts += self.here
        self.here.clear()
        self.disturbed = False


class Reads(TorchDispatchMode):
    """Sees item() and what calls it inside torch."""

    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits.add("item")
        return func(*args, **(kwargs or {}))


def watch(waits: Waits):
    """Tell `waits` of steps, of what comes between them, and of all reads."""

    def before(owner, name, tell):
        original = getattr(owner, name)

        def told(*arguments, **options):
            tell()
            return original(*arguments, **options)

        setattr(owner, name, told)

    before(run_output.RunOutput, "save_is_overdue", waits.step_ends)  # the loop asks this once a step
    for name in ("save", "report"):
        before(run_output.RunOutput, name, lambda: setattr(waits, "disturbed", True))
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.showwarning = lambda *warning: waits.add(str(warning[0]).partition("(")[0].strip())
        return
    for name in READS:
        before(torch.Tensor, name, lambda name=name: waits.add(name))
    Reads(waits).__enter__()


if __name__ == "__main__":
    waits = Waits()
    watch(waits)
    sys.argv[0] = "scripts.base_train"
    runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
    for place, times in waits.counts.most_common():
        print(f"{times / waits.steps:.2f} a step: {place}")
    print(json.dumps({"steps": waits.steps, "waits": waits.counts}))
