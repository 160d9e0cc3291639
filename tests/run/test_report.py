"""A run's folder is read as it is, damaged or not, and gets its report.html, report.md and loss.png."""

import json
import math
import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.run.metrics import Metrics
from nanochat.run.report import charts, elements, summary, write_report
from nanochat.run.report.pages import run_page
from nanochat.run.report.run_data import read_run

SAMPLES = [
    "def f(x):\n    return x",
    "A docstring:\n\n```python\nx = 1\n```\n\nand more",
    "# not a heading\n| not | a table |",
    "ends in a fence\n```",
    "````\nfour backticks\n````",
    "`````` six",
    "naïve ünïcode \ufffd 🐍",
]
FILES = ["loss.png", "report.html", "report.md"]


def write_records(folder, *records):
    log = Metrics(folder)
    for record in records:
        log.write(record)
    log.close()


def make_run(folder, samples=(), plan=()):
    records, steps = [], 40
    for step in range(steps):
        if step % 10 == 0:
            records.append({"step": step, "val_bpb": 3 - step / steps, "tokens": step * 512})
        record = {"step": step, "loss": 8.0 - step / 10, "data_wait_s": 0.001, "tokens": (step + 1) * 512}
        record |= {"flops": (step + 1) * 10**9, "train_time_s": 9 + 0.1 * step}
        speed = {"step_time_s": 0.1, "tok_per_sec": 5120, "mfu": 0.25}
        compiles = {"step_time_s": 9.0, "tok_per_sec": 57, "mfu": 0.003}
        records.append(record | (speed if step else compiles))
    records.append({"step": steps, "val_bpb": 1.23456, "tokens": steps * 512, "samples": samples})
    write_records(folder, *records)
    (folder / "config.json").write_text(json.dumps({"plan": plan}))


def report_of(folder, final=True) -> str:
    """The report.md that a run's folder gets."""
    write_report(folder, final, say=pytest.fail)
    return (folder / "report.md").read_text(encoding="utf-8")


def test_the_report_holds_title_plan_results_scores_and_samples(tmp_path):
    (run := tmp_path / "Run d4").mkdir()
    make_run(run, samples=SAMPLES, plan=["batch: 512 tokens", "dtype: float32"])
    scores = {"own_score": 0.125, "own_tasks": {"complete the | bracket": 0.75}}
    scores |= {"core": 0.25, "core_tasks": {"a": -0.5}}
    write_records(
        run, {"step": 40, "loss_by_position": {"1-16": 4.25, "17-64": 3.5}, "val_bpb": 1.5} | scores
    )
    before = os.listdir(run)
    text = report_of(run)
    unpadded = re.sub(" +", " ", text)
    assert text.startswith("# Run d4\n") and "- batch: 512 tokens\n- dtype: float32\n" in text
    for cells in (
        ("40", "20,480", "1.2346"), ("validation", "1.5000"), ("steps", "40"), ("training loss", "4.1000"),
        ("MFU", "25.0 %"), ("tokens per second", "5,120"), ("own tasks", "0.125"), ("CORE", "0.250"),
        ("1-16", "4.2500"), ("complete the \\| bracket", "75.0 %"), ("a", "-50.0 %"),
    ):  # fmt: skip
        assert any(line.startswith(f"| {' | '.join(cells)}") for line in unpadded.splitlines()), cells
    blocks = re.findall(r"^````text\n(.*?)\n````$", text, re.DOTALL | re.MULTILINE)
    assert [b.replace(" ", "") for b in blocks] == [s.replace(" ", "") for s in SAMPLES]
    assert all(b == s for b, s in zip(blocks, SAMPLES, strict=True) if "````" not in s)
    assert "(loss.png)" in text and (run / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(os.listdir(run)) == sorted([*before, *FILES])


def test_the_report_of_an_unfinished_run_says_so_and_is_rewritten(tmp_path):
    make_run(tmp_path, samples=["first words"])
    assert "still going on" in report_of(tmp_path, final=False)
    write_records(tmp_path, {"step": 41, "samples": ["second words"]})
    text = report_of(tmp_path)
    assert "first words" not in text and "second words" in text and "still going on" not in text


@pytest.mark.parametrize("fails_at", FILES)
def test_a_report_that_fails_leaves_the_one_before_and_says_so(tmp_path, monkeypatch, fails_at):
    make_run(tmp_path, samples=["old words"])
    report_of(tmp_path, final=False)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    replace, said = os.replace, []

    def die(source, target):
        if os.path.basename(target) == fails_at:
            raise OSError("killed here")
        replace(source, target)

    monkeypatch.setattr(os, "replace", die)
    for final in False, True:
        write_report(tmp_path, final, say=said.append)
    assert len(said) == 2 and all("no report" in line and "killed here" in line for line in said)
    assert "the next evaluation tries" in said[0] and "scripts.report tries" in said[1]
    assert (tmp_path / fails_at).read_bytes() == before[fails_at]
    assert sorted(os.listdir(tmp_path)) == sorted(before)


@pytest.mark.parametrize("records", [[], [{"step": 0, "val_bpb": 3.0, "tokens": 0}]])
def test_the_report_before_the_first_step_has_no_plot(tmp_path, records):
    write_records(tmp_path, *records)
    assert "before its first step" in (text := report_of(tmp_path, final=False))
    assert "loss.png" not in text and not (tmp_path / "loss.png").exists()


# -- Reading


def test_damaged_lines_are_named_and_the_rest_is_read(tmp_path):
    make_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    lines[5:5] = [b'{"step": 3, "loss": ', b'{"step": "3", "loss": 1.0}', b"[" * 200_000, b"[]"]
    lines[9:9] = [b"x" * 5 * 2**20]
    path.write_bytes(b"\n".join([*lines, b'{"step": 99, "loss": 1.0}']))  # the last line is not whole
    said = []
    run = read_run(tmp_path, said.append)
    assert len(said) == 1 and "(6, 7, 8, 9, 10, 11)" in said[0]  # the longest counts as two lines
    assert run.steps["step"].tolist() == list(range(40))
    assert [r["step"] for r in run.evals] == [0, 10, 20, 30, 40]
    assert run.steps["loss"].tolist() == [8.0 - step / 10 for step in range(40)]
    assert run.steps["mfu"].tolist() == [0.003] + 39 * [0.25]


@pytest.mark.parametrize("wrong", [None, True, "x", [[1]], {"a": {"b": 1}}, 10**400, 1e299], ids=range(7))
def test_values_of_a_wrong_type_count_as_missing(tmp_path, wrong, monkeypatch):
    make_run(tmp_path)
    names = ["settings", "identity", "derived", "plan", "versions", "device", "git_commit", "world_size"]
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(names, wrong)))
    more = ["tokens", "train_time_s", "own_tasks", "loss_by_position", "skipped", "progress"]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        for name in ("loss", "val_bpb", "own_score", "samples", "core"):
            file.write(json.dumps({"step": 50, name: wrong} | dict.fromkeys(more, wrong)) + "\n")
            file.write(json.dumps({"step": wrong, name: 1.0}) + "\n")
    report_of(tmp_path)
    monkeypatch.setattr(elements, "svg", lambda chart: "")  # once is enough
    for config in (None, json.dumps(wrong), "{"):
        if config:
            (tmp_path / "config.json").write_text(config)
        run = read_run(tmp_path)
        text = summary.markdown(run, True)
        assert re.search(r"\| validation +\| +1\.2346", text)
        assert not re.search(r"\bnan\b|\binf\b|None", text + run_page(run, True))


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_nothing_is_read_through_a_link(tmp_path, name):
    said = []
    for folder in ("other", "run"):
        (tmp_path / folder).mkdir()
        make_run(tmp_path / folder)
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to(tmp_path / "other" / name)
    if name == "metrics.jsonl":
        write_report(tmp_path / "run", final=True, say=said.append)
        assert not (tmp_path / "run" / "report.html").exists()
    else:
        assert read_run(tmp_path / "run", said.append).config == {}
    assert len(said) == 1 and "link" in said[0]


