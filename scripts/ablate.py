"""Ablations: train variants with equal tokens or FLOPs and several seeds, and compare their bits per byte.

    python -m scripts.ablate --variants=documents               # a list of experiments/variants, or a file
    python -m scripts.ablate --variants=parts --depths=4,6      # each variant at both depths
    python -m scripts.ablate --variants=parts --only="without smear" --more="--num_iterations=300"

A list is a file of Python literals: `settings` of base_train that all variants share, and `variants`, each
with its own settings and, if its sources differ, "patch": a file beside the list. The first variant is the
baseline. A patch begins with a line that names its commit; the output of `git diff` follows:

    (git log -1 --format="Fits commit %h"; git diff) > experiments/variants/mine.patch

If a variant has a patch, all variants, the baseline too, are trained with the sources of that commit. A
training finds the name of its variant in the environment as VARIANT, so variants can share a patch.

A training is a run of scripts/base_train.py with one thread, on each core one. After a stop the same command
continues every training. Results are kept in <base_dir>/ablations/, so a command with more seeds or depths
trains only what is new. A table gets a row for each variant and depth. If a training fails, its error is
printed at once, the others go on, and the exit status is 2.
"""

import ast
import functools
import hashlib
import json as json_module
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import configurator
from nanochat import UserError, checkpoint, streams
from nanochat.data.sources import open_dataset
from nanochat.files import temporary_folder, user_path, write_whole
from nanochat.machine import runtime
from nanochat.run.metrics import read_metrics

variants = "documents"  # a list of experiments/variants, or a path
only = ""  # these variants of the list, separated by semicolons, and its first (empty = all)
depths = ""  # separated by commas (empty = the list's)
seeds = 3  # trainings of every variant, with the seeds 0, 1, ... [1..1000]
more = ""  # settings of base_train for all variants, as on its command line
jobs = -1  # trainings at a time (-1 = one a core; with a GPU 1) [-1, 1..1024]
table: str | None = "experiments/results/ablations.md"  # gets the rows (none = no file)
json = False  # print one JSON object as the last line
base_dir = "~/.cache/nanochat"  # where data, tokenizers and results are (environment: NANOCHAT_BASE_DIR)

settings = configurator.configure(globals())

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "experiments" / "variants"
BASE_TRAIN = ROOT / "scripts" / "base_train.py"
OWN = {"seed", "base_dir", "out_dir"}  # settings that ablate decides for each training
FITS = "Fits commit "  # the first line of a patch
# {seeds: standard errors that a difference must exceed}: Student's t, two-sided, 10 %
T_VALUE = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02, 7: 1.94, 8: 1.89, 9: 1.86, 10: 1.83}
HEADER = """\
# Runs of scripts/ablate.py

A row for each variant and depth. Bits per byte: mean ± standard deviation over the seeds. Difference: to the
baseline with the same seed, mean ± standard error. Time: of a step, over that of the baseline. The name of
the list is followed by what --more changed in it.

| date | commit | list | variant | depth | tokens | seeds | bits per byte | difference | time | verdict |
|:--|:--|:--|:--|--:|--:|--:|--:|--:|--:|:--|
"""

# ------------------------------------------------------------------------------------------------------
# The variants


