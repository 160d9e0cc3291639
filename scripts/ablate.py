"""Ablations: train variants with equal tokens or FLOPs and several seeds, and compare their bits per byte.

    python -m scripts.ablate --variants=packing                 # a list of experiments/variants, or a file
    python -m scripts.ablate --variants=copying --depths=4,6    # each variant at both depths
    python -m scripts.ablate --variants=copying --only="own key" --more="--num_iterations=300"

A list is a file of Python literals: `settings` of base_train that all variants share, and `variants`, each
with its own settings and, if the sources change, "patch": a file beside the list, made with `git diff`.
The first variant is the baseline.

Each training is a run of scripts/base_train.py with one thread, and every core has one. After a stop the same
command goes on where every training was. A result is kept in <base_dir>/ablations/, and a command with more
seeds or depths trains only what is new. A table gets a row for each variant and depth. A training that fails
is named at once, the others go on, and the exit status is 2.
"""

import functools
import hashlib
import json as json_module
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import configurator
from nanochat import UserError, checkpoint
from nanochat.checkpoint.folder import LOCK, Lock
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import open_tokenizer
from nanochat.files import special_kind, user_path
from nanochat.machine import runtime
from nanochat.run.metrics import read_metrics
from nanochat.variants import BASE_TRAIN, LISTS, ROOT, patched_copy, read_list, settings_in

variants = "packing"  # a list of experiments/variants, or a path
only = ""  # these variants of the list, separated by semicolons, and its first (empty = all)
depths = ""  # separated by commas (empty = the list's)
seeds = 3  # trainings of every variant, with the seeds 0, 1, ... [1..1000]
more = ""  # settings of base_train for all variants, as on its command line
jobs = -1  # trainings at a time (-1 = one a core; with a GPU 1) [-1, 1..1024]
table: str | None = "experiments/results/ablations.md"  # gets the rows (none = no file)
json = False  # print one JSON object as the last line
base_dir = "~/.cache/nanochat"  # where data, tokenizers and results are (environment: NANOCHAT_BASE_DIR)

settings = configurator.configure(globals())

# A difference counts if it is more than so many standard errors: Student's t, two-sided 10 %, by seeds
T_VALUE = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02, 7: 1.94, 8: 1.89, 9: 1.86, 10: 1.83}
HEADER = """\
# Runs of scripts/ablate.py

The script adds a row for each variant and depth, and nobody edits them. Bits per byte: mean ± standard
deviation over the seeds. Difference: to the baseline with the same seed, mean ± standard error. Time: of a
step, over that of the baseline with the same seed. Behind the list's name: what --more changed
in it, but for the text.

| date | commit | list | variant | depth | tokens | seeds | bits per byte | difference | time | verdict |
|:--|:--|:--|:--|--:|--:|--:|--:|--:|--:|:--|
"""

# ------------------------------------------------------------------------------------------------------
# The variants


def chosen_variants(found: dict[str, dict], only: str) -> dict[str, dict]:
    wanted = [name.strip() for name in only.split(";") if name.strip()]
    if unknown := [name for name in wanted if name not in found]:
        raise UserError(f"--only names {', '.join(unknown)}; the list has {', '.join(found)}")
    baseline = next(iter(found))
    return {name: one for name, one in found.items() if not wanted or name in wanted or name == baseline}


@functools.cache
def fingerprints(data: str, val_data: str | None, text_field: str, tokenizer: str, vocab_size: int):
    """Of the text and of its tokenizer. Both are made here if they are missing: two trainings at a time would
    both make them."""
    dataset = open_dataset(data, val_data, base_dir=base_path, text_field=text_field)
    folder, exact = dataset.tokenizer_folder(base_path), vocab_size != -1
    wanted = vocab_size if exact else dataset.suggested_vocab_size
    found = open_tokenizer(tokenizer, wanted, folder, dataset.train_texts, exact=exact)
    return dataset.fingerprint, found.fingerprint


# ------------------------------------------------------------------------------------------------------
# One training


