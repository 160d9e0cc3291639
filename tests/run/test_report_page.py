"""report.html and the comparison of runs: what the page says, and that nothing in a folder can break it."""

import json
import math
import re
import shlex
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import SAMPLES, make_run

import configurator
from nanochat import UserError
from nanochat.run.metrics import Metrics, read_metrics
from nanochat.run.report import (
    comparison_page,
    curves,
    find_run,
    read_run,
    recipe,
    run_page,
    svg,
    write_report,
)
from nanochat.run.report.comparison import unique_names
from nanochat.run.report.markdown import markdown

NASTY = [
    "</script><script>alert(1)</script>", "<!--<script>", "]]></style><img src=x onerror=alert(1)>",
    '" onload="x', "\u2028\u202e\x00\x1b[31m \ud800", "&lt;b&gt;",
]  # fmt: skip
SETTINGS = {
    "depth": {"value": 4, "source": "command line"},
    "data": {"value": "it's; rm -rf $HOME `x`\n", "source": "runs/a.py:3"},
    "run": {"value": "dummy", "source": "default"},
    "out_dir": {"value": "/tmp/x", "source": "command line"},
    "grad_clip": {"value": 1.0, "source": "command line"},  # given, and the same as the default
}


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text in them."""

    def __init__(self, content: str):
        super().__init__()
        self.elements, self.text, self.inside = [], "", []
        self.scripts, self.pre = [], []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)
        if tag in ("script", "pre"):
            getattr(self, {"script": "scripts", "pre": "pre"}[tag]).append("")

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self.inside:
            self.scripts[-1] += data
        elif "style" not in self.inside:
            self.text += data
            if "pre" in self.inside:
                self.pre[-1] += data

    def names(self):
        return [tag for tag, _ in self.elements]


def page_of(folder, final=True):
    run = read_run(folder)
    assert markdown(run, final)
    return Page(run_page(run, final).encode(errors="replace").decode())


def configure(folder, **more):
    identity = {"model": {"depth": 4, "width": 192}, "seed": 42, "data": "f00d"}
    derived = {"num_iterations": 40, "parameters": 4_915_400, "data_tokens": 40_960}
    facts = {"settings": SETTINGS, "identity": identity, "derived": derived, "device": "AMD EPYC, 2 cores"}
    (folder / "config.json").write_text(json.dumps(facts | more), encoding="utf-8")


def test_the_page_shows_the_run_at_a_glance_and_how_to_repeat_it(tmp_path):
    make_run(tmp_path, samples=SAMPLES)
    configure(tmp_path)
    page = page_of(tmp_path)
    for words in ("1.2346", "depth 4, width 192", "0.5 epochs", "25.0 %", "5,120", "AMD EPYC", "finished"):
        assert words in re.sub(r"\s+", " ", page.text)
    assert [text for text in page.pre if "base_train" not in text] == SAMPLES
    figures = {attributes["id"] for tag, attributes in page.elements if tag == "figure"}
    assert figures >= {"chart-loss", "chart-bpb", "chart-speed", "chart-wait"}
    labels = [attributes["aria-label"] for tag, attributes in page.elements if tag == "svg"]
    assert (
        "Training loss, nats per token: loss, smoothed goes from 8 at step 0 to 4.1 at step 39" in labels[0]
    )


def test_the_page_names_no_address_and_runs_one_script_by_checksum(tmp_path):
    make_run(tmp_path, samples=SAMPLES)
    content = run_page(read_run(tmp_path), final=True)
    outside = content.replace("http://www.w3.org/2000/svg", "")  # a name, which is not fetched
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\((?!#)", outside)
    page = Page(content)
    policy = next(
        a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    assert page.names().count("script") == 2  # the data and the script
    assert not any(name.startswith("on") or name == "style" for _, a in page.elements for name in a)


@pytest.mark.parametrize("nasty", NASTY)
def test_no_text_of_a_folder_breaks_out_of_the_page(tmp_path, nasty):
    make_run(tmp_path, samples=[nasty], plan=[f"{nasty}: {nasty}"])
    calm = page_of(tmp_path).names()
    versions, settings = {nasty: nasty}, {"data": {"value": nasty, "source": nasty}, nasty: {"value": 1}}
    configure(tmp_path, device=nasty, versions=versions, plan=[nasty], settings=settings, git_commit=nasty)
    log = Metrics(tmp_path)
    log.write({"step": 41, "own_score": 0.5, "own_tasks": {nasty: 0.5}, "tokens": 1, "val_bpb": 1.0})
    log.write({"step": 42, "val_bpb": 1.0, "loss_by_position": {nasty: 1.0, "1-16": 2.0}})
    log.close()
    page = page_of(tmp_path)
    assert set(page.names()) <= {
        *calm,
        "th",
        "table",
        "thead",
        "tbody",
        "td",
        "tr",
        "caption",
        "progress",
        "button",
    }
    assert page.names().count("script") == 2 and "img" not in page.names()
    assert json.loads(page.scripts[0])["axes"]


def test_a_page_of_a_run_that_goes_on_reloads_itself_and_one_of_a_finished_run_does_not(tmp_path):
    make_run(tmp_path)
    configure(tmp_path)
    for final in (False, True):
        page = page_of(tmp_path, final=final)
        reloads = [a for tag, a in page.elements if tag == "meta" and a.get("http-equiv") == "refresh"]
        assert json.loads(page.scripts[0])["running"] is (not final) and len(reloads) == (not final)


def test_a_run_that_was_stopped_early_says_so(tmp_path):
    make_run(tmp_path)
    configure(tmp_path, derived={"num_iterations": 400})
    text = page_of(tmp_path).text
    assert "stopped" in text and "40 of 400 steps" in text


WRONG = [None, True, 1e400, "x", [], {}, [[1]], {"a": {"b": 1}}, 10**400]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_values_of_a_wrong_type_count_as_missing(tmp_path, wrong):
    make_run(tmp_path)
    names = ["settings", "identity", "derived", "plan", "versions", "device", "git_commit", "world_size"]
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(names, wrong)))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        for name in ("loss", "val_bpb", "own_score", "samples", "core"):
            more = dict.fromkeys(
                ["tokens", "train_time_s", "own_tasks", "loss_by_position", "skipped"], wrong
            )
            file.write(json.dumps({"step": 50, name: wrong, **more}) + "\n")
            file.write(json.dumps({"step": wrong, name: 1.0}) + "\n")
    page = page_of(tmp_path)
    assert "1.2346" in page.text and not re.search(r"\bnan\b|\binf\b", page.text)
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    assert "1.2346" in page_of(tmp_path).text


def test_damaged_lines_are_named_and_the_rest_is_read(tmp_path):
    make_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    lines[5:5] = [b'{"step": 3, "loss": ', b'{"step": "3", "loss": 1.0}', b"[" * 200_000]
    path.write_bytes(b"\n".join([*lines, b'{"step": 99, "loss": 1.0}']))  # the last line is not whole
    said, expected = [], [r for r in read_metrics(path) if "loss" in r]
    run = read_run(tmp_path, said.append)
    assert [re.search(r"line (\d+)", line)[1] for line in said] == ["6", "7", "8"]
    assert run.steps["step"].tolist() == [r["step"] for r in expected] == list(range(40))
    for column in ("loss", "tok_per_sec", "mfu"):
        assert run.steps[column].tolist() == [r[column] for r in expected]


@given(st.lists(st.sampled_from([
    {"step": 1, "loss": 2.5, "spike": True, "tokens": 7}, {"step": 2, "loss": None}, {"step": 3, "loss": 1},
    {"step": 4, "loss": "x"}, {"step": 2**70, "loss": 1.0}, {"loss": 1.0}, {"step": 5, "val_bpb": 2.0},
    {"step": 6, "samples": ['a "loss": 1']}, {"step": 7, "own_score": 0.1, "own_tasks": {"loss": 1}}, {}, [],
])))  # fmt: skip
def test_reading_in_blocks_equals_reading_line_by_line(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    good = [r for r in records if isinstance(r, dict) and type(r.get("step")) is int and r["step"] < 2**53]
    steps = sorted((r for r in good if "loss" in r), key=lambda r: r["step"])
    bad = len(records) - len(steps) - sum("val_bpb" in r or "samples" in r or "own_score" in r for r in good)
    said = []
    run = read_run(folder, said.append)
    assert run.steps["step"].tolist() == [r["step"] for r in steps] and len(said) == bad
    numbers = [r["loss"] if isinstance(r["loss"], int | float) else math.nan for r in steps]
    np.testing.assert_array_equal(run.steps["loss"], numbers)
    assert [r["step"] for r in run.evals] == [5] * len(run.evals) and len(run.samples) == sum(
        "samples" in r for r in good
    )


def test_a_file_that_is_too_long_is_read_to_its_limit(tmp_path, monkeypatch):
    make_run(tmp_path)
    monkeypatch.setattr("nanochat.run.report.run_data.BLOCK_BYTES", 1000)
    monkeypatch.setattr("nanochat.run.report.run_data.MAX_METRICS_BYTES", 3000)
    said = []
    run = read_run(tmp_path, said.append)
    assert 5 < run.num_steps < 40 and len(said) == 1 and "too long" in said[0]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_nothing_is_read_through_a_link(tmp_path, name):
    (other := tmp_path / "other").mkdir()
    make_run(other)
    (run := tmp_path / "run").mkdir()
    make_run(run)
    (run / name).unlink()
    (run / name).symlink_to(other / name)
    said = []
    if name == "metrics.jsonl":
        write_report(run, final=True, say=said.append)
        assert not (run / "report.html").exists()
    else:
        read_run(run, said.append)
    assert len(said) == 1 and "link" in said[0]


# ------------------------------------------------------------------------------------------------------
# Curves

values = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=60)


@given(values, st.integers(1, 20))
def test_thinned_curves_keep_minimum_maximum_and_mean_of_each_bin(numbers, most):
    starts = curves.bins(len(numbers), most)
    assert starts[0] == 0 and len(starts) == min(len(numbers), most)
    low, high, mean = curves.thin(np.array(numbers), starts)
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], len(numbers)], strict=True)):
        inside = [v for v in numbers[start:end] if not math.isnan(v)]
        if inside:
            expected = (min(inside), max(inside), sum(inside) / len(inside))
            assert (low[i], high[i], mean[i]) == pytest.approx(expected, rel=1e-5, abs=1e-3)
        else:
            assert low[i] is high[i] is mean[i] is None


@given(st.integers(1, 400))
def test_a_smoothed_curve_is_the_mean_of_neighbours(length):
    numbers = np.sin(np.arange(length)) * 3
    numbers[::7] = math.nan
    half = min(length // 60, 50)
    for i, got in enumerate(curves.smooth(numbers)):
        near = [v for v in numbers[max(0, i - half) : i + half + 1] if not math.isnan(v)]
        assert got == pytest.approx(sum(near) / len(near)) if near else math.isnan(got)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_inside_and_few(low, span, most):
    ticks = svg.nice_ticks(low, low + span, most)
    margin = 1e-6 * span + 1e-9 * abs(low)
    assert len(ticks) <= most + 1 and all(low - margin <= t <= low + span + margin for t in ticks)


@given(st.lists(st.none() | st.floats(-1e299, 1e299), min_size=1, max_size=9), st.booleans())
def test_a_chart_of_any_numbers_is_drawn(numbers, log):
    xs = {"a": {"step": list(range(len(numbers)))}}
    curve = curves.Curve("a", "a", numbers, low=numbers, high=numbers, dots=True)
    drawn = svg.draw(curves.Chart("id", "title", "unit", [curve], log=log, marks=[("spike", 0)]), xs, "words")
    assert not re.search(r"nan|inf", drawn) and drawn.count("<circle") == sum(v is not None for v in numbers)


def test_spikes_and_skipped_steps_are_marked_where_they_are(tmp_path):
    make_run(tmp_path)
    log = Metrics(tmp_path)
    log.write({"step": 40, "loss": 9.0, "spike": True, "skipped": 0})
    log.write({"step": 41, "loss": math.nan, "spike": False, "skipped": 1})
    log.write({"step": 42, "loss": 4.0, "spike": False, "skipped": 1})
    log.close()
    run = read_run(tmp_path)
    assert curves.marks(run, curves.bins(43)) == [("spike", 40), ("skipped", 41)]
    assert curves.marks(run, curves.bins(43, 10)) == [("spike", 9), ("skipped", 9)]


def test_an_evaluation_without_a_time_of_its_own_gets_that_of_the_steps_before_it(tmp_path):
    log = Metrics(tmp_path)
    for step in range(4):
        log.write({"step": step, "loss": 1.0, "tokens": 10 * (step + 1), "train_time_s": 2.0 * (step + 1)})
    for step in (0, 2, 4):
        log.write({"step": step, "val_bpb": 1.0})
    log.write({"step": 4, "val_bpb": 1.0, "train_time_s": 99.0})
    log.close()
    run = read_run(tmp_path)
    found = curves.x_of_records(run, run.evals)
    assert found == {"step": [0, 2, 4, 4], "tokens": [0, 20, 40, 40], "time": [0, 4, 8, 99]}


# ------------------------------------------------------------------------------------------------------
# Settings, and several runs


def test_the_command_gives_back_every_setting_that_was_given(tmp_path):
    make_run(tmp_path)
    configure(tmp_path)
    words = shlex.split(recipe.command(read_run(tmp_path)))
    assert words[:3] == ["python", "-m", "scripts.base_train"]
    assert words[3:-1] == ["--depth=4", f"--data={SETTINGS['data']['value']}", "--grad_clip=1.0"]
    assert words[-1].startswith("--model_tag=") and words[-1].endswith("-again")
    configure(tmp_path, world_size=8)
    assert recipe.command(read_run(tmp_path)).startswith(
        "torchrun --standalone --nproc_per_node=8 -m scripts"
    )


def test_a_setting_that_was_given_its_default_does_not_differ(tmp_path):
    make_run(tmp_path)
    configure(tmp_path)
    defaults = recipe.defaults_of("scripts.base_train")
    assert defaults["depth"] == 20 and defaults == configurator.defaults("scripts/base_train.py")
    assert list(recipe.changed_settings(read_run(tmp_path), defaults)) == ["depth", "data", "out_dir"]


def test_a_run_of_mid_train_is_shown_beside_its_own_defaults_and_made_again_by_it(tmp_path):
    make_run(tmp_path)
    given = {"loss_on": {"value": "all", "source": "command line"}}
    configure(tmp_path, settings=given | {"data": {"value": "embedded", "source": "command line"}})
    run = read_run(tmp_path)
    assert recipe.command(run).startswith("python -m scripts.mid_train --loss_on=all ")
    defaults = recipe.defaults_of(recipe.script_of(run))
    assert defaults == configurator.defaults("scripts/mid_train.py")
    assert list(recipe.changed_settings(run, defaults)) == ["loss_on"]


def test_a_comparison_shows_each_run_and_only_what_differs(tmp_path):
    runs = []
    for name, depth in (("one", 4), ("two", 6), ("three", 6)):
        (folder := tmp_path / name).mkdir()
        make_run(folder, samples=NASTY)
        configure(folder, settings=SETTINGS | {"depth": {"value": depth, "source": "command line"}})
        runs.append(read_run(folder))
    page = Page(comparison_page(runs))
    data = json.loads(page.scripts[0])
    loss = next(chart for chart in data["charts"] if chart["id"] == "chart-loss")
    assert [curve["name"] for curve in loss["curves"]] == ["one", "two", "three"]
    assert all(len(data["x"][c["group"]]["tokens"]) == len(c["y"]) == 40 for c in loss["curves"])
    differs = page.text.partition("What differs")[2]
    assert "depth" in differs and "grad_clip" not in differs
    assert page.names().count("script") == 2


def test_runs_with_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = []
    for name in ("a/d4", "b/d4"):
        (tmp_path / name).mkdir(parents=True)
        make_run(tmp_path / name)
        runs.append(read_run(tmp_path / name))
    assert unique_names(runs) == ["a/d4", "b/d4"]
    assert len(set(unique_names([runs[0], runs[0]]))) == 2


def test_a_run_is_found_by_folder_or_tag_and_else_a_sentence_says_what_there_is(tmp_path):
    (tmp_path / "base_checkpoints" / "d4").mkdir(parents=True)
    assert find_run("d4", tmp_path) == tmp_path / "base_checkpoints" / "d4"
    assert find_run(str(tmp_path), tmp_path) == tmp_path
    with pytest.raises(UserError, match=r"there is no run d5; .*: d4"):
        find_run("d5", tmp_path)
    with pytest.raises(UserError, match="has no metrics"):
        read_run(tmp_path)


def test_a_price_per_hour_gives_the_cost(tmp_path):
    make_run(tmp_path)
    log = Metrics(tmp_path)
    log.write({"step": 40, "loss": 1.0, "train_time_s": 7200.0, "step_time_s": 1.0})
    log.close()
    assert "cost" not in Page(run_page(read_run(tmp_path), True)).text
    assert "5.00" in Page(run_page(read_run(tmp_path), True, price_per_hour=2.5)).text
