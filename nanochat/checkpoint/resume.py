"""How a run begins: it locks its folder, all processes agree on the checkpoint that it continues, and its
settings are compared with those of the run that wrote it."""

import os
from pathlib import Path

import torch

from nanochat import UserError
from nanochat.checkpoint import schema
from nanochat.checkpoint.files import read_json
from nanochat.checkpoint.folder import check_shared, checkpoints_in, lock_folder, set_aside
from nanochat.checkpoint.save_and_load import Checkpoint, find, open_checkpoint, open_in, whole_model
from nanochat.files import user_path

EXPORTED_TOKENIZER = "nanochat_tokenizer.json"  # in a folder of scripts/export.py

OF_ONE_COMMAND = {"resume", "accept", "plan", "device", "world_size"}  # of one command, not of the run


def enter(run_path, resume, machine, weights_from=None):
    """Lock a run's folder until this process ends. Every process calls this.

    weights_from: the run or checkpoint whose weights a new run starts from, if any. Returns the Checkpoint to
    continue (None: the run is new) and the run id, see `check_shared`. Raises UserError if another run holds
    the folder, if --resume=never would set weights_from aside, and what `find` raises.
    """
    found = None
    if weights_from and resume == "never":
        run = Path(run_path).resolve()
        if user_path("init_from", weights_from).resolve() in (run, *checkpoints_in(run).values()):
            raise UserError(
                f"the run would start from {weights_from}, which --resume=never sets aside; give the new run "
                "another --model_tag or --out_dir"
            )
    try:
        os.fsencode(Path(run_path).absolute()).decode()
    except UnicodeDecodeError:  # safetensors could write a checkpoint there, and not read it
        raise UserError(f"the name of {run_path} is not UTF-8; give another --out_dir") from None
    if machine.is_main:
        if lock_folder(run_path, machine.print).restarted and resume == "never":
            resume = "auto"  # torchrun repeats the command: --resume=never has done its work
        found = find(run_path, resume, machine.print, to_continue=True)
    path = machine.all_gather(str(found.path) if found else None)[0]  # all processes take the same one
    run_id = check_shared(run_path, machine)
    if path and not machine.is_main:
        found = open_checkpoint(path, verify=False)
    return found, run_id


def changes(found, identity, accept=""):
    """Names of the values in `identity` ({name: value} of this run) that differ in the checkpoint `found`;
    none if that is None.

    accept: names that may differ, with commas between them; it may also hold epochs and memory, which
    planning.py looks for. The model may never differ. Raises UserError for unknown names, and for every other
    difference, with both values.
    """
    accepted = {name.strip() for name in accept.split(",")} - {""}
    possible = identity.keys() - {"model"}
    if unknown := sorted(accepted - possible - {"epochs", "memory"}):
        takes = ", ".join([*sorted(possible), "epochs", "memory"])
        raise UserError(f"accept cannot name {', '.join(unknown)}; it takes {takes}")
    identity = identity | {"model": whole_model(identity.get("model", {}))}
    then = found.state["identity"] | {"model": found.model} if found else identity
    changed = [name for name in identity if then.get(name) != identity[name]]
    if refused := [name for name in changed if name not in accepted]:
        listed = "; ".join(_difference(name, then.get(name), identity[name]) for name in refused)
        other = "" if "model" in refused else f", or accept the change with --accept={','.join(refused)}"
        raise UserError(
            f"{found.path} is from another run: {listed}. Use the settings of that run, or start a new one "
            f"with --resume=never or another --model_tag{other}"
        )
    return changed


def _difference(name: str, was, now) -> str:
    """The difference of two values of an identity, for a message."""
    if isinstance(was, dict) and isinstance(now, dict):
        names = [key for key in now | was if was.get(key) != now.get(key)]
        return "; ".join(_difference(f"{name}'s {key}", was.get(key), now.get(key)) for key in names)
    return f"{name} was {was}, is {now}"


def find_weights(path, say=print):
    """The Checkpoint whose weights a new run starts from.

    path: the folder of a checkpoint, of a run or of scripts/export.py. Raises UserError if it holds none.
    """
    if checkpoint := _open_export(path) or open_in(path, say, "init_from"):
        return checkpoint
    raise UserError(f"no checkpoint in {path}; init_from is a folder of a checkpoint, run or export")


