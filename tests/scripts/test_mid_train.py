"""Mid-training: conversations in, a model that answers out, with pretraining's promises kept."""

import json
import random
import re
import shutil
import time

import pytest
from helpers import (
    ROOT,
    Process,
    assert_same_run,
    command,
    conversation,
    craft,
    insert,
    losses,
    multiply_loss,
    records,
    run,
    run_tree,
    wait_for_step,
    wait_until,
)

import configurator
from nanochat import checkpoint


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("base") / "run"
    # At width 32 the rule's rate for the head, 24 times the setting, makes rounding large in a few steps
    more = ["--max_seq_len=64", "--total_batch_size=512", "--eval_every=-1", "--unembedding_lr=0.0008"]
    run(command(corpus, out, *more))
    return out


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A folder with three files of conversations."""
    folder, draw = tmp_path_factory.mktemp("chats"), random.Random(0)
    for name, count in {"one": 60, "two": 60, "val": 8}.items():
        words = draw.choices(["alpha", "beta", "gamma", "delta", "print"], k=count)
        answers = [" ".join([word] * draw.randint(1, 8)) for word in words]
        lines = [conversation(f"say {word} {i}", answers[i]) for i, word in enumerate(words)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def mid(base, chats, out, *more):
    data = f"--data={chats / 'one.jsonl'}:0.4,{chats / 'two.jsonl'}:0.2"  # two steps an epoch
    val_data = f"--val_data={chats / 'val.jsonl'},{chats / 'two.jsonl'}"
    return [
        "scripts.mid_train", f"--source={base}", data, val_data,
        f"--out_dir={out}", "--loss_on=assistant", "--num_iterations=8", "--dtype=float32", "--compile=off",
        "--save_every=3", "--eval_every=4", "--sample_every=-1", "--eval_questions=3",
        "--device_batch_size=2", "--total_batch_size=384", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(base, chats, tmp_path_factory):
    out = tmp_path_factory.mktemp("mid") / "run"
    return out, run(mid(base, chats, out))


def test_a_run_leaves_what_others_rely_on(undisturbed):
    out, printed = undisturbed
    steps = [r for r in records(out) if "loss" in r]
    assert [r["step"] for r in steps] == list(range(8))
    assert all(0 < r["targets"] < r["tokens"] for r in steps)
    evaluated = {r["step"]: r for r in records(out) if "val_bpb" in r}
    assert list(evaluated) == [0, 4, 8] and evaluated[8]["val_bpb"] < evaluated[0]["val_bpb"]
    assert all(0 <= r["exact_match"] <= 1 and r["val_bpb_two"] > 0 for r in evaluated.values())
    plan = json.loads((out / "config.json").read_text())["plan"]
    assert any("0.3 x the base run's" in line for line in plan) and "the answers" in printed
    assert "'say " in printed, "what it was taught to answer"
    assert "warning" in printed and "has seen only" in printed  # a base model of 8 steps
    assert (out / "step_000008" / "model.safetensors").exists() and (out / "report.md").exists()


def test_a_run_that_was_killed_goes_on_with_the_losses_of_one_never_killed(
    base, chats, undisturbed, tmp_path
):
    out = tmp_path / "run"
    process = Process(mid(base, chats, out))
    wait_for_step(process, out, 4)  # past the checkpoint at 3
    process.kill()
    process.wait()
    assert "going on from" in run(mid(base, chats, out, "--profile=7"))
    assert_same_run(out, undisturbed[0])
    assert (out / "profile_7.json.gz").exists()


@pytest.mark.parametrize(("processes", "rows"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_other_processes_and_micro_batches_give_the_same_losses(
    base, chats, undisturbed, tmp_path, processes, rows
):
    run(mid(base, chats, tmp_path / "run", f"--device_batch_size={rows}"), processes=processes)
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed[0]), abs=1e-4)


@pytest.mark.slow
def test_a_run_killed_at_10_random_moments_equals_an_undisturbed_one_bit_for_bit(base, chats, tmp_path):
    long = ["--num_iterations=3000", "--warmdown_ratio=0", "--save_every=20", "--eval_every=-1"]
    draw, out = random.Random(3), tmp_path / "killed"
    for _ in range(10):
        process = Process(mid(base, chats, out, *long))
        before = checkpoint.newest_in_words(out)
        wait_until(lambda before=before: checkpoint.newest_in_words(out) != before, process)
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        assert process.wait() == -9, "it ended before the last kill"
    newest = max(checkpoint.checkpoints_in(out))
    end = [f"--num_iterations={newest + 5}", "--warmdown_ratio=0", "--save_every=20", "--eval_every=-1"]
    run(mid(base, chats, out, *end))
    run(mid(base, chats, tmp_path / "calm", *end))
    assert_same_run(out, tmp_path / "calm")


def test_an_overflow_in_float16_is_skipped_and_training_goes_on(base, chats, tree, tmp_path):
    multiply_loss(tree, "1e30 if step == 3 else 1", script="mid_train")
    out = tmp_path / "run"
    run_tree(tree, mid(base, chats, out, "--dtype=float16", "--eval_every=-1"))
    steps = [r for r in records(out) if "loss" in r]
    assert [r["skipped"] for r in steps] == [0, 0, 0, 1, 1, 1, 1, 1]
    scales = [r["loss_scale"] for r in steps]
    assert scales[4] < scales[2] and all(r["loss"] < 7 for r in steps)


def test_the_rate_falls_linearly_and_muons_momentum_with_it(base, chats, tree, tmp_path):
    momenta = "[g['betas'][0] for g in optimizer.param_groups if g.get('method') == 'muon']"
    insert(tree, at_step_end=f"print('momenta', {momenta})", script="mid_train")
    more = ["--warmup_steps=0", "--warmdown_ratio=0.5", "--final_lr_frac=0", "--eval_every=-1"]
    printed = run_tree(tree, mid(base, chats, tmp_path / "run", *more))
    rates = [r["lr_multiplier"] for r in records(tmp_path / "run") if "loss" in r]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    found = [json.loads(line) for line in re.findall(r"^momenta (.+)$", printed, re.MULTILINE)]
    assert len(found) == 8
    for rate, momenta in zip(rates, found, strict=True):
        assert momenta and all(momentum == pytest.approx(0.85 + 0.1 * rate) for momentum in momenta)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_losses_are_near_those_of_float32(base, chats, undisturbed, tmp_path, dtype):
    run(mid(base, chats, tmp_path / "run", f"--dtype={dtype}", "--eval_every=-1"))
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed[0]), rel=5e-3)


def test_the_optimizer_state_of_the_base_run_can_be_taken_over(base, chats, undisturbed, tmp_path):
    more = ["--num_iterations=3", "--optimizer_state=base", "--eval_every=-1"]
    run(mid(base, chats, tmp_path / "run", *more))
    fresh, taken = losses(undisturbed[0]), losses(tmp_path / "run")
    assert taken[0] == fresh[0] and taken[2] != fresh[2]


@pytest.mark.parametrize(
    ("part", "name", "sentence"),
    [
        ("identity", "total_batch_size", "give --total_batch_size"),
        ("resolved", "rates", "does not say its learning rates"),
    ],
)
def test_a_base_checkpoint_that_lacks_something_is_a_sentence(base, chats, tmp_path, part, name, sentence):
    crafted = tmp_path / "crafted"
    shutil.copytree(base / "step_000008", crafted)
    state = json.loads((crafted / "state.json").read_text())
    del state[part][name]
    craft(crafted, {"state.json": json.dumps(state).encode()})
    more = ["--total_batch_size=-1", f"--source={crafted}"]
    assert sentence in run(mid(base, chats, tmp_path / "run", *more), status=2)


def test_what_a_finished_run_says_to_give_is_a_setting_of_the_script(base, chats, undisturbed):
    out, _ = undisturbed
    said = run(mid(base, chats, out)).partition("finished already")[2]
    given = set(re.findall(r"--(\w+)", said))
    assert given and given <= configurator.defaults(ROOT / "scripts" / "mid_train.py").keys()


def test_show_prints_the_conversations_with_their_targets(base, chats, tmp_path):
    printed = run(mid(base, chats, tmp_path / "run", "--show=2"))
    assert printed.count("<|bos|><|user_start|>say ") == 2 and "\x1b[32m" in printed
    assert not (tmp_path / "run").exists()


def test_other_conversations_in_the_same_folder_are_refused_and_nothing_is_lost(base, chats, undisturbed):
    out, _ = undisturbed
    before = (out / "metrics.jsonl").read_bytes()
    said = run(mid(base, chats, out, f"--data={chats / 'two.jsonl'}"), status=2)
    assert "data was" in said and "--accept=data" in said
    assert (out / "metrics.jsonl").read_bytes() == before


def test_the_base_model_is_not_set_aside_by_a_run_of_its_own_name(base, chats, undisturbed):
    out, _ = undisturbed
    said = run(mid(base, chats, out, f"--source={out}", "--resume=never"), status=2)
    assert "--model_tag" in said and "damaged" not in said
    assert checkpoint.find(out).step == 8 and not out.with_name("run.old-1").exists()
