"""scripts.base_eval: its numbers are the run's, what it writes, and what it says about bad settings."""

import json
import shutil

import pytest
import torch
from bundles import write_bundle
from helpers import command, craft, records, run

from nanochat import UserError
from nanochat.checkpoint import checkpoints_in, open_checkpoint
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import Tokenizer
from nanochat.engine import load_for_inference
from nanochat.evals import bits_per_byte, core
from nanochat.evals.bundle import open_bundle
from nanochat.evals.tasks import cloze_tasks
from nanochat.machine import compiling, runtime


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """The folder of a finished run with evaluations after 3, 6 and 8 steps and checkpoints after 6 and 8."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    run(command(corpus, out, "--eval_every=3", "--sample_prompts=alpha|def"))
    assert sorted(checkpoints_in(out)) == [6, 8]
    return out


@pytest.fixture
def base_eval(corpus, run_script):
    """Runs the script; returns what it printed."""
    base = f"--base_dir={corpus.parent / 'base'}"
    return lambda *arguments: run_script("base_eval", base, *arguments).out


def evaluation_of_run(out, step):
    return next(r for r in records(out) if r["step"] == step and "val_bpb" in r)


def copied(trained, folder, config: bytes, **identity):
    """A copy of the last checkpoint with another config.json, and with more in its identity."""
    shutil.copytree(trained / "step_000008", folder)
    state = json.loads((folder / "state.json").read_text("utf-8"))
    state["identity"] |= identity
    craft(folder, {"config.json": config, "state.json": json.dumps(state).encode()})
    return folder


def written(folder, step):
    return json.loads((folder / f"base_eval_{step:06d}.json").read_text("utf-8"))


# ------------------------------------------------------------------------------------------------------
# Its numbers


def test_bits_per_byte_are_those_of_the_run_at_any_of_its_checkpoints(base_eval, trained, tmp_path):
    base_eval(f"--source={trained / 'step_000008'}", "--step=6", "--eval=bpb")
    copied = shutil.copytree(trained / "step_000008", tmp_path / "mine")  # gets its results itself
    printed = base_eval(f"--source={copied}", "--step=8", "--eval=bpb")
    for out, step in ((trained, 6), (copied, 8)):
        found, of_run = written(out, step), evaluation_of_run(trained, step)
        assert found["val_bpb"] == pytest.approx(of_run["val_bpb"], abs=1e-6)
        assert found["loss_by_position"] == pytest.approx(of_run["loss_by_position"], abs=1e-6)
        assert found["data"]["same_as_in_training"]
    assert f"Bits per byte: {of_run['val_bpb']:.6f}" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_its_samples_are_those_of_the_run(base_eval, trained):
    base_eval(f"--source={trained}", "--eval=sample")
    of_run = next(r["samples"] for r in records(trained) if r["step"] == 8 and "samples" in r)
    assert written(trained, 8)["samples"] == of_run and len(of_run) == 2


def test_its_scores_are_those_of_core(base_eval, trained, corpus, tmp_path):
    write_bundle(tmp_path / "bundle")
    printed = base_eval(f"--source={trained}", "--eval=core", f"--bundle={tmp_path / 'bundle'}")
    tasks = open_bundle(tmp_path / "bundle", tmp_path).tasks
    own = cloze_tasks(open_dataset(corpus, corpus / "val.parquet", base_dir=tmp_path), tmp_path)
    found, machine = open_checkpoint(trained / "step_000008"), runtime.start("cpu", 0)
    model = load_for_inference(found, machine.device, torch.float32)
    tokenizer, results = Tokenizer.load(found.path / "tokenizer.json"), written(trained, 8)
    expected = core.evaluate(model, tokenizer, tasks, torch.float32, machine)
    assert results["core_tasks"] == {task.label: task.centred(expected[task.label]) for task in tasks}
    assert results["core"] == pytest.approx(sum(results["core_tasks"].values()) / len(tasks))
    expected = core.evaluate(model, tokenizer, own, torch.float32, machine)
    assert results["own_tasks"] == expected
    assert results["own_score"] == pytest.approx(core.centred(own, expected)[1])
    for task in own:
        (line,) = [line for line in printed.splitlines() if line.startswith(f"| {task.label} ")]
        accuracy, _, centred, n = (float(cell) for cell in line.split("|")[2:-1])
        right = expected[task.label]
        assert (accuracy, centred, n) == (
            round(right, 3), round(task.centred(right), 3), len(task.examples)
        )  # fmt: skip


@pytest.mark.slow
def test_several_processes_give_the_same_numbers(trained, corpus, tmp_path):
    arguments = ["scripts.base_eval", f"--source={trained}", f"--base_dir={corpus.parent / 'base'}"]
    for processes in (1, 2):
        run([*arguments, f"--out_dir={tmp_path / str(processes)}"], processes=processes)
    one, two = (written(tmp_path / str(processes), 8) for processes in (1, 2))
    assert two["val_bpb"] == pytest.approx(one["val_bpb"], abs=1e-6)
    assert (two["own_tasks"], two["samples"], two["world_size"]) == (one["own_tasks"], one["samples"], 2)


@pytest.mark.slow
def test_an_untrained_model_guesses_and_a_trained_one_is_far_above_chance(base_eval, tmp_path):
    small = ["--depth=3", "--aspect_ratio=32", "--head_dim=32", "--max_seq_len=128", "--vocab_size=1024"]
    small += ["--device_batch_size=12", "--total_batch_size=1536", "--eval_tokens=60000", "--dtype=float32"]
    small += ["--compile=off", "--eval_every=-1"]
    scores = {}
    for steps, copying in ((1, "off"), (100, "on")):  # one step is enough to copy
        out, base = tmp_path / str(steps), f"--base_dir={tmp_path / 'base'}"
        own = [f"--copying={copying}", f"--num_iterations={steps}", f"--out_dir={out}", base]
        run(["scripts.base_train", *small, *own])
        base_eval(f"--source={out}", "--eval=bpb,core", base)
        scores[steps] = written(out, steps)["own_score"]
        of_run = evaluation_of_run(out, steps)["val_bpb"]
        assert written(out, steps)["val_bpb"] == pytest.approx(of_run, abs=1e-6)
    assert abs(scores[1]) < 0.12  # 4 standard errors of the mean of 8 tasks of 48 questions
    assert scores[100] > 0.12 + 0.1


# ------------------------------------------------------------------------------------------------------
# What it writes and says


def test_the_page_is_printed_and_written_beside_the_json(base_eval, trained, tmp_path):
    printed = base_eval(f"--source={trained}", "--eval=bpb, core,sample", f"--out_dir={tmp_path / 'new'}")
    page = (tmp_path / "new" / "base_eval_000008.md").read_text("utf-8")
    assert page in printed and printed.endswith("base_eval_000008.md and .json\n")
    assert "\n| " in page and "python -m scripts.download --name=core" in printed


def test_a_folder_that_cannot_be_written_costs_a_line_and_no_result(base_eval, trained, tmp_path):
    (tmp_path / "file").write_text("")
    printed = base_eval(f"--source={trained}", "--eval=bpb", f"--out_dir={tmp_path / 'file' / 'x'}")
    assert "## Bits per byte: " in printed and "the results are not written: " in printed


def test_other_text_is_scored_and_said_to_be_another(base_eval, trained, corpus, tmp_path):
    text = "a text of ours. " * 300
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "val.txt").write_text(text[:999])
    arguments = [f"--data={tmp_path / 'train.txt'}", f"--val_data={tmp_path / 'val.txt'}"]
    printed = base_eval(f"--source={trained}", "--eval=bpb", *arguments, f"--out_dir={tmp_path}")
    assert "not the run's" in printed and not written(tmp_path, 8)["data"]["same_as_in_training"]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--eval=bpb,speed", "eval has 'speed'; give any of bpb, core and sample"),
        ("--step=7", "has no checkpoint of step 7; there are: 6, 8"),
        ("--bundle=/no/such/bundle", "no evaluation bundle can be read at /no/such/bundle"),
        ("--data=/no/such/text", "data=/no/such/text does not exist"),
        ("--out_dir=~nobody-here/x", "begins with a user who is unknown here"),
    ],
)
def test_a_bad_setting_gets_one_sentence(base_eval, trained, argument, sentence):
    with pytest.raises(UserError) as error:
        base_eval(f"--source={trained}", argument)
    assert sentence in str(error.value)


def test_a_checkpoint_needs_no_more_than_its_model_to_be_scored(base_eval, trained, tmp_path):
    path = shutil.copytree(trained / "step_000008", tmp_path / "mine")
    state = json.loads((path / "state.json").read_text("utf-8"))
    craft(path, {"state.json": json.dumps({"identity": {"model": state["identity"]["model"]}}).encode()})
    assert "## Bits per byte: " in base_eval(f"--source={path}", "--eval=bpb")
    craft(path, {"state.json": b"{}"})
    with pytest.raises(UserError, match="holds no model that this nanochat knows"):
        base_eval(f"--source={path}", "--eval=bpb")


def test_a_compiled_run_is_scored_eager_on_a_machine_that_cannot_compile(
    base_eval, trained, tmp_path, monkeypatch
):
    path = shutil.copytree(trained / "step_000008", tmp_path / "mine")
    state = json.loads((path / "state.json").read_text("utf-8"))
    craft(path, {"state.json": json.dumps(state | {"resolved": {"compiled": True}}).encode()})
    given, scores = [], {"val_bpb": 1.0, "loss_by_position": {}}
    monkeypatch.setattr(bits_per_byte, "validate", lambda *rest: given.append(rest[5]) or scores)
    for missing in ("", "a compiler"):
        monkeypatch.setattr(compiling, "missing_to_compile", lambda device, missing=missing: missing)
        base_eval(f"--source={path}", "--eval=bpb")
    assert given == [True, False]


def test_text_that_is_gone_leaves_out_the_tasks_made_from_it_but_not_core(base_eval, trained, tmp_path):
    write_bundle(tmp_path / "bundle")
    arguments = [f"--source={trained}", f"--bundle={tmp_path / 'bundle'}", f"--out_dir={tmp_path}"]
    printed = base_eval(*arguments, "--eval=core", "--data=/no/such/text")
    assert "the validation text is left out, with the tasks and prompts made from it: data=/no" in printed
    assert "core" in written(tmp_path, 8) and "own_score" not in written(tmp_path, 8)


def test_a_run_of_mid_train_is_scored_on_text_ours_or_val_data_alone(base_eval, trained, tmp_path):
    config = json.dumps({"settings": {"data": {"value": "chats.jsonl"}, "seed": {"value": 7}}}).encode()
    base_eval(f"--source={copied(trained, tmp_path / 'mine', config, loss_on='all')}", "--eval=sample")
    found = written(tmp_path / "mine", 8)
    assert found["data"]["name"].startswith("embedded") and len(found["samples"]) == 3
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"a text of {name}. " * 30)
    texts = f"--val_data={tmp_path / 'one.txt'},{tmp_path / 'two.txt'}"
    printed = base_eval(f"--source={tmp_path / 'mine'}", "--eval=bpb", texts)
    found = written(tmp_path / "mine", 8)
    assert found["val_bpb"] != found["val_bpb_two"] and f"{found['val_bpb_two']:.6f}" in printed
    assert not found["data"]["same_as_in_training"] and "not the run's" in printed
