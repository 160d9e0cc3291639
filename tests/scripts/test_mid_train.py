"""Mid-training: conversations in, a model that answers out, with pretraining's promises kept."""

import json
import random
import shutil

import pytest
from helpers import ROOT, command, losses, records, run

FORMATS = ("messages", "minimind")


def conversation(kind, question, answer):
    turns = [("user", question), ("assistant", answer)]
    if kind == "messages":
        return {"messages": [{"role": role, "content": content} for role, content in turns]}
    extra = {"reasoning_content": "", "tools": "", "tool_calls": ""}
    return {"conversations": [{"role": role, "content": content} | extra for role, content in turns]}


def write(path, kind, count, seed):
    draw = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "print"]
    rows = [conversation(kind, f"say {w} {i}", " ".join([w] * draw.randint(1, 8))) for i, w in
            enumerate(draw.choices(words, k=count))]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("base") / "run"
    run(command(corpus, out, "--max_seq_len=64", "--total_batch_size=512", "--eval_every=-1"))
    return out


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    for seed, kind in enumerate(FORMATS):
        write(folder / f"{kind}.jsonl", kind, 60, seed)
    write(folder / "val.jsonl", "messages", 8, 9)
    return folder


def mid(base, chats, out, *more):
    data = f"--data={chats / 'messages.jsonl'}:2,{chats / 'minimind.jsonl'}:0.5"
    return [
        "scripts.mid_train", f"--source={base}", data, f"--val_data={chats / 'val.jsonl'}",
        f"--out_dir={out}", "--loss_on=assistant", "--num_iterations=8", "--dtype=float32", "--compile=off",
        "--save_every=3", "--eval_every=4", "--sample_every=-1", "--eval_questions=3",
        "--device_batch_size=2", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(base, chats, tmp_path_factory):
    out = tmp_path_factory.mktemp("mid") / "run"
    return out, run(mid(base, chats, out))


def test_both_formats_train_and_leave_what_a_run_leaves(undisturbed):
    out, printed = undisturbed
    steps = [r for r in records(out) if "loss" in r]
    assert [r["step"] for r in steps] == list(range(8))
    assert all(0 < r["targets"] < r["tokens"] for r in steps)
    evaluated = {r["step"]: r for r in records(out) if "val_bpb" in r}
    assert list(evaluated) == [0, 4, 8] and evaluated[8]["val_bpb"] < evaluated[0]["val_bpb"]
    assert all(0 <= r["exact_match"] <= 1 for r in evaluated.values())
    assert "0.3 x the base run's" in printed and "the answers" in printed
    assert (out / "step_000008" / "model.safetensors").exists() and (out / "report.md").exists()


def test_a_run_started_again_has_the_losses_of_one_never_stopped(base, chats, undisturbed, tmp_path):
    expected = losses(undisturbed[0])
    out = tmp_path / "run"
    shutil.copytree(undisturbed[0], out)
    shutil.rmtree(out / "step_000008")
    assert "going on from" in run(mid(base, chats, out))
    assert losses(out) == expected


def test_two_processes_and_other_micro_batches_give_the_losses_of_one(base, chats, undisturbed, tmp_path):
    expected = losses(undisturbed[0])
    for number, (processes, rows) in enumerate([(1, 8), (2, 1)]):
        out = tmp_path / str(number)
        run(mid(base, chats, out, f"--device_batch_size={rows}"), processes=processes)
        assert losses(out) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_losses_are_near_those_of_float32(base, chats, undisturbed, tmp_path, dtype):
    run(mid(base, chats, tmp_path / "run", f"--dtype={dtype}", "--eval_every=-1"))
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed[0]), rel=5e-3)


def test_show_prints_the_conversations_with_their_targets(base, chats, tmp_path):
    printed = run(mid(base, chats, tmp_path / "run", "--show=2"))
    assert printed.count("<|bos|><|user_start|>say ") == 2 and "\x1b[32m" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--source=nowhere"], "no checkpoint at nowhere"),
        (["--data=nowhere.jsonl"], "does not exist"),
        (["--total_batch_size=100"], "total_batch_size 100 is not a multiple"),
        (["--num_epochs=0"], "num_epochs"),
    ],
)
def test_bad_settings_end_in_one_sentence_and_status_2(base, chats, tmp_path, more, sentence):
    assert sentence in run(mid(base, chats, tmp_path / "run", *more), status=2)


def test_other_conversations_in_the_same_folder_are_refused_and_nothing_is_lost(base, chats, undisturbed):
    out, _ = undisturbed
    before = (out / "metrics.jsonl").read_bytes()
    said = run(mid(base, chats, out, f"--data={chats / 'minimind.jsonl'}"), status=2)
    assert "data was" in said and "--accept=data" in said
    assert (out / "metrics.jsonl").read_bytes() == before


def test_the_two_training_scripts_read_as_siblings():
    """Between Build and Finish, most lines of mid_train.py stand in base_train.py too."""
    texts = [(ROOT / "scripts" / name).read_text("utf-8") for name in ("base_train.py", "mid_train.py")]
    pretraining, midtraining = (
        {line.strip() for line in text.split("# Restore")[1].split("\n")} for text in texts
    )
    assert len(midtraining & pretraining) > 0.6 * len(midtraining)
