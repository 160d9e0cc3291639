"""A run's folder: it is locked while a run writes in it, and each checkpoint in it is complete or absent.

A checkpoint is a folder `step_NNNNNN`, after N updates. It is written under the name `.tmp-...`, synced to
disk, and then renamed. A checkpoint exists once its folder has its name. Inside:

    model.safetensors                      the model; usable without the other files
    optimizer-RRRRR-of-WWWWW.safetensors   the part of process R of W, each tensor under its parameter's name
    state.json, tokenizer.json, ...        everything else, as JSON
    manifest.json                          size and SHA-256 of each file and of itself; written last

There is no pickle in it, so loading a stranger's checkpoint reads data and runs no code.
"""

# ruff: noqa: F401  (what the other rooms use)
from nanochat.checkpoint.background import AsyncSaver
from nanochat.checkpoint.files import Damaged
from nanochat.checkpoint.folder import (
    checkpoints_in,
    lock_folder,
    make_room,
    newest_in_words,
    prune,
    set_aside,
)
from nanochat.checkpoint.resume import (
    changes,
    differences,
    enter,
    find_weights,
    load_weights,
    resume_message,
    set_future_aside,
    start_from,
)
from nanochat.checkpoint.save_and_load import (
    Checkpoint,
    SaveError,
    find,
    open_checkpoint,
    open_in,
    save,
)
