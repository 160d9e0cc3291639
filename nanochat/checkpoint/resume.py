"""How a run begins: it locks its folder, and all processes agree on the checkpoint that it continues."""

import os
from pathlib import Path

from nanochat import UserError
from nanochat.checkpoint.folder import check_shared, lock_folder, set_aside
from nanochat.checkpoint.save_and_load import find, open_checkpoint


def enter(run_path, resume, machine):
    """Lock a run's folder until this process ends. Every process calls this.

    Returns the Checkpoint to continue (None: the run is new) and the run id, see `check_shared`. Raises
    UserError if another run holds the folder, and what `find` raises.
    """
    found = None
    try:
        os.fsencode(Path(run_path).absolute()).decode()
    except UnicodeDecodeError:  # safetensors could write a checkpoint there, and not read it
        raise UserError(f"the name of {run_path} is not UTF-8; give another --out_dir") from None
    if machine.is_main:
        lock_folder(run_path, machine.print)
        found = find(run_path, resume, machine.print, to_continue=True)
    path = machine.all_gather(str(found.path) if found else None)[0]  # all processes take the same one
    run_id = check_shared(run_path, machine)
    if path and not machine.is_main:
        found = open_checkpoint(path, verify=False)
    return found, run_id


def load_weights(checkpoint, model):
    """Put a checkpoint's weights into a model. Raises UserError if names, shapes or dtypes differ."""
    tensors, own = checkpoint.load_model(), model.state_dict()
    like = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    wrong = [name for name in own if like.get(name) != (own[name].shape, own[name].dtype)]
    wrong += [name for name in tensors if name not in own]
    if wrong:
        raise UserError(
            f"{checkpoint.path} does not fit the model, which has changed since: {', '.join(wrong[:5])}; "
            "undo the change, or start a new run with --resume=never or another --model_tag"
        )
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(
            f"the weights of {checkpoint.path} are not finite in {', '.join(bad[:3])}; go on from an "
            "earlier one with --resume=STEP, or start again with --resume=never"
        )
    model.load_state_dict(tensors)


def set_future_aside(run_path, continued, say=print):
    """Move what does not belong to this run's past out of its folder, before the run writes there.

    These are the checkpoints after the one that the run continues: their metrics will be cut, so `find` must
    not take them later. If that checkpoint is in another folder (--resume=FOLDER), everything moves.
    """
    elsewhere = continued and continued.path.resolve().parent != Path(run_path).resolve()
    step = continued.step if continued else 0
    if aside := set_aside(run_path, after=None if elsewhere else step):
        say(f"{run_path} had checkpoints or files of another run; they are now in {aside}")


def resume_message(continued, num_iterations, changed, finished):
    """The lines to print when a run continues a checkpoint. changed: what `changes` returned."""
    if finished:
        more = "for more give --num_iterations, to start again --resume=never"
        return f"finished already: {continued.path}; {more}"
    said, before = [f"going on from {continued.path}"], continued.state["num_iterations"]
    if num_iterations > before:
        said.append(
            f"the horizon grew from {before} to {num_iterations} steps: the learning rate rises again"
        )
    if changed:
        said.append(f"accepted: {', '.join(changed)} changed, so the text is read from its start")
    return "\n".join(said)
