"""EleutherAI's lm-evaluation-harness, the real program, against scripts/base_eval on the same files."""

import json
import os
import random
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
from exporting import TOKENIZER, export, make_model, save
from helpers import ROOT, run


def lines(path: Path, objects):
    path.write_text("".join(json.dumps(value) + "\n" for value in objects), encoding="utf-8")


def loss(model, text: str, last: int) -> float:
    """The loss of the last so many tokens of a text."""
    ids = torch.tensor([[TOKENIZER.bos_id, *TOKENIZER.encode(text).tolist()]])
    return F.cross_entropy(model(ids)[0, -1 - last : -1], ids[0, -last:]).item()


def write_tasks(folder: Path, model) -> Path:
    """A copy of runs/lm_eval with another text and other questions, whose choices have two tokens each. Their
    right answers are those that the model finds most likely."""
    draw = random.Random(0)
    letters = [a for a in string.ascii_lowercase if len(TOKENIZER.encode(f" {a}")) == 2]

    def words(n):
        return " ".join("".join(draw.choices("abcé東🙂", k=draw.randint(1, 6))) for _ in range(n))

    def question():
        query, choices = words(draw.randint(1, 9)), draw.sample(letters, 4)
        losses = [loss(model, f"{query} {choice}", last=2) for choice in choices]
        return {"query": query, "choices": choices, "gold": losses.index(min(losses))}

    shutil.copytree(ROOT / "runs" / "lm_eval", folder)
    lines(folder / "eval_data" / "questions.jsonl", [question() for _ in range(40)])
    lines(folder / "text.jsonl", [{"text": words(draw.randint(1, 12))} for _ in range(20)])
    return folder


def results_of_lm_eval(model: Path, tasks: Path, cwd: Path) -> dict:
    command = ["-m", "lm_eval", "--model=hf", "--include_path", str(tasks), "--tasks=ours", "--device=cpu"]
    command += [f"--model_args=pretrained={model},trust_remote_code=True,add_bos_token=False"]
    command += ["--batch_size=8", "--output_path=out.json"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "cache")}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, text=True, capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = cwd.glob("out*.json")
    return json.loads(path.read_text())["results"]


@pytest.mark.slow
def test_lm_eval_gives_the_scores_of_base_eval(tmp_path):
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    model = make_model()
    checkpoint, tasks = save(tmp_path / "run", model), write_tasks(tmp_path / "runs" / "lm_eval", model)
    text, other = tasks / "text.jsonl", tmp_path / "other.jsonl"
    lines(other, [{"text": "training text, which no evaluation reads"}])
    of_base_eval = [f"--bundle={tasks}", f"--val_data={text}", f"--data={other}", f"--base_dir={tmp_path}"]
    run(["scripts.base_eval", f"--source={checkpoint}", "--eval=bpb,core", "--dtype=float32", *of_base_eval])
    ours = json.loads((checkpoint / "base_eval_000007.json").read_text())
    theirs = results_of_lm_eval(export(checkpoint, tmp_path / "exported"), tasks, tmp_path)
    assert theirs["ours::ours_questions"]["acc,none"] == ours["core_tasks"]["questions"] == 1
    assert theirs["ours::ours_text"]["bits_per_byte,none"] == pytest.approx(ours["val_bpb"], rel=1e-5)
