"""Lists of variants for scripts/ablate.py: settings of base_train, and perhaps a patch of the sources.

A list is a file of Python literals, `settings` and `variants`; nothing in it is run. What base_train would
refuse is refused here, before the first training.
"""

import ast
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import configurator
from nanochat import UserError
from nanochat.files import user_path
from nanochat.machine import runtime

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "experiments" / "variants"
BASE_TRAIN = ROOT / "scripts" / "base_train.py"
OWN = {"seed", "base_dir", "out_dir"}  # settings that ablate gives each training itself


def read_list(path: Path) -> tuple[dict, dict[str, dict]]:
    """The settings that all variants share, and those of each. The text of its patch is under "patch"."""
    if not path.exists():
        known = ", ".join(sorted(found.stem for found in LISTS.glob("*.py")))
        raise UserError(f"there is no list {path}; give --variants a file, or one of {known}")
    try:
        statements = ast.parse(path.read_text("utf-8")).body
        found = {s.targets[0].id: ast.literal_eval(s.value) for s in statements if isinstance(s, ast.Assign)}
        common, listed = found["settings"], found["variants"]
        if not listed or not all(isinstance(name, str) for name in listed):
            raise ValueError("it names no variants")
        patches = {}
        for name, contents in listed.items():
            if patch := contents.pop("patch", None):
                patches[name] = (path.parent / patch).read_text("utf-8")
        common = of_literals(common, f"settings of {path.name}", OWN)
        for name, contents in listed.items():
            listed[name] = of_literals(contents, f"variant {name!r} of {path.name}", OWN | {"depth"})
            if name in patches:
                listed[name]["patch"] = patches[name]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); it belongs to {path}") from None
    except UserError:
        raise
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no list: {error}; it needs settings = {{...}} and variants = {{name: {{...}}, ...}}"
        ) from None
    return common, listed


def of_literals(contents: dict, where: str, refused: set[str]) -> dict:
    """`settings_in` for settings that a list gives as {name: value}."""
    return settings_in([f"--{name}={value}" for name, value in contents.items()], where, refused)


def settings_in(arguments: list[str] | str, where: str, refused: set[str] = OWN) -> dict:
    """The settings of base_train that its command line would take from these arguments, with absolute paths.

    where: what gives them, for messages. refused: those that ablate decides. Raises UserError if base_train
    would not take them.
    """
    try:
        arguments = shlex.split(arguments) if isinstance(arguments, str) else arguments
        given = configurator.configure({"__file__": str(BASE_TRAIN)}, arguments)
    except ValueError as error:
        raise UserError(f"{where} cannot be read: {error}; it is a piece of a command line") from None
    except SystemExit as end:
        if end.code == 2:  # the configurator has said what is wrong
            raise UserError(f"{where} cannot be given to base_train") from None
        raise
    unset = ("default", "environment")
    chosen = {name: given.values[name] for name, by in given.sources.items() if not by.startswith(unset)}
    if own := sorted(refused & chosen.keys()):
        raise UserError(f"{where} has {', '.join(own)}, which ablate decides for each training; take it out")
    return chosen | {name: absolute(name, chosen[name]) for name in runtime.PATHS if chosen.get(name)}


def absolute(name: str, value: str) -> str:
    """A setting that can be a path, or several with commas, from the root: a patched variant has another
    working directory. What is no file or folder stays."""
    parts = [part.strip() for part in value.split(",")] if name in ("data", "val_data") else [value]
    paths = [user_path(name, part) for part in parts]
    return ",".join(
        str(path.resolve()) if path.exists() else part for part, path in zip(parts, paths, strict=True)
    )


def patched_copy(patch: str, folder: Path) -> Path:
    """Copy the sources to `folder` and patch them. Raises UserError if the patch does not fit."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("nanochat", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "configurator.py", folder)
    # Outside of a repository git applies a patch to the folder it is in
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.resolve().parent)
    try:
        done = subprocess.run(
            ["git", "apply", "-"], input=patch, cwd=folder, env=environment, text=True, capture_output=True
        )
    except FileNotFoundError:
        raise UserError("a variant is a patch of the sources, which git applies; install git") from None
    if done.returncode:
        said = done.stderr.strip()
        raise UserError(f"a patch no longer fits the sources. Make it again with git diff. git says: {said}")
    return folder
