"""report.md and its plot: whole, readable, and with the samples as the model wrote them."""

import json
import os

import matplotlib.image
import pytest

from nanochat.run.metrics import Metrics
from nanochat.run.report import write_report

SAMPLES = [
    "def f(x):\n    return x",
    "A docstring:\n\n```python\nx = 1\n```\n\nand more",
    "# not a heading\n| not | a table |",
    "ends in a fence\n```",
    "````\nfour backticks\n````",
    "`````` six",
    "naïve ünïcode \ufffd 🐍",
]


def make_run(folder, steps=40, every=10, samples=(), plan=()):
    log = Metrics(folder)
    for step in range(steps):
        if step % every == 0:
            log.write({"step": step, "val_bpb": 3 - step / steps, "tokens": step * 512})
        log.write(
            {
                "step": step,
                "loss": 8.0 - step / 10,
                "step_time_s": 0.1 if step else 9.0,  # the first one compiles
                "data_wait_s": 0.001,
                "tok_per_sec": 5120 if step else 57,
                "mfu": 0.25 if step else 0.003,
                "tokens": (step + 1) * 512,
                "flops": (step + 1) * 10**9,
            }
        )
    log.write({"step": steps, "val_bpb": 1.23456, "tokens": steps * 512, "samples": samples})
    log.close()
    (folder / "config.json").write_text(json.dumps({"plan": plan}))


def fenced_blocks(markdown):
    """The contents of code blocks, by CommonMark's rule: closed by a fence at least as long as the first."""
    blocks, fence = [], ""
    for line in markdown.splitlines():
        ticks = len(line) - len(line.lstrip("`"))
        if not fence and ticks >= 3 and "`" not in line[ticks:]:
            fence, block = "`" * ticks, []
        elif fence and ticks >= len(fence) and not line[ticks:].strip():
            blocks.append("\n".join(block))
            fence = ""
        elif fence:
            block.append(line)
    assert not fence, "a code block is not closed"
    return blocks


def test_each_sample_is_in_a_code_block_of_its_own(tmp_path):
    make_run(tmp_path, samples=SAMPLES)
    write_report(tmp_path, final=True)
    blocks = fenced_blocks((tmp_path / "report.md").read_text(encoding="utf-8"))
    assert len(blocks) == len(SAMPLES)
    for block, sample in zip(blocks, SAMPLES, strict=True):
        if "````" not in sample:
            assert block == sample
        assert block.replace(" ", "") == sample.replace(" ", "")


def test_the_report_holds_title_plan_validation_and_what_the_run_did(tmp_path):
    (run := tmp_path / "Run d4").mkdir()
    make_run(run, samples=["x"], plan=["batch: 512 tokens", "dtype: float32"])
    write_report(run, final=True)
    text = (run / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Run d4\n")
    assert "- batch: 512 tokens\n- dtype: float32\n" in text
    assert "| 40 | 20,480 | 1.2346 |" in text  # the last evaluation, in the table
    assert "1.2346 bits per byte" in text and "![" in text and "(loss.png)" in text
    assert "| steps | 40 |" in text and "20,480" in text
    assert "100 ms, 5,120 tokens/s" in text and "25.0 %" in text  # of a typical step, not of the first
    assert "4.1500 nats" in text  # the mean of the last two of forty
    assert "still going on" not in text


def test_the_report_of_an_unfinished_run_says_so_and_is_rewritten(tmp_path):
    make_run(tmp_path, samples=["first words"])
    write_report(tmp_path, final=False)
    assert "still going on" in (tmp_path / "report.md").read_text(encoding="utf-8")
    log = Metrics(tmp_path)
    log.write({"step": 41, "samples": ["second words"]})
    log.close()
    write_report(tmp_path, final=True)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "first words" not in text and "second words" in text


def test_the_plot_is_a_png_with_something_on_it(tmp_path):
    make_run(tmp_path)
    write_report(tmp_path, final=True)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(tmp_path / "loss.png")
    assert pixels.shape[0] > 300 and pixels.shape[1] > 600
    reddish = (pixels[..., 0] > 0.7) & (pixels[..., 1] < 0.3)
    bluish = (pixels[..., 2] > 0.6) & (pixels[..., 0] < 0.4)
    assert reddish.sum() > 50 and bluish.sum() > 50  # validation, and the loss


def test_the_report_leaves_no_other_file_than_its_three(tmp_path):
    make_run(tmp_path, samples=SAMPLES)
    before = os.listdir(tmp_path)
    write_report(tmp_path, final=True)
    assert {path.name for path in tmp_path.iterdir()} == {*before, "loss.png", "report.md", "report.html"}


@pytest.mark.parametrize("fails_at", ["loss.png", "report.md", "report.html"])
def test_a_report_that_fails_leaves_the_one_before_and_says_so(tmp_path, monkeypatch, fails_at):
    make_run(tmp_path, samples=["old words"])
    write_report(tmp_path, final=False)
    before = {name: (tmp_path / name).read_bytes() for name in ("loss.png", "report.md", "report.html")}
    replace = os.replace

    def die(source, target):
        if os.path.basename(target) == fails_at:
            raise OSError("killed here")
        replace(source, target)

    monkeypatch.setattr(os, "replace", die)
    said = []
    write_report(tmp_path, final=True, say=said.append)
    assert len(said) == 1 and "no report" in said[0], "one line says why there is no report"
    assert (tmp_path / fails_at).read_bytes() == before[fails_at]
    assert b"old words" in (tmp_path / "report.md").read_bytes()


@pytest.mark.parametrize("records", [[], [{"step": 0, "val_bpb": 3.0, "tokens": 0}]])
def test_the_report_before_the_first_step_has_no_plot(tmp_path, records):
    log = Metrics(tmp_path)
    for record in records:
        log.write(record)
    log.close()
    write_report(tmp_path, final=False)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "No step" in text and "loss.png" not in text
    assert not (tmp_path / "loss.png").exists()


def test_steps_with_a_loss_that_is_not_a_number_are_left_out_of_the_report(tmp_path):
    make_run(tmp_path)
    log = Metrics(tmp_path)
    log.write({"step": 40, "loss": float("nan"), "step_time_s": 0.1})
    log.write({"step": 41, "val_bpb": float("nan"), "tokens": 1})
    log.close()
    write_report(tmp_path, final=True)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "nan" not in text.lower() and "None" not in text


def test_the_report_holds_task_scores_and_the_loss_by_position(tmp_path):
    make_run(tmp_path)
    log = Metrics(tmp_path)
    by_position = {"1-16": 4.25, "17-64": 3.5, "65-256": 3.0}
    scores = {
        "own_score": 0.125,
        "own_tasks": {"complete the | bracket": 0.75},
        "core": 0.25,
        "core_tasks": {"a": -0.5},
    }
    log.write({"step": 41, "val_bpb": 1.5, "tokens": 1, "loss_by_position": by_position, **scores})
    log.close()
    write_report(tmp_path, final=True)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| 1-16 | 4.2500 |\n| 17-64 | 3.5000 |\n| 65-256 | 3.0000 |" in text
    assert "| own tasks | 0.1250" in text and "| CORE | 0.2500" in text
    assert "| complete the \\| bracket | 75.0 % |\n| CORE: a | -50.0 % |" in text
