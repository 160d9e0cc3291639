"""List the runs, write the report of a run again, or write a page that compares runs.

    python -m scripts.report                       # the runs under base_dir
    python -m scripts.report laptop                # its report.html and report.md
    python -m scripts.report d4 d4-again --out=comparison.html    # curves over each other

A run is named by its folder, or by its tag in base_checkpoints or mid_checkpoints of base_dir. A tag of a
base run and a mid run means both; base_checkpoints/TAG means one. The page is a single file that loads
nothing: mail it, or put it on a server.
"""

import sys
from pathlib import Path

import configurator
from nanochat import UserError
from nanochat.files import replacing, user_path
from nanochat.run.report import write_files
from nanochat.run.report.pages import MOST_RUNS, comparison_page, run_page
from nanochat.run.report.run_data import find_runs, read_run, runs_in
from nanochat.run.report.summary import table_of_runs
from nanochat.terminal import printable

out: str | None = None  # file to write (none = the run's report.html; comparison.html here for several runs)
price_per_hour = -1.0  # what the machine costs an hour, to show the cost (-1 = as the run says) [-1, 0..1e9]
base_dir = "~/.cache/nanochat"  # where runs are looked for by tag (environment: NANOCHAT_BASE_DIR)

settings = configurator.configure(globals(), arguments="RUN")


def warn(message: str):
    print(printable(message), file=sys.stderr)


def reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


def list_runs():
    """Print the runs under base_dir."""
    runs = []
    for folder in runs_in(base_path):
        try:
            runs.append(read_run(folder, warn))
        except OSError as error:
            warn(f"warning: {folder} is left out ({reason(error)})")
    print(printable(table_of_runs(runs)) if runs else f"there is no run under {base_path}")


def write_page() -> Path:
    """Write the page of the named runs; returns its path."""
    path = user_path("out", out) if out else Path("comparison.html")
    run, *others = runs = [read_run(folder, warn) for folder in folders]
    for each in runs if price_per_hour >= 0 else ():
        each.price_per_hour = price_per_hour
    final = run.state != "running"
    if not others and not out:
        write_files(run, final)
        return run.folder / "report.html"
    page = comparison_page(runs) if others else run_page(run, final)
    with replacing(path) as file:
        file.write(page.encode())
    return path


base_path = user_path("base_dir", base_dir)
found = [find_runs(name, base_path) for name in settings.arguments]
folders = list({folder.resolve(): folder for same in found for folder in same}.values())
for several in (same for same in found if len(same) > 1):
    both = " and ".join(str(folder.relative_to(base_path)) for folder in several)
    print(printable(f"{several[0].name} is {both}: both are shown"))
if len(folders) > MOST_RUNS:
    raise UserError(f"{len(folders)} runs are too many for a page; name 1 to {MOST_RUNS}")
if not folders:
    list_runs()
else:
    try:
        print(printable(f"report: {write_page()}"))
    except OSError as error:
        raise UserError(
            f"no report ({reason(error)}); name another run, or another place with --out=FILE"
        ) from error
