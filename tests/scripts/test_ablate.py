"""Ablations: each variant is trained once for each seed and depth, and a stopped command goes on."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, Process, insert, python_m, wait_until

TINY = "--max_seq_len=32 --vocab_size=300 --total_batch_size=128 --eval_tokens=500 --dtype=float32"


def command(folder: Path, *arguments: str, more: str = "--num_iterations=3") -> list[str]:
    """The script on a small text in `folder`, with one layer."""
    texts = folder / "texts.jsonl"
    lines = (json.dumps(f"document {i} " + "word and word " * (i % 90)) for i in range(400))
    texts.write_text("\n".join(lines))
    os.utime(texts, (1, 1))  # the same file for every command
    more = f"--more={TINY} --data={texts} {more}"
    places = [f"--base_dir={folder / 'base'}", f"--table={folder / 'table.md'}"]
    return ["scripts.ablate", "--json", "--depths=1", more, *places, *arguments]


def ablate(folder: Path, *arguments: str, status: int = 0, root: Path = ROOT) -> str:
    """Run the script and return what it printed."""
    done = python_m(command(folder, *arguments), root)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr if status else done.stdout


def variants(folder: Path, listed: dict | str) -> str:
    """A list of one's own, as an argument."""
    text = listed if isinstance(listed, str) else f"settings = {{}}\nvariants = {listed}"
    (folder / "mine.py").write_text(text)
    return f"--variants={folder / 'mine.py'}"


def results_of(output: str) -> list[dict]:
    return json.loads(output.splitlines()[-1])["results"]