def read_list(path: Path) -> tuple[dict, dict[str, dict], dict[str, str]]:
    """(settings that all variants share, {variant: its settings}, {variant: its patch})."""

    def settings_of(name: str, contents: dict, refused: set[str]) -> dict:
        arguments = [f"--{key}={value}" for key, value in contents.items() if key != "patch"]
        return settings_in(arguments, f"{name} of {path.name}", refused)

    try:
        statements = ast.parse(path.read_text("utf-8")).body
        found = {s.targets[0].id: ast.literal_eval(s.value) for s in statements if isinstance(s, ast.Assign)}
        listed = {str(name): contents for name, contents in found["variants"].items()}
        if not listed:
            raise ValueError("it names no variants")
        shared = settings_of("settings", found["settings"], OWN)
        own = {name: settings_of(name, contents, OWN | {"depth"}) for name, contents in listed.items()}
        files = {name: path.parent / one["patch"] for name, one in listed.items() if "patch" in one}
        return shared, own, {name: file.read_text("utf-8") for name, file in files.items()}
    except UserError:
        raise
    except (OSError, ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
        known = ", ".join(sorted(found.stem for found in LISTS.glob("*.py")))
        form = "settings = {...} and variants = {name: {...}, ...}"
        why = f"{path} is no list of variants ({type(error).__name__}: {error})"
        raise UserError(f"{why}; give --variants a file with {form}, or one of {known}") from None


def settings_in(arguments: list[str], where: str, refused: set[str] = OWN) -> dict:
    """{setting: value} of arguments for base_train's command line.

    where: their source, for messages. refused: settings that ablate decides. Raises UserError for one of
    these, and if base_train does not take the arguments.
    """
    try:
        given = configurator.configure({"__file__": str(BASE_TRAIN)}, arguments)
    except SystemExit:  # the configurator has said what is wrong
        raise UserError(f"{where} cannot be given to base_train") from None
    unset = {"default", *(f"environment {variable}" for variable in configurator.ENVIRONMENT.values())}
    chosen = {name: given.values[name] for name, by in given.sources.items() if by not in unset}
    if own := sorted(refused & chosen.keys()):
        raise UserError(f"{where} has {', '.join(own)}, which ablate decides for each training; take it out")
    return chosen


def commit_of(patches: list[str]) -> str:
    """The commit of all patches, "" without patches. Raises UserError if there are several, or if a patch
    does not fit its commit."""
    commits = {patch.partition("\n")[0].removeprefix(FITS) for patch in patches}
    if len(commits) > 1:
        raise UserError(f"the patches fit several commits ({', '.join(commits)}); choose some with --only")
    for patch in patches:  # try them before the first training
        with temporary_folder() as folder:
            check_out(*commits, patch, folder / "sources")
    return next(iter(commits), "")


def check_out(commit: str, patch: str, folder: Path):
    """Write the patched sources of a commit into a new folder. Raises UserError if there is no such commit or
    the patch does not fit."""
    shutil.rmtree(folder, ignore_errors=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    how = {"env": environment, "text": True, "capture_output": True, "check": True}
    try:
        subprocess.run(["git", "clone", "--shared", "--no-checkout", ROOT, folder], **how)
        subprocess.run(["git", "checkout", commit], cwd=folder, **how)
        if patch:
            subprocess.run(["git", "apply", "-"], cwd=folder, input=patch, **how)
    except (OSError, subprocess.CalledProcessError) as error:
        why = f"a patch does not fit {commit}, the commit that its first line names; see --help"
        raise UserError(f"{why}. git says: {getattr(error, 'stderr', error)}".strip()) from None


# ------------------------------------------------------------------------------------------------------
# One training


@functools.cache
def fingerprints(data: str, val_data: str | None, text_field: str, tokenizer: str, vocab_size: int):
    """The fingerprints of the text and its tokenizer. If they are missing, they are made here, and not by
    several trainings at the same time."""
    dataset = open_dataset(data, val_data, base_dir=base_path, text_field=text_field)
    return dataset.fingerprint, dataset.open_tokenizer(tokenizer, vocab_size, base_path).fingerprint


class Training:
    """A variant, at a depth, with a seed: a run of base_train in its own folder."""

    def __init__(self, variant: str, depth: int, seed: int):
        self.variant, self.depth, self.seed = variant, depth, seed
        self.patch = patches.get(variant, "")
        self.settings = shared | {"depth": depth, "seed": seed, **chosen[variant]}
        everything = configurator.defaults(BASE_TRAIN) | self.settings
        read = "data", "val_data", "text_field", "tokenizer", "vocab_size"
        texts = fingerprints(*(everything[name] for name in read))
        # A result is used again only for the same sources, variant, settings, data and kind of device
        same = [sources, variant, self.patch, self.settings, *texts, machine.device.type]
        key = hashlib.sha256(json_module.dumps(same).encode()).hexdigest()[:12]
        name = "".join(c if c.isalnum() else "-" for c in variant)
        self.folder = list_path / f"{name}-d{depth}-{seed}-{key}"
        self.kept = self.folder / "ablation.json"

    @property
    def result(self) -> dict | None:
        return json_module.loads(self.kept.read_text("utf-8")) if self.kept.exists() else None

    def start(self) -> subprocess.Popen:
        self.folder.mkdir(parents=True, exist_ok=True)
        where = self.folder / "sources" if commit else ROOT
        if commit:
            check_out(commit, self.patch, where)
        quiet = dict.fromkeys(("eval_every", "sample_every", "save_every", "core_metric_every"), -1)
        places = {"base_dir": base_path, "out_dir": self.folder / "run"}
        given = {"compile": "off"} | quiet | self.settings | places
        # Not `-m scripts.base_train`, which needs another working directory: relative paths would change
        arguments = [f"--{name}={value}" for name, value in given.items()]
        command = [sys.executable, where / "scripts" / "base_train.py", *arguments]
        one_thread = {"OMP_NUM_THREADS": "1"} if machine.device.type == "cpu" else {}
        environment = os.environ | {"PYTHONPATH": str(where), "VARIANT": self.variant} | one_thread
        with open(self.folder / "log.txt", "a") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def end(self) -> bool:
        """Write the result of a training; False if a signal stopped the training, so that it has none."""
        records = read_metrics(self.folder / "run" / "metrics.jsonl")
        steps, evaluations = ([r for r in records if name in r] for name in ("loss", "val_bpb"))
        # A run that was stopped has no evaluation after its last step
        if not evaluations or evaluations[-1]["tokens"] != steps[-1]["tokens"]:
            return False
        result = {
            "variant": self.variant, "depth": self.depth, "seed": self.seed, "settings": self.settings,
            "val_bpb": evaluations[-1]["val_bpb"],
            "loss": steps[-1]["loss"], "tokens": steps[-1]["tokens"],
            "step_s": statistics.median(record["step_time_s"] for record in steps),
            "git_commit": commit or runtime.git_commit(),
        }  # fmt: skip
        write_whole(self.kept, json_module.dumps(result).encode())
        for saved in (self.folder / "run").glob("step_*"):  # else a list of variants fills the disk
            shutil.rmtree(saved)
        print(f"{self}: {result['val_bpb']:.4f} bits per byte, {result['step_s']:.3f} s a step", flush=True)
        return True

    def __str__(self):
        return f"{self.variant}, depth {self.depth}, seed {self.seed}"


def train_all(trainings: list[Training], at_once: int) -> list[Training]:
    """Run trainings, `at_once` at a time; returns those that failed. If this process is stopped, each saves a
    checkpoint, from which it continues the next time."""
    waiting = [training for training in trainings if training.result is None]
    running: dict[Training, subprocess.Popen] = {}
    failed = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                training = waiting.pop(0)
                running[training] = training.start()
            time.sleep(0.2)
            ended = {one: process for one, process in running.items() if process.poll() is not None}
            for training, process in ended.items():
                del running[training]
                if process.returncode or not training.end():
                    failed.append(training)
                    how = "failed" if process.returncode else "was stopped"
                    last = (training.folder / "log.txt").read_text("utf-8", "replace").strip()[-2000:]
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
    """A variant's result in words, from its differences in bits per byte, where less is better."""
    if len(differences) == 1:
        return "one seed"
    mean = statistics.mean(differences)
    if abs(mean) <= T_VALUE.get(len(differences), 1.8) * standard_error(differences):
        return "no difference seen"
    return "better" if mean < 0 else "worse"


def rows_of(trainings: list[Training]) -> list[str]:
    """A row for each depth and variant, over the seeds for which it and the baseline have results."""
    found: dict[tuple[int, str], dict[int, dict]] = {}  # depth and variant -> seed -> result
    for training in trainings:
        if result := training.result:
            found.setdefault((training.depth, training.variant), {})[training.seed] = result
    rows = []
    for (depth, variant), results in found.items():
        base = found.get((depth, baseline), {})
        pairs = [(one, base[seed]) for seed, one in sorted(results.items()) if seed in base]
        if not pairs:
            continue
        compared = ["", "", "baseline"]
        if variant != baseline:
            differences = [one["val_bpb"] - other["val_bpb"] for one, other in pairs]
            time_ratio = statistics.median(one["step_s"] / other["step_s"] for one, other in pairs)
            spread = mean_and(differences, standard_error, "+")
            compared = [spread, f"{time_ratio:.2f}", verdict(differences)]
        commits = " ".join(sorted({(one["git_commit"] or "?")[:7] for one, _ in pairs}))
        tokens, bits = f"{pairs[0][0]['tokens']:,}", [one["val_bpb"] for one, _ in pairs]
        cells = [date.today(), commits, list_name, variant, depth, tokens, len(pairs)]
        cells += [mean_and(bits, statistics.stdev), *compared]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows


def add_to_table(table: Path, rows: list[str]):
    """Append the rows that are not in the table, dates ignored. Raises UserError if it cannot be written."""
    try:
        with open(table, "a+", encoding="utf-8") as file:
            if not file.tell():
                file.write(HEADER)
            file.seek(0)
            text = file.read()
            if text and not text.endswith("\n"):  # of an editor, or of a disk that was full
                file.write("\n")
            known = {line.partition(" | ")[2] for line in text.splitlines()}
            file.writelines(row + "\n" for row in rows if row.partition(" | ")[2] not in known)
    except OSError as error:
        why = f"--table={table} cannot be written ({error.strerror})"
        raise UserError(f"{why}; name another file, or none") from None


def stop(number, frame):
    """Exit; train_all then lets the trainings save."""
    streams.from_handler(f"{signal.Signals(number).name}: the trainings save; the same command goes on\n")
    sys.exit(128 + number)


# ------------------------------------------------------------------------------------------------------

table_path = user_path("table", table) if table else None
if table_path:  # an error in writing it comes now, and not after hours
    add_to_table(table_path, [])
variants_path = user_path("variants", variants)
if not variants_path.suffix:
    variants_path = LISTS / f"{variants}.py"
shared, found, patches = read_list(variants_path)
try:
    changed = settings_in(shlex.split(more), "--more")
except ValueError as error:
    raise UserError(f"--more cannot be read: {error}; it is a piece of a command line") from None
shared |= changed
changes = [f"{name}={value}" for name, value in changed.items() if name not in ("data", "val_data")]
list_name = ", ".join([variants_path.stem, *changes])
wanted = [name.strip() for name in only.split(";") if name.strip()]
if unknown := [name for name in wanted if name not in found]:
    raise UserError(f"--only names {', '.join(unknown)}; the list has {', '.join(found)}")
baseline = next(iter(found))
chosen = {name: one for name, one in found.items() if not wanted or name in (baseline, *wanted)}
commit = commit_of([patch for name, patch in patches.items() if name in chosen])
sources = commit or runtime.sources_fingerprint(ROOT)
names = [name.strip() for name in depths.split(",") if name.strip()] or [shared.get("depth", 4)]
of_depths = dict.fromkeys(settings_in([f"--depth={name}"], f"--depths={depths}")["depth"] for name in names)
machine = runtime.start("auto", seed=0)
base_path = user_path("base_dir", base_dir).resolve()
list_path = base_path / "ablations" / variants_path.stem
lock = checkpoint.lock_folder(list_path)  # else two commands could train the same
# Seeds in the outer loop: after a stop all variants have about the same number of results
trainings = [Training(name, depth, seed) for depth in of_depths for seed in range(seeds) for name in chosen]
at_once = jobs if jobs > 0 else 1 if machine.device.type != "cpu" else os.cpu_count() or 1
streams.in_background()  # so that a reader who has stopped does not keep the trainings from saving
for name in ("SIGTERM", "SIGINT", "SIGHUP"):
    number = getattr(signal, name, None)  # Windows has no SIGHUP, and nohup ignores it
    if number and signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, stop)
try:
    failed = train_all(trainings, at_once)
except OSError as error:
    why = f"cannot write {error.filename} ({error.strerror})"
    raise UserError(f"{why}; make room, and the same command goes on") from None

rows = rows_of(trainings)
print("\n" + HEADER[HEADER.index("| date") :] + "\n".join(rows))
if table_path:
    add_to_table(table_path, rows)
if json:
    print(json_module.dumps({"settings": settings.values, "results": [t.result for t in trainings]}))
machine.close()
if failed:
    raise UserError(f"failed: {'; '.join(map(str, failed))}. The same command tries these again")
