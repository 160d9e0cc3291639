"""A run's folder: one lock, checkpoints that are complete or absent, restore that verifies, retention.

A checkpoint is a folder `step_NNNNNN` (after N updates). It is written as `.tmp-...`, synced, and renamed:
the name is what makes it exist. Inside:

    model.safetensors                      the model alone, usable by itself
    optimizer-RRRRR-of-WWWWW.safetensors   what process R of W saved, each tensor under its parameter's name
    state.json, tokenizer.json, ...        the rest, as JSON
    manifest.json                          size and SHA-256 of each of these, and of itself; written last

Nothing here is a pickle: loading a checkpoint from a stranger reads data and runs no code.
"""

from nanochat.checkpoint.files import Damaged
from nanochat.checkpoint.folder import changes, check_shared, checkpoints_in, lock_folder, prune, set_aside
from nanochat.checkpoint.resume import enter, how_it_goes_on, load_weights, set_future_aside
from nanochat.checkpoint.save_and_load import (
    AsyncSaver,
    Checkpoint,
    SaveError,
    find,
    find_weights,
    is_checkpoint,
    open_checkpoint,
    save,
)

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "Damaged",
    "SaveError",
    "changes",
    "check_shared",
    "checkpoints_in",
    "enter",
    "find",
    "find_weights",
    "how_it_goes_on",
    "is_checkpoint",
    "load_weights",
    "lock_folder",
    "open_checkpoint",
    "prune",
    "save",
    "set_aside",
    "set_future_aside",
]
