"""Ablations: each variant is trained once for each seed and depth, and a stopped command goes on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, python_m

TINY = "--max_seq_len=32 --vocab_size=300 --total_batch_size=128 --eval_tokens=500 --dtype=float32"


def command(folder: Path, *arguments: str, more: str = "--num_iterations=3") -> list[str]:
    """The script on a small text in `folder`, with one layer."""
    texts = folder / "texts.jsonl"
    lines = (json.dumps(f"document {i} " + "word and word " * (i % 90)) for i in range(400))
    texts.write_text("\n".join(lines))
    os.utime(texts, (1, 1))  # the same file for every command
    places = [f"--base_dir={folder / 'base'}", f"--table={folder / 'table.md'}"]
    return [
        "scripts.ablate",
        "--json",
        "--depths=1",
        f"--more={TINY} --data={texts} {more}",
        *places,
        *arguments,
    ]


def ablate(folder: Path, *arguments: str, status: int = 0, root: Path = ROOT) -> str:
    """Run the script and return what it printed."""
    done = python_m(command(folder, *arguments), root)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


def results_of(output: str) -> list[dict]:
    return json.loads(output.splitlines()[-1])["results"]


def rows(folder: Path) -> list[list[str]]:
    lines = (folder / "table.md").read_text().splitlines()
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| 2")
    ]


def test_packing_is_compared_and_what_has_a_result_is_not_trained_again(tmp_path):
    output = ablate(tmp_path, "--seeds=1")
    first = results_of(output)
    names = ["best fit, remainders kept", "best fit, cropped", "concatenation"]
    assert [run["variant"] for run in first] == names
    assert len({run["val_bpb"] for run in first}) == 3  # the variants differ
    assert all(run["tokens"] == 3 * 128 and run["loss"] > 0 for run in first)
    assert output.count("seed 0: ") == 3
    assert [row[3] for row in rows(tmp_path)] == names
    (list_name,) = {row[2] for row in rows(tmp_path)}  # it says what --more changed, but for the text
    assert list_name.startswith("packing, ") and "num_iterations=3" in list_name and "data" not in list_name
    assert [row[-1] for row in rows(tmp_path)] == ["baseline", "one seed", "one seed"]

    (stopped,) = (tmp_path / "base" / "ablations" / "packing").glob("concatenation-*")
    (stopped / "ablation.json").unlink()
    (stopped / "run" / "metrics.jsonl").unlink()
    output = ablate(tmp_path, "--seeds=1")
    assert output.count("seed 0: ") == 1
    for before, after in zip(first, results_of(output), strict=True):
        assert before | {"step_s": 0} == after | {"step_s": 0}  # the repeated training is equal too


def test_only_some_variants_at_two_depths_and_the_baseline_is_among_them(tmp_path):
    results = results_of(ablate(tmp_path, "--seeds=1", "--depths=1,2", "--only=concatenation"))
    assert [(run["variant"], run["depth"]) for run in results] == [
        ("best fit, remainders kept", 1), ("concatenation", 1),
        ("best fit, remainders kept", 2), ("concatenation", 2),
    ]  # fmt: skip
    assert len({run["val_bpb"] for run in results}) == 4 and len(rows(tmp_path)) == 4


def test_a_result_that_is_not_whole_is_made_again_and_a_depth_counts_once(tmp_path):
    (tmp_path / "mine.py").write_text("settings = {}\nvariants = {'a b': {}, 'a-b': {}}")
    arguments = [f"--variants={tmp_path / 'mine.py'}", "--seeds=1", "--depths=1,1"]
    first = results_of(ablate(tmp_path, *arguments))
    assert [run["variant"] for run in first] == ["a b", "a-b"]
    kept = sorted((tmp_path / "base" / "ablations" / "mine").glob("*/ablation.json"))
    for path, content in zip(kept, ("{}", '{"variant": "a'), strict=True):
        path.write_text(content)
    again = results_of(ablate(tmp_path, *arguments))
    assert [run | {"step_s": 0} for run in again] == [run | {"step_s": 0} for run in first]


@pytest.mark.slow
def test_a_command_that_was_killed_leaves_trainings_whose_end_the_next_one_waits_for(tmp_path):
    long = command(tmp_path, "--variants=documents", "--seeds=1", "--jobs=1", more="--num_iterations=150")
    process = subprocess.Popen([sys.executable, "-m", *long], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    logs = tmp_path / "base" / "ablations" / "documents"
    deadline, metrics = time.monotonic() + 120, ()
    while time.monotonic() < deadline and not (metrics and metrics[0].stat().st_size):
        metrics = [*logs.glob("*/run/metrics.jsonl")]
        time.sleep(0.01)
    second = python_m(long, ROOT)
    assert second.returncode == 2 and "this list is being trained by process" in second.stderr
    process.kill()
    process.wait()
    done = python_m(long, ROOT)
    assert done.returncode == 0 and done.stdout.count("seed 0 still runs in process") == 1, done.stderr
    assert [run["tokens"] for run in results_of(done.stdout)] == [150 * 128] * 2


def test_a_result_of_other_sources_does_not_count(tree, tmp_path):
    (tmp_path / "mine.py").write_text("settings = {}\nvariants = {'usual': {}}")
    arguments = [f"--variants={tmp_path / 'mine.py'}", "--seeds=1"]
    (before,) = results_of(ablate(tmp_path, *arguments, root=tree))
    gpt = tree / "nanochat" / "gpt.py"
    gpt.write_text(gpt.read_text().replace("QK_SCALE = 1.2", "QK_SCALE = 1.5"))
    (after,) = results_of(ablate(tmp_path, *arguments, root=tree))
    assert before["val_bpb"] != after["val_bpb"]
    assert results_of(ablate(tmp_path, *arguments, root=tree)) == [after]


@pytest.mark.slow
def test_more_seeds_add_to_the_results_of_fewer_and_are_compared_in_pairs(tmp_path):
    first = results_of(ablate(tmp_path, "--variants=documents", "--seeds=1"))
    output = ablate(tmp_path, "--variants=documents", "--seeds=3")
    assert output.count("seed 0: ") == 0 and output.count("seed 1: ") == 2
    results = results_of(output)
    assert results[:2] == first
    assert len({run["loss"] for run in results}) == 6
    differences = [results[i + 1]["val_bpb"] - results[i]["val_bpb"] for i in (0, 2, 4)]
    *_, row = rows(tmp_path)
    mean, _, error = row[-3].partition(" ± ")
    assert float(mean) == pytest.approx(sum(differences) / 3, abs=6e-5)
    spread = sum((d - sum(differences) / 3) ** 2 for d in differences) / 2
    assert float(error) == pytest.approx((spread / 3) ** 0.5, abs=6e-5)


@pytest.mark.slow
def test_a_stopped_command_goes_on_where_every_training_was(tmp_path):
    arguments = ["--variants=documents", "--seeds=1", "--jobs=2"]
    long = command(tmp_path, *arguments, more="--num_iterations=400")
    process = subprocess.Popen([sys.executable, "-m", *long], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    logs = tmp_path / "base" / "ablations" / "documents"
    deadline = time.monotonic() + 120
    # A run that is stopped before its first step is done has nothing to save
    while (
        time.monotonic() < deadline
        and len([f for f in logs.glob("*/run/metrics.jsonl") if f.stat().st_size]) < 2
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert len([*logs.glob("*/run/step_*")]) == 2 and not [*logs.glob("*/ablation.json")]
    done = subprocess.run(
        [sys.executable, "-m", *long], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    assert all("going on from" in path.read_text() for path in logs.glob("*/log.txt"))
    assert all(run["tokens"] == 400 * 128 for run in results_of(done.stdout))
    assert not [*logs.glob("*/run/step_*")]  # no checkpoint is left


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--variants=nothing"], "there is no list .*nothing.py; give --variants a file, or one of"),
        (["--only=nothing"], "--only names nothing; the list has best fit"),
        (["--depths=four"], "--depths=four cannot be given to base_train"),
        (["--depths=1,0"], "--depths=1,0 cannot be given to base_train"),
        (["--table=/dev/null"], "--table=/dev/null cannot be written .it is a device.; name another file"),
        (["--table=nanochat"], "--table=nanochat cannot be written .it is a folder."),
        (["--table=no/folder/table.md"], "--table=no/folder/table.md cannot be written .No such file"),
        (["--more=--depht=4"], "--depht"),
        (["--more=--vocab_size=many"], "--vocab_size=many: expected a whole number"),
        (["--more=--seed=3 --out_dir=x"], "--more has out_dir, seed, which ablate decides for each training"),
        (["--more=--data='x"], "--more cannot be read: No closing quotation"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments, sentence, tmp_path):
    said = ablate(tmp_path, *arguments, status=2)
    assert re.search(sentence, said) and "Traceback" not in said


@pytest.mark.parametrize(
    "text",
    [
        "variants = {}",
        "settings = {}\nvariants = {}",
        "settings = {}\nvariants = {'a': 3}",
        "settings = {}\nvariants = {1: {}}",
        "settings = {}\nvariants = {'a': {'depth': 2}}",  # of two depths, both rows would be of one
        "settings = {'seed': 3}\nvariants = {'a': {}}",
        "settings = {}\nvariants = {'a': {'depht': 2}}",
        "settings = {}\nvariants = {'a': {'matrix_lr': {1, 2}}}",
        "settings = {'vocab_size': 'abc'}\nvariants = {'a': {}}",
        "settings = {}\nvariants = {'a': {'patch': 'gone.patch'}}",
        "settings = x",
        "(",
    ],
)
def test_a_list_that_is_none_is_one_sentence(text, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    said = ablate(tmp_path, f"--variants={tmp_path / 'mine.py'}", status=2)
    assert "mine.py" in said and "Traceback" not in said


def test_texts_named_relatively_with_commas_and_a_field_serve_the_variants_with_a_patch_too(tmp_path):
    """A patched variant is another working directory. Without vocab_size the tokenizer suits the text."""
    for name in "a", "b":
        lines = (json.dumps({"content": f"document {name}{i} " + "word and " * 30}) for i in range(200))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    patch = (ROOT / "experiments" / "variants" / "parts" / "rope-1k.patch").read_text()
    (tmp_path / "mine.patch").write_text(patch)
    (tmp_path / "mine.py").write_text(
        "settings = {}\nvariants = {'usual': {}, 'patched': {'patch': 'mine.patch'}}"
    )
    texts = ",".join(os.path.relpath(tmp_path / f"{name}.jsonl", ROOT) for name in "ab")
    more = f"--data={texts} --text_field=content --max_seq_len=32 --total_batch_size=128 --num_iterations=3"
    places = [f"--base_dir={tmp_path / 'base'}", "--table=none", "--depths=1", "--seeds=1", "--json"]
    done = python_m(["scripts.ablate", f"--variants={tmp_path / 'mine.py'}", f"--more={more}", *places], ROOT)
    assert done.returncode == 0, done.stderr
    assert [run["variant"] for run in results_of(done.stdout)] == ["usual", "patched"]


def test_a_training_that_fails_is_named_and_the_others_go_on(tmp_path):
    """33 tokens are no multiple of a row."""
    variants = {"usual": {}, "odd": {"total_batch_size": 33}, "twice": {"total_batch_size": 256}}
    (tmp_path / "mine.py").write_text(f"settings = {{}}\nvariants = {variants}")
    arguments = [f"--variants={tmp_path / 'mine.py'}", "--seeds=1", "--jobs=1"]
    done = python_m(command(tmp_path, *arguments), ROOT)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "odd, depth 1, seed 0: base_train failed" in done.stderr and "multiple of" in done.stderr
    assert "failed: odd, depth 1, seed 0. The same command" in done.stderr
    assert [row[3] for row in rows(tmp_path)] == ["usual", "twice"]


def test_a_training_that_a_signal_stops_is_named_and_goes_on_with_the_next_command(tmp_path):
    arguments = ["--variants=documents", "--seeds=1", "--jobs=1"]
    long = command(tmp_path, *arguments, more="--num_iterations=60 --eval_every=1")
    process = subprocess.Popen([sys.executable, "-m", *long], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    logs = tmp_path / "base" / "ablations" / "documents"
    deadline, metrics = time.monotonic() + 120, ()
    while time.monotonic() < deadline and not (metrics and metrics[0].stat().st_size):
        metrics = [*logs.glob("*/run/metrics.jsonl")]
        time.sleep(0.01)
    (lock,) = logs.glob("*/run/.lock")
    os.kill(int(re.search(r"\d+", lock.read_text())[0]), signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2 and "Traceback" not in said
    assert "depth 1, seed 0: base_train was stopped; its output ends with:" in said
    done = python_m(long, ROOT)
    assert done.returncode == 0, done.stderr
    assert [run["tokens"] for run in results_of(done.stdout)] == [60 * 128] * 2


PATCHES = sorted((ROOT / "experiments" / "variants").rglob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_every_patch_of_a_list_fits_the_sources_of_today(patch, tmp_path):
    shutil.copytree(ROOT / "nanochat", tmp_path / "nanochat")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(["git", "apply", patch], **how)
    assert done.returncode == 0, f"make it again with git diff: {done.stderr}"
    changed = [path for path in tmp_path.rglob("*.py") if path.read_text() != original(path, tmp_path)]
    for path in changed:
        compile(path.read_text(), path, "exec")
    assert changed


def original(path: Path, copied: Path) -> str:
    return (ROOT / path.relative_to(copied)).read_text()


def test_a_patch_that_no_longer_fits_is_refused_before_the_first_training(tree, tmp_path):
    packing = tree / "nanochat" / "data" / "packing.py"
    packing.write_text(packing.read_text().replace("def _cut(self", "def _split(self"))
    packing = ROOT / "experiments" / "variants" / "packing.py"
    output = ablate(tmp_path, f"--variants={packing}", status=2, root=tree)
    assert "a patch no longer fits the sources" in output and "Traceback" not in output
    assert not (tmp_path / "base").exists()
