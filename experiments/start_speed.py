"""How soon a run begins: `python -m scripts.bench --what=start`."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def bench(settings: dict) -> dict[str, float]:
    """Seconds until a run's metrics.jsonl has its first step. The first run fills caches and counts apart."""
    from nanochat import UserError

    command = [sys.executable, "-m", "scripts.base_train", settings["recipe"]]
    command.append(f"--base_dir={settings['base_dir']}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    times = []
    for _ in range(settings["rounds"] + 1):
        with tempfile.TemporaryDirectory() as place:
            records = Path(place) / "run" / "metrics.jsonl"
            began = time.perf_counter()
            process = subprocess.Popen([*command, f"--out_dir={records.parent}"], **pipes)
            while not (records.exists() and records.stat().st_size):
                if process.poll() is not None:
                    raise UserError(f"base_train ended early: {process.stderr.read().strip()[-500:]}")
                time.sleep(0.01)
            times.append(time.perf_counter() - began)
            process.kill()
            process.communicate()
    return {"first_s": times[0], "median_s": statistics.median(times[1:]), "slowest_s": max(times[1:])}
