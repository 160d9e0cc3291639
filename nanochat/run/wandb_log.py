"""Weights & Biases: gets the records of metrics.jsonl too, if the package is installed."""

import os
import sys
from pathlib import Path

from nanochat.terminal import first_line

REPORT_FILES = ("report.html", "report.md", "loss.png")  # of a run's folder, uploaded at its end


class WandbLog:
    """A wandb run. If wandb fails, training continues without it."""

    def __init__(self, wandb_run, folder):
        self.run, self.folder, self.id = wandb_run, Path(folder), wandb_run.id

    def write(self, record: dict):
        """Log a record of metrics.jsonl at its step. Samples become a table, an object several curves."""
        step, values = record["step"], {}
        for name, value in record.items():
            if name == "samples":
                values[name] = _table(step, value)
            elif isinstance(value, dict):
                values |= {f"{name}/{part}": v for part, v in value.items() if v is not None}
            elif value is not None:
                values[name] = value
        self._call("log", values, step=step)

    def finish(self):
        """Upload the run's report and end the run."""
        for name in REPORT_FILES:
            if (path := self.folder / name).is_file():
                self._call("save", str(path), base_path=str(self.folder), policy="now")
        self._call("finish")

    def _call(self, method: str, *values, **options):
        """Call a method of the wandb run, unless one has failed before."""
        if self.run is None:
            return
        try:
            getattr(self.run, method)(*values, **options)
        except Exception as error:  # its service can fail in many ways
            self.run = None
            reason = f"{type(error).__name__}: {first_line(error)}"
            print(f"warning: wandb has failed ({reason}); the run goes on without it", file=sys.stderr)


def _table(step: int, samples: list[str]):
    import wandb

    rows = [[step, text.encode("utf-8", "replace").decode()] for text in samples]
    return wandb.Table(columns=["step", "sample"], data=rows)


def start_wandb(run: str, config: dict, folder, run_id: str | None, say=print):
    """The WandbLog of a run named `run`; None for "dummy", and where wandb is not installed.

    Without a network or an API key it logs offline and says so. `run_id` continues the run with that id.
    """
    if run == "dummy":
        say("wandb: off (--run=NAME logs the run there too, under that name)")
        return None
    try:
        import wandb  # here, because a machine may not have it
    except ImportError:
        say("wandb is not installed, so nothing is logged there: pip install wandb, or leave --run out")
        return None
    options = {"project": "nanochat", "name": run, "config": config, "dir": str(folder), "id": run_id}
    options |= {"resume": "allow", "settings": wandb.Settings(silent=True, console="off", init_timeout=20)}
    mode = os.environ.get("WANDB_MODE")
    if mode is None and not _has_key():
        say("wandb has no API key here: logging offline (wandb login; wandb sync uploads it later)")
        mode = "offline"
    try:
        wandb_run = wandb.init(**options, mode=mode)
    except Exception as error:  # a network can fail in many ways; training goes on without it
        reason = type(error).__name__
        say(f"wandb cannot be reached ({reason}): logging offline (wandb sync uploads it later)")
        wandb.teardown()  # its service still holds the id of the attempt that failed
        wandb_run = wandb.init(**options, mode="offline")
    return WandbLog(wandb_run, folder)


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
