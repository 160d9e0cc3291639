"""How a run was made: its settings beside the defaults, its plan, and the command that makes it again."""

import importlib.util
import re
import shlex

import configurator
from nanochat.run.report.run_data import Run, number, text

# A run is repeated in another folder, and with the same weights and text
NOT_REPEATED = ("out_dir", "model_tag", "resume", "base_dir", "plan", "price_per_hour")


def changed_settings(run: Run, defaults: dict) -> dict[str, dict]:
    """{name: {"value", "source"}} of the settings that somebody changed to something else."""

    def same(name, value):
        return name in defaults and type(defaults[name]) is type(value) and defaults[name] == value

    entries = run.settings().items()
    return {n: s for n, s in entries if s.get("source") != "default" and not same(n, s["value"])}


def shown_value(value) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else text(value)


def script_of(run: Run) -> str:
    """The script that made the run. mid_train's runs alone have the setting loss_on."""
    return "scripts.mid_train" if "loss_on" in run.settings() else "scripts.base_train"


def defaults_of(script: str) -> dict:
    """{setting: default} of today's script; {} if it cannot be read."""
    try:
        found = importlib.util.find_spec(script)
        return configurator.defaults(found.origin)
    except (AttributeError, ImportError, OSError, ValueError):
        return {}


def plan_lines(run: Run) -> list[str]:
    """The lines of the plan that config.json holds."""
    plan = run.config.get("plan")
    return [text(line) for line in plan[:100]] if isinstance(plan, list) else []


def command(run: Run) -> str:
    """The command that makes the same run in another folder; every argument is quoted for a shell."""
    given = {n: s["value"] for n, s in run.settings().items() if s.get("source") != "default"}
    flags = [f"--{n}={shown_value(v)}" for n, v in given.items() if n not in NOT_REPEATED]
    flags.append(f"--model_tag={re.sub(r'[^A-Za-z0-9_.-]', '-', run.name)[:60].lstrip('-')}-again")
    world = number(run.config.get("world_size")) or 1
    start = f"torchrun --standalone --nproc_per_node={world:.0f} -m" if world > 1 else "python -m"
    return f"{start} {script_of(run)} " + " ".join(shlex.quote(flag) for flag in flags)
