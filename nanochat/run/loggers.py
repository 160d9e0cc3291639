"""Where else a run is logged: --logger=wandb,tensorboard,trackio.

A logger gets each record of metrics.jsonl at its step (numbers and samples), and at the end the report. It is
imported where it is used. If one fails, training continues without it. A resumed run goes on in the same run
of each logger: wandb finds it by its id, TensorBoard by its folder, Trackio by its name.
"""

import importlib.util
import json
import netrc
import os
import sys
from pathlib import Path
from textwrap import indent
from urllib.parse import urlsplit

from nanochat import UserError
from nanochat.terminal import first_line

CODE = " " * 4  # before a line of Markdown that is shown as it is
UNNAMED = "dummy"  # the default of --run
PROJECT = "nanochat"  # in wandb and Trackio
REPORT_FILES = ("report.html", "report.md", "loss.png")  # of a run's folder
COLUMNS = ["step", "sample"]  # of the table of samples


def choose(logger: str | None, run: str) -> list[str]:
    """The loggers of the settings `logger` and `run`: those named; else wandb if the run has a name.

    Raises UserError if one is unknown or not installed. It imports none.
    """
    names = [name.strip() for name in logger.split(",")] if logger else ["wandb"] * (run != UNNAMED)
    if unknown := [name for name in names if name not in KINDS]:
        raise UserError(f"there is no logger {unknown[0]!r}; --logger takes any of {','.join(KINDS)}")
    specs = {name: importlib.util.find_spec(name) for name in names}
    # A folder of that name, such as a run's, has no origin
    if missing := [name for name, spec in specs.items() if not (spec and spec.origin)]:
        raise UserError(
            f"{' and '.join(missing)} cannot be imported; install it with `pip install {' '.join(missing)}`, "
            "or leave it out of --logger"
        )
    return list(specs)


class Loggers:
    """The open loggers of a run.

    names: of `choose`. run: the setting. folder: the run's. config: for JSON. loop: the LoopState, which
    remembers wandb's id. step: the first one; above 0 the run is resumed.
    """

    def __init__(self, names: list[str], run: str, folder: Path, config: dict, loop, step: int, say=print):
        self._open, self._step = {}, step
        if not names:
            say("loggers: none (--logger=wandb,tensorboard,trackio)")
        for name in names:
            if opened := self._call(name, KINDS[name], run, Path(folder), config, loop, step, say):
                self._open[name] = opened

    def write(self, record: dict):
        """Log a record of metrics.jsonl at its step. An object in it becomes several numbers."""
        numbers, samples, self._step = {}, record.get("samples") or [], record["step"]
        for name, value in record.items():
            parts = value if isinstance(value, dict) else {"": value}
            parts = {f"{name}/{part}".rstrip("/"): number for part, number in parts.items()}
            numbers |= {key: number for key, number in parts.items() if isinstance(number, (int, float))}
        del numbers["step"]
        samples = [text.encode("utf-8", "replace").decode() for text in samples]  # without half characters
        for name, logger in list(self._open.items()):
            self._call(name, logger.write, self._step, numbers, samples)

    def finish(self):
        """Log the report, and close the loggers."""
        for name, logger in list(self._open.items()):
            self._call(name, logger.finish, self._step)

    def _call(self, name: str, function, *values):
        """What `function` returns; None if it fails, which closes the logger."""
        try:
            return function(*values)
        except Exception as error:  # of its files, its service or the network
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {first_line(error)}"
            print(f"warning: {name} has failed ({reason}); the run goes on without it", file=sys.stderr)


class WritesTables:
    """A logger whose package has the same `log` and `Table` as wandb."""

    def write(self, step: int, numbers: dict, samples: list[str]):
        if samples:
            rows = [[step, sample] for sample in samples]
            numbers = numbers | {"samples": self._package.Table(columns=COLUMNS, data=rows)}
        self._run.log(numbers, step=step)


class Wandb(WritesTables):
    """Weights & Biases. Without a network or an API key it logs offline and says so."""

    def __init__(self, run: str, folder: Path, config: dict, loop, step: int, say):
        import wandb

        options = {"project": PROJECT, "name": _name(run, folder), "config": config, "dir": str(folder)}
        options |= {"id": loop.wandb_id, "resume": "allow"}
        options |= {"settings": wandb.Settings(silent=True, console="off", init_timeout=20)}
        mode = os.environ.get("WANDB_MODE")
        if mode is None and not _has_key(wandb):
            say("wandb has no API key here: logging offline (wandb login; wandb sync uploads it later)")
            mode = "offline"
        try:
            self._run = wandb.init(**options, mode=mode)
        except Exception as error:  # a network can fail in many ways
            reason = type(error).__name__
            say(f"wandb cannot be reached ({reason}): logging offline (wandb sync uploads it later)")
            wandb.teardown()  # its service still holds the id of the attempt that failed
            self._run = wandb.init(**options, mode="offline")
        self._package, self._folder, loop.wandb_id = wandb, folder, self._run.id

    def finish(self, step: int):
        for name in REPORT_FILES:
            if (path := self._folder / name).is_file():
                self._run.save(str(path), base_path=str(self._folder), policy="now")
        self._run.finish()


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, run: str, folder: Path, config: dict, loop, step: int, say):
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        path = folder / "tensorboard" / ("" if run == UNNAMED else run)
        # It hides what a run that was killed has logged since its checkpoint. The evaluation at `step` stays,
        # since it is not repeated; so the update of that number may be there twice
        self._writer = SummaryWriter(str(path), purge_step=step + 1 if step else None, flush_secs=10)
        self._writer.add_text("config", indent(json.dumps(config, indent=2), CODE), step)
        say(f"to see the run in TensorBoard: tensorboard --logdir={folder}")

    def write(self, step: int, numbers: dict, samples: list[str]):
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        if samples:
            self._writer.add_text("samples", "\n\n---\n\n".join(indent(s, CODE) for s in samples), step)

    def finish(self, step: int):
        if (path := self._folder / "report.md").is_file():
            self._writer.add_text("report", path.read_text("utf-8"), step)
        self._writer.close()


class Trackio(WritesTables):
    """Trackio's local database, or the place that its own variables name (TRACKIO_DIR, TRACKIO_SPACE_ID)."""

    def __init__(self, run: str, folder: Path, config: dict, loop, step: int, say):
        import trackio

        again = "allow" if step else "never"
        self._package, self._folder = trackio, folder
        self._run = trackio.init(PROJECT, name=_name(run, folder), config=config, resume=again, embed=False)

    def finish(self, step: int):
        if (path := self._folder / "report.html").is_file():
            self._run.log({"report": self._package.Html(path)}, step=step)
        self._package.finish()


KINDS = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio}  # by the name of the package


def _name(run: str, folder: Path) -> str:
    return "/".join(folder.parts[-2:]) if run == UNNAMED else run


def _has_key(wandb) -> bool:
    """Whether wandb finds a key: in a variable, or in the netrc file, where `wandb login` writes it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(wandb.setup().settings.base_url).netloc  # wandb.ai's has had several names
    try:
        hosts = netrc.netrc(os.path.expanduser(os.environ.get("NETRC", "~/.netrc"))).hosts
        return server in hosts or any("wandb" in host for host in hosts)
    except (OSError, netrc.NetrcParseError):
        return False