def start_from(checkpoint, identity, model):
    """Put a checkpoint's weights into the model of a new run with this `identity`. Raises UserError if they
    are of another model or tokenizer, and what `load_weights` raises."""
    what, give = "another tokenizer", []
    if checkpoint.model != (wanted := whole_model(identity["model"])):
        what = f"another model: {_difference('model', checkpoint.model, wanted)}"
        give.append(_settings_of_model(checkpoint.model))
    if checkpoint.state.get("identity", {}).get("tokenizer") != identity["tokenizer"]:
        exported = (checkpoint.path / EXPORTED_TOKENIZER).exists()
        file = EXPORTED_TOKENIZER if exported else "tokenizer.json"
        give.append(f"--tokenizer={checkpoint.path / file}")
    if give:
        raise UserError(f"{checkpoint.path} has {what}; give {' '.join(give)}")
    load_weights(checkpoint, model)


def _open_export(path):
    """The model in a folder of scripts/export.py, as a Checkpoint without a run; None for another folder."""
    path = user_path("init_from", path)
    if not (path / "config.json").is_file():
        return None
    _, config = read_json(path / "config.json")
    if "nanochat" not in config:
        return None
    state = {"identity": config["nanochat"]}
    schema.check(path / "config.json", state, schema.STATE)
    return Checkpoint(path, 0, state, ())


def _settings_of_model(model: dict) -> str:
    """The settings of base_train that make a model of this identity."""
    try:
        given = {
            "depth": model["depth"],
            "aspect_ratio": model["width"] // model["depth"],
            "head_dim": model["width"] // model["num_heads"],
            "max_seq_len": model["max_seq_len"],
            "window_pattern": model["window_pattern"],
        }
    except (KeyError, TypeError, ZeroDivisionError):  # it is the model of another program
        return "the same settings of the model"
    return " ".join(f"--{name}={value}" for name, value in given.items())


def load_weights(checkpoint, model):
    """Put a checkpoint's weights into a model. Raises UserError if names, shapes or dtypes differ.

    An export has no sub-word embeddings, since their rows are added to those of tokens. In a model that has
    them they begin at zero, so it computes the same.
    """
    tensors, own = checkpoint.load_model(), model.state_dict()
    if not checkpoint.files:  # an export
        subwords = {name: tensor for name, tensor in own.items() if name.startswith("pieces.")}
        tensors |= {n: torch.zeros_like(t) if t.is_floating_point() else t for n, t in subwords.items()}
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
    """Before a run writes in its folder, move what is not part of its past out of there.

    These are the checkpoints after the one that the run continues: their metrics will be cut, so `find` must
    not take them later. If that checkpoint is in another folder (--resume=FOLDER), everything moves.
    """
    elsewhere = continued and continued.path.resolve().parent != Path(run_path).resolve()
    step = continued.step if continued else 0
    if aside := set_aside(run_path, after=None if elsewhere else step):
        say(f"{run_path} had checkpoints or files of another run; they are now in {aside}")


def differences(continued, facts: dict) -> list[str]:
    """What differs between this run and the checkpoint that it continues, a line each: settings, versions and
    sources. facts: this run's, as in config.json. What the checkpoint does not say is not compared. Raises
    Damaged."""
    then = continued.config
    settings = {name: entry["value"] for name, entry in then.get("settings", {}).items()}
    versions, sources = then.get("versions", {}), then.get("sources", {})
    now = {name: entry["value"] for name, entry in facts["settings"].items() if name not in OF_ONE_COMMAND}
    pairs = [(name, settings[name], now[name]) for name in now if name in settings]
    pairs += [(name, versions[name], is_) for name, is_ in facts["versions"].items() if name in versions]
    lines = [f"{name} {was} -> {is_}" for name, was, is_ in pairs if was != is_]
    edited = [name for name, digest in facts["sources"].items() if sources and sources.get(name) != digest]
    if edited:
        more = f" and {len(edited) - 3} more" if len(edited) > 3 else ""
        lines.append(f"the code of {', '.join(edited[:3])}{more}")
    return lines


def resume_message(continued, num_iterations, changed, finished, settings):
    """The lines to print when a run continues a checkpoint. changed: what `changes` returned. settings: the
    script's, by name."""
    if finished:
        ends = ("num_iterations", "target_minutes", "num_epochs")
        longer = " or ".join(f"--{name}" for name in ends if name in settings)
        more = f"for more give a larger {longer}, to start again --resume=never"
        return f"finished already: {continued.path}; {more}"
    said, before = [f"going on from {continued.path}"], continued.state["num_iterations"]
    if num_iterations > before:
        said.append(
            f"the horizon grew from {before} to {num_iterations} steps: the learning rate rises again"
        )
    if changed:
        said.append(f"accepted: {', '.join(changed)} changed, so the text is read from its start")
    return "\n".join(said)
