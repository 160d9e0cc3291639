"""Write the report of a run again, or a page that compares runs.

    python -m scripts.report ~/.cache/nanochat/base_checkpoints/laptop    # its report.html and report.md
    python -m scripts.report d4 d4-again --out=comparison.html            # curves over each other

A run is named by its folder, or by its tag in base_checkpoints or mid_checkpoints of base_dir. The page is
a single file that loads nothing: mail it, or put it on a server.
"""

import sys
from pathlib import Path

import configurator
from nanochat import UserError
from nanochat.files import replacing, user_path
from nanochat.run.report import MOST_RUNS, comparison_page, find_run, read_run, run_page, write_files
from nanochat.terminal import printable

out: str | None = None  # file to write (none = the run's report.html; comparison.html here for several runs)
price_per_hour = -1.0  # what the machine costs an hour, to show the cost (-1 = as the run says) [-1, 0..1e9]
base_dir = "~/.cache/nanochat"  # where runs are looked for by tag (environment: NANOCHAT_BASE_DIR)

settings = configurator.configure(globals(), arguments="RUN")


def warn(message: str):
    print(printable(message), file=sys.stderr)


folders = [find_run(name, user_path("base_dir", base_dir)) for name in dict.fromkeys(settings.arguments)]
if not 1 <= len(folders) <= MOST_RUNS:
    raise UserError(f"name 1 to {MOST_RUNS} runs, such as: python -m scripts.report d4")
price = price_per_hour if price_per_hour >= 0 else None
path = user_path("out", out) if out else Path("comparison.html")
try:
    run, *others = runs = [read_run(folder, warn) for folder in folders]
    if not others and not out:
        path = run.folder / "report.html"
        write_files(run, not run.goes_on, price)
    else:
        page = comparison_page(runs, price) if others else run_page(run, not run.goes_on, price)
        with replacing(path) as file:
            file.write(page.encode())
except OSError as error:
    reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    raise UserError(f"no report ({reason}); name another run, or another place with --out=FILE") from error
print(f"report: {path}")