class Training:
    """A variant, at a depth, with a seed: a run of base_train in its own folder."""

    def __init__(self, variant: str, contents: dict, depth: int, seed: int):
        self.variant, self.depth, self.seed = variant, depth, seed
        self.patch = contents.get("patch", "")
        own = {name: value for name, value in contents.items() if name != "patch"}
        self.settings = shared | {"depth": depth, "seed": seed, **own}
        # A result counts for the same sources, variant, settings, data and kind of device only
        same = [sources, variant, self.patch, self.settings, *self.text(), machine.device.type]
        key = hashlib.sha256(json_module.dumps(same).encode()).hexdigest()[:12]
        name = "".join(c if c.isalnum() else "-" for c in variant)
        self.folder = base_path / "ablations" / variants_path.stem / f"{name}-d{depth}-{seed}-{key}"
        self.kept = self.folder / "ablation.json"

    def text(self) -> tuple[str, str]:
        chosen = configurator.defaults(BASE_TRAIN) | self.settings
        read = "data", "val_data", "text_field", "tokenizer", "vocab_size"
        return fingerprints(*(chosen[name] for name in read))

    @property
    def result(self) -> dict | None:
        """None if there is none, or a file that no ablation has written whole."""
        try:
            found = json_module.loads(self.kept.read_text("utf-8"))
            return found if found.keys() >= {"val_bpb", "step_s", "tokens", "git_commit"} else None
        except (FileNotFoundError, ValueError, AttributeError):
            return None

    def wait_until_free(self):
        """A command that is killed leaves its trainings behind, and they run on."""
        lock, said = self.folder / "run" / LOCK, False
        while lock.exists():
            try:
                return Lock(lock).close()
            except BlockingIOError as holder:
                if not said:
                    print(f"{self} still runs in {holder}; waiting for its end", flush=True)
                said = True
                time.sleep(1)

    def start(self) -> subprocess.Popen:
        self.folder.mkdir(parents=True, exist_ok=True)
        where = patched_copy(self.patch, self.folder / "sources") if self.patch else ROOT
        chosen = {"compile": "off", **dict.fromkeys(QUIET, -1), **self.settings}
        chosen |= {"base_dir": base_path, "out_dir": self.folder / "run"}
        command = [sys.executable, "-m", "scripts.base_train", *(f"--{k}={v}" for k, v in chosen.items())]
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if machine.device.type == "cpu" else {})
        with open(self.folder / "log.txt", "a") as log:
            return subprocess.Popen(command, cwd=where, env=environment, stdout=log, stderr=log)

    def end(self) -> bool:
        """Keep the result of a training; False if it has none, since a signal stopped it alone."""
        records = read_metrics(self.folder / "run" / "metrics.jsonl")
        steps = [record for record in records if "loss" in record]
        # A run that is stopped does not evaluate after its last step
        last = steps[-1]["tokens"] if steps else 0
        if not any("val_bpb" in record and record["tokens"] == last for record in records):
            return False
        result = {
            "variant": self.variant, "depth": self.depth, "seed": self.seed, "settings": self.settings,
            "val_bpb": next(r["val_bpb"] for r in reversed(records) if "val_bpb" in r),
            "loss": steps[-1]["loss"], "tokens": steps[-1]["tokens"],
            "step_s": statistics.median(record["step_time_s"] for record in steps),
            "git_commit": runtime.git_commit(),
        }  # fmt: skip
        checkpoint.write_whole(self.kept, json_module.dumps(result).encode())
        for saved in (self.folder / "run").glob("step_*"):  # a list of variants would fill the disk
            shutil.rmtree(saved)
        print(f"{self}: {result['val_bpb']:.4f} bits per byte, {result['step_s']:.3f} s a step", flush=True)
        return True

    def __str__(self):
        return f"{self.variant}, depth {self.depth}, seed {self.seed}"


QUIET = ("eval_every", "sample_every", "save_every", "core_metric_every")