def test_what_is_left_comes_from_progress_in_a_run_of_minutes_and_from_steps_in_others(tmp_path):
    step = {"step": 49, "loss": 1.0, "train_time_s": 30.0}
    for derived, progress, share, left in (
        ({"num_iterations": 100}, {}, 0.5, 30),
        ({"num_iterations": 100}, {"progress": 0.49}, 0.5, 30),
        ({"num_iterations": 51, "minutes": 2}, {"progress": 0.25}, 0.25, 90),
        ({"num_iterations": 51, "minutes": 2}, {}, None, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"derived": derived}))
        (tmp_path / "metrics.jsonl").write_text(json.dumps(step | progress) + "\n")
        run = read_run(tmp_path)
        assert (run.share_done, summary.time_left(run)) == (share, left)
        write_records(tmp_path, {"step": 50, "val_bpb": 1.0} | progress)
        assert not read_run(tmp_path).is_complete
        derived |= {} if "minutes" in derived else {"num_iterations": 50}
        (tmp_path / "config.json").write_text(json.dumps({"derived": derived}))
        write_records(tmp_path, {"step": 50, "val_bpb": 1.0, "progress": 1.0})
        assert read_run(tmp_path).is_complete


# -- Curves

values = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=60)


@given(values, st.integers(1, 20))
def test_thinned_curves_keep_the_extremes_and_the_last_value_of_each_bin(numbers, most):
    ends = charts.bin_ends(len(numbers), most)
    assert ends[-1] == len(numbers) - 1 and len(ends) == min(len(numbers), most)
    y, low, high = charts.step_curve(np.array(numbers), ends)
    for i, (start, end) in enumerate(zip([0, *ends[:-1] + 1], ends, strict=True)):
        inside = [v for v in numbers[start : end + 1] if not math.isnan(v)]
        assert (low[i], high[i]) == (
            (min(inside), max(inside)) if inside else pytest.approx((math.nan,) * 2, nan_ok=True)
        )
        assert y[i] == pytest.approx(numbers[end], nan_ok=True, abs=1e-6)


@given(st.integers(1, 400))
def test_a_smoothed_curve_is_the_mean_of_neighbours_and_a_spike_changes_no_value_far_from_it(length):
    numbers = np.sin(np.arange(length)) * 3
    numbers[::7] = math.nan
    numbers[length // 3] = 1e25
    half = charts.window(length)
    for i, got in enumerate(charts.smooth(numbers)):
        near = [v for v in numbers[max(0, i - half) : i + half + 1] if not math.isnan(v)]
        assert got == pytest.approx(sum(near) / len(near)) if near else math.isnan(got)


def test_spikes_and_skipped_steps_are_marked_where_they_are(tmp_path):
    make_run(tmp_path)
    write_records(
        tmp_path,
        {"step": 40, "loss": 9.0, "spike": True, "skipped": 0},
        {"step": 41, "loss": math.nan, "spike": False, "skipped": 1},
        {"step": 42, "loss": 4.0, "spike": False, "skipped": 1},
    )
    run = read_run(tmp_path)
    assert charts.marks(run) == {charts.SPIKE: [40], charts.SKIPPED: [41]}