def rows(folder: Path) -> list[dict[str, str]]:
    lines = (folder / "table.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


# Stands at the top of base_train in a copy of the sources: a training that takes no time. Its loss depends on
# the settings and on the sources of the model.
STAND_IN = """
def stand_in():
    import hashlib, json, pathlib, sys

    given = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
    out, _ = pathlib.Path(given.pop("out_dir")), given.pop("base_dir")
    model = pathlib.Path(__file__).parents[1] / "nanochat" / "gpt.py"
    made_of = model.read_text() + json.dumps(given, sort_keys=True)
    loss = int(hashlib.sha256(made_of.encode()).hexdigest()[:6], 16) / 2**24
    steps = int(given["num_iterations"])
    step = {"step": steps, "tokens": steps * int(given["total_batch_size"])}
    records = step | {"loss": loss, "step_time_s": 0.1}, step | {"val_bpb": 1 + loss}
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in records))
    sys.exit()

if __name__ == "__main__":
    stand_in()
"""


@pytest.fixture
def stand_in(tree) -> Path:
    script = tree / "scripts" / "base_train.py"
    script.write_text(STAND_IN + script.read_text())
    return tree


def test_variants_are_compared_at_each_depth_and_what_has_a_result_is_not_trained_again(stand_in, tmp_path):
    mine = variants(tmp_path, {"usual": {}, "fast": {"matrix_lr": 0.2}, "left out": {}})
    arguments = [mine, "--seeds=1", "--depths=1,2,1", "--only=fast"]
    first = results_of(ablate(tmp_path, *arguments, root=stand_in))
    trained = [("usual", 1), ("fast", 1), ("usual", 2), ("fast", 2)]  # the baseline is among them
    assert [(run["variant"], run["depth"]) for run in first] == trained
    assert len({run["val_bpb"] for run in first}) == 4 and all(run["tokens"] == 3 * 128 for run in first)
    table = rows(tmp_path)
    assert [(row["variant"], int(row["depth"])) for row in table] == trained
    assert all(row["list"].startswith("mine, ") and "num_iterations=3" in row["list"] for row in table)
    assert {row["verdict"] for row in table} == {"baseline", "one seed"}

    path = tmp_path / "table.md"
    path.write_text(path.read_text().rstrip("\n"))  # an editor has saved it
    ablate(tmp_path, mine, "--seeds=1", root=stand_in)
    assert [row["variant"] for row in rows(tmp_path)][4:] == ["left out"]

    (stopped,) = (tmp_path / "base" / "ablations" / "mine").glob("fast-d2-*")
    (stopped / "ablation.json").unlink()
    (stopped / "run" / "metrics.jsonl").unlink()
    output = ablate(tmp_path, *arguments, root=stand_in)
    assert results_of(output) == first and output.count("seed 0: ") == 1


def test_a_settings_file_counts_whatever_its_name_is(stand_in, tmp_path):
    (stand_in / "default.py").write_text("num_iterations = 2\n")
    more = f"--more={TINY} --data={tmp_path / 'texts.jsonl'} default.py"
    (result,) = results_of(
        ablate(tmp_path, variants(tmp_path, {"usual": {}}), "--seeds=1", more, root=stand_in)
    )
    assert result["settings"]["num_iterations"] == 2 and result["tokens"] == 2 * 128


def test_a_result_of_other_sources_does_not_count(stand_in, tmp_path):
    arguments = [variants(tmp_path, {"usual": {}}), "--seeds=1"]
    (before,) = results_of(ablate(tmp_path, *arguments, root=stand_in))
    with open(stand_in / "nanochat" / "gpt.py", "a") as model:
        model.write("\nQK_SCALE = 1.5\n")
    (after,) = results_of(ablate(tmp_path, *arguments, root=stand_in))
    assert before["val_bpb"] != after["val_bpb"]
    assert results_of(ablate(tmp_path, *arguments, root=stand_in)) == [after]


@pytest.fixture
def repository(tree) -> tuple[Path, str]:
    """The sources in a git repository of their own, and the name of their commit."""

    def git(*arguments):
        own = ["git", "-c", "user.name=me", "-c", "user.email=me@here", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return subprocess.run(
            own, cwd=tree, env=environment, check=True, capture_output=True, text=True
        ).stdout

    (tree / "nanochat" / "part.py").write_text("number = 1\n")
    with open(tree / "nanochat" / "__init__.py", "a") as package:
        package.write("\nfrom nanochat import part\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=a start")
    return tree, git("rev-parse", "--short", "HEAD").strip()


PATCH = """\
--- a/nanochat/part.py
+++ b/nanochat/part.py
@@ -1 +1 @@
-number = 1
+number = 2
"""


@pytest.mark.parametrize("first_line", ["Fits commit 0123456", "Fits commit COMMIT"])
def test_a_patch_that_does_not_fit_its_commit_is_refused_before_the_first_training(
    repository, tmp_path, first_line
):
    tree, commit = repository
    wrong = PATCH.replace("-number = 1", "-number = 3")
    (tmp_path / "mine.patch").write_text(f"{first_line.replace('COMMIT', commit)}\n{wrong}")
    listed = variants(tmp_path, {"usual": {}, "patched": {"patch": "mine.patch"}})
    said = ablate(tmp_path, listed, status=2, root=tree)
    assert "does not fit" in said and not (tmp_path / "base").exists()


def test_more_seeds_add_to_the_results_of_fewer_and_are_compared_in_pairs(stand_in, tmp_path):
    arguments = [variants(tmp_path, {"usual": {}, "fast": {"matrix_lr": 0.2}}), "--seeds=1"]
    first = results_of(ablate(tmp_path, *arguments, root=stand_in))
    output = ablate(tmp_path, *arguments, "--seeds=3", root=stand_in)
    assert output.count("seed 0: ") == 0 and output.count("seed 1: ") == 2
    results = results_of(output)
    assert results[:2] == first
    assert len({run["loss"] for run in results}) == 6
    differences = [results[i + 1]["val_bpb"] - results[i]["val_bpb"] for i in (0, 2, 4)]
    mean, _, error = rows(tmp_path)[-1]["difference"].partition(" ± ")
    assert float(mean) == pytest.approx(sum(differences) / 3, abs=6e-5)
    spread = sum((d - sum(differences) / 3) ** 2 for d in differences) / 2
    assert float(error) == pytest.approx((spread / 3) ** 0.5, abs=6e-5)


@pytest.mark.slow
def test_a_stopped_command_goes_on_where_every_training_was(tree, tmp_path):
    slow = tmp_path / "slow"  # while this file is there, a step takes a second
    slow.touch()
    insert(tree, at_step_end=f"import os\ntime.sleep(os.path.exists({str(slow)!r}))")
    mine = variants(tmp_path, {"usual": {}, "fast": {"matrix_lr": 0.2}})
    arguments = [mine, "--seeds=1", "--jobs=2"]
    long = command(tmp_path, *arguments, more="--num_iterations=100")
    process = Process(long, tree)
    logs = tmp_path / "base" / "ablations" / "mine"
    # Before a training has a line it has nothing to save
    begun = "*/run/metrics.jsonl"
    wait_until(lambda: sum(path.stat().st_size > 0 for path in logs.glob(begun)) == 2, process)
    second = python_m(long, tree)
    assert second.returncode == 2 and "is in use by process" in second.stderr
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert len([*logs.glob("*/run/step_*")]) == 2 and not [*logs.glob("*/ablation.json")]
    slow.unlink()
    done = python_m(long, tree)
    assert done.returncode == 0, done.stderr
    assert all("going on from" in path.read_text() for path in logs.glob("*/log.txt"))
    assert all(run["tokens"] == 100 * 128 for run in results_of(done.stdout))
    assert not [*logs.glob("*/run/step_*")]  # no checkpoint is left


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants=nothing"], "nothing.py .* give --variants"),
        (["--only=nothing"], "--only names nothing; the list has whole row"),
        (["--depths=four"], "--depths=four cannot be given"),
        (["--table=no/folder/table.md"], "--table=no/folder/table.md cannot be written"),
        (["--more=--seed=3 --out_dir=x"], "--more has out_dir, seed"),
        (["--more=--data='x"], "--more cannot be read"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments, words, tmp_path):
    assert re.search(words, ablate(tmp_path, *arguments, status=2))


@pytest.mark.parametrize(
    "text",
    [
        "settings = {}\nvariants = {}",
        "settings = {}\nvariants = {'a': {'depth': 2}}",  # of two depths, both rows would be of one
        "settings = {}\nvariants = {'a': {'depht': 2}}",
        "settings = {}\nvariants = {'a': {'patch': 'gone.patch'}}",
        "(",
    ],
)
def test_a_list_that_is_none_is_one_sentence(text, tmp_path):
    assert "mine.py" in ablate(tmp_path, variants(tmp_path, text), status=2)


def test_a_variant_with_a_patch_and_its_baseline_have_the_commit_that_it_names_and_the_texts_of_today(
    repository, tmp_path
):
    """The texts are named relatively, with a comma and a field, and the tokenizer suits them. Two variants
    share a patch, which knows their names."""
    tree, commit = repository
    (tree / "nanochat" / "gpt.py").write_text("raise SystemExit('the sources of today')\n")
    for name in "a", "b":
        lines = (json.dumps({"content": f"document {name}{i} " + "word and " * 30}) for i in range(200))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    note = f"import os; open({str(tmp_path)!r} + '/' + os.environ['VARIANT'], 'w')"
    patch = PATCH.replace("number = 2", note)
    (tmp_path / "mine.patch").write_text(f"Fits commit {commit}\n{patch}")
    texts = ",".join(os.path.relpath(tmp_path / f"{name}.jsonl", tree) for name in "ab")
    more = f"--data={texts} --text_field=content --max_seq_len=32 --total_batch_size=128 --num_iterations=3"
    table = f"--table={tmp_path / 'table.md'}"
    places = [f"--base_dir={tmp_path / 'base'}", table, "--depths=1", "--seeds=1", "--json"]
    listed = {"usual": {}, "one": {"patch": "mine.patch"}, "two": {"patch": "mine.patch"}}
    mine = variants(tmp_path, listed)
    done = python_m(["scripts.ablate", mine, f"--more={more}", *places], tree)
    assert done.returncode == 0, done.stderr
    assert [run["variant"] for run in results_of(done.stdout)] == ["usual", "one", "two"]
    assert [row["commit"] for row in rows(tmp_path)] == [commit] * 3
    assert [(tmp_path / name).exists() for name in ("usual", "one", "two")] == [False, True, True]


@pytest.mark.slow
def test_a_training_that_fails_is_named_and_the_others_go_on(tmp_path):
    """33 tokens are no multiple of a row."""
    listed = {"usual": {}, "odd": {"total_batch_size": 33}, "twice": {"total_batch_size": 256}}
    said = ablate(tmp_path, variants(tmp_path, listed), "--seeds=1", "--jobs=1", status=2)
    assert "odd, depth 1, seed 0: base_train failed" in said and "multiple of" in said
    assert "failed: odd, depth 1, seed 0" in said
    assert [row["variant"] for row in rows(tmp_path)] == ["usual", "twice"]