def lock_list(folder: Path) -> Lock:
    """Hold a list's folder: two commands would train the same."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder / LOCK)
        lock.sign()
        return lock
    except BlockingIOError as holder:
        why = f"this list is being trained by {holder}"
        raise UserError(f"{why}; wait for it, or give another --base_dir") from None
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}); give another --base_dir") from None


def train_all(trainings: list[Training], at_once: int) -> list[Training]:
    """Run them, so many at a time; returns those that failed. When this process is stopped, each saves a
    checkpoint, and goes on from it the next time."""
    waiting = [training for training in trainings if training.result is None]
    for training in waiting:
        training.wait_until_free()
    running: dict[Training, subprocess.Popen] = {}
    failed = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running[waiting[0]] = waiting[0].start()
                waiting.pop(0)
            time.sleep(0.2)
            for training, process in list(running.items()):
                if (status := process.poll()) is not None:
                    del running[training]
                    if status or not training.end():
                        failed.append(training)
                        last = (training.folder / "log.txt").read_text("utf-8", "replace").strip()[-2000:]
                        how = "failed" if status else "was stopped"
                        last = last or "nothing at all, so perhaps the disk is full"
                        say = f"{training}: base_train {how}; its output ends with:\n{last}"
                        print(say, file=sys.stderr, flush=True)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return failed


# ------------------------------------------------------------------------------------------------------
# The table


def mean_and(values: list[float], spread, sign: str = "") -> str:
    if len(values) == 1:
        return f"{values[0]:{sign}.4f}"
    return f"{statistics.mean(values):{sign}.4f} ± {spread(values):.4f}"


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def verdict(differences: list[float]) -> str:
    """Of bits per byte, so less is better."""
    if len(differences) == 1:
        return "one seed"
    mean = statistics.mean(differences)
    if abs(mean) <= T_VALUE.get(len(differences), 1.8) * standard_error(differences):
        return "no difference seen"
    return "better" if mean < 0 else "worse"


def results(variant: str, depth: int) -> dict[int, dict]:
    """By seed, of the trainings that did not fail."""
    of = [t for t in trainings if (t.variant, t.depth) == (variant, depth)]
    return {t.seed: t.result for t in of if t.result}


def row(variant: str, depth: int) -> str | None:
    """A row of the table, of the seeds that the variant and the baseline both have; None if there is none."""
    base = results(baseline, depth)
    of = {seed: one for seed, one in results(variant, depth).items() if seed in base}
    if not of:
        return None
    bits = [one["val_bpb"] for one in of.values()]
    compared = ["", "", "baseline"]
    if variant != baseline:
        differences = [one["val_bpb"] - base[seed]["val_bpb"] for seed, one in of.items()]
        time_ratio = statistics.median(one["step_s"] / base[seed]["step_s"] for seed, one in of.items())
        compared = [mean_and(differences, standard_error, "+"), f"{time_ratio:.2f}", verdict(differences)]
    commits = sorted({(one["git_commit"] or "?")[:7] for one in of.values()})
    tokens = f"{next(iter(of.values()))['tokens']:,}"
    cells = [date.today(), " ".join(commits), list_name, variant, depth, tokens, len(of)]
    return "| " + " | ".join([*map(str, cells), mean_and(bits, statistics.stdev), *compared]) + " |"


def without_date(row: str) -> str:
    return row.partition(" | ")[2]


def rows_in(table: Path) -> set[str]:
    """The rows of the table, without their dates; if there is none, it is made. Raises UserError if it cannot
    be read and written."""
    try:
        if table.exists() and (kind := special_kind(table)):
            raise OSError(0, f"it is {kind}")
        with open(table, "a+", encoding="utf-8") as file:
            if not file.tell():
                file.write(HEADER)
            file.seek(0)
            return {without_date(line) for line in file.read().splitlines()}
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"--table={table} cannot be written ({why}); name another file, or none") from None


def stop(number, frame):
    """The trainings are saved on the way out, by train_all."""
    print(f"{signal.Signals(number).name}: the trainings save; the same command goes on", file=sys.stderr)
    sys.exit(128 + number)


# ------------------------------------------------------------------------------------------------------

if "RANK" in os.environ:
    raise UserError("ablate starts its trainings itself; start it without torchrun")
table_path = user_path("table", table) if table else None
if table_path:  # noticed now, and not after hours
    rows_in(table_path)
variants_path = user_path("variants", variants)
if not variants_path.suffix:
    variants_path = LISTS / f"{variants}.py"
shared, found = read_list(variants_path)
changed = settings_in(more, "--more")
shared |= changed
changes = [f"{name}={value}" for name, value in changed.items() if name not in ("data", "val_data")]
list_name = ", ".join([variants_path.stem, *changes])
found = chosen_variants(found, only)
baseline = next(iter(found))
for contents in found.values():  # a patch that no longer fits is noticed before the first training
    if patch := contents.get("patch"):
        with tempfile.TemporaryDirectory() as folder:
            patched_copy(patch, Path(folder) / "sources")
names = [name.strip() for name in depths.split(",") if name.strip()] or [shared.get("depth", 4)]
wanted_depths = [settings_in([f"--depth={name}"], f"--depths={depths}")["depth"] for name in names]
wanted_depths = [*dict.fromkeys(wanted_depths)]
machine = runtime.start("auto", seed=0)
base_path = user_path("base_dir", base_dir).resolve()
lock = lock_list(base_path / "ablations" / variants_path.stem)
sources = runtime.sources_fingerprint(ROOT)
trainings = [
    Training(variant, contents, depth, seed)
    for depth in wanted_depths
    for seed in range(seeds)  # seeds outside: after a stop all variants have about equally many results
    for variant, contents in found.items()
]
at_once = jobs if jobs > 0 else 1 if machine.device.type != "cpu" else os.cpu_count() or 1
for name in ("SIGTERM", "SIGINT", "SIGHUP"):
    number = getattr(signal, name, None)  # Windows has no SIGHUP, and nohup ignores it
    if number and signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, stop)
try:
    failed = train_all(trainings, at_once)
except OSError as error:
    why = f"cannot write {error.filename} ({error.strerror})"
    raise UserError(f"{why}; make room, and the same command goes on") from None

rows = [line for depth in wanted_depths for variant in found if (line := row(variant, depth))]
print("\n" + HEADER[HEADER.index("| date") :] + "\n".join(rows))
if table_path:
    known = rows_in(table_path)
    with open(table_path, "a", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in rows if without_date(line) not in known)
if json:
    print(json_module.dumps({"settings": settings.values, "results": [t.result for t in trainings]}))
machine.close()
if failed:
    raise UserError(f"failed: {'; '.join(map(str, failed))}. The same command tries these again")
