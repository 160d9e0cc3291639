"""The report in a browser, if one is installed: it loads nothing, says nothing, and its charts are live."""

import json
import math

import pytest
from browser import BINARY, Browser
from test_report import SAMPLES, make_run
from test_report_page import NASTY, configure

from nanochat.run.metrics import Metrics
from nanochat.run.report import comparison_page, read_run, write_page, write_report

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed")
READOUT = "document.querySelector('#chart-loss .value').textContent"
WHERE = "document.querySelector('#chart-bpb .where').textContent"


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    make_run(folder, samples=[*NASTY, *SAMPLES])
    configure(folder)
    log = Metrics(folder)
    log.write({"step": 40, "loss": math.nan, "skipped": 1, "spike": True, "tokens": 41 * 512})
    by_position = {"1-16": 4.25, "17-64": 3.5, "65-256": 3.0}
    for step, score in ((0, -0.1), (40, 0.5)):
        log.write(
            {"step": step, "own_score": score, "own_tasks": {NASTY[0]: score}, "samples": [f"after {step}"]}
        )
    log.write({"step": 41, "val_bpb": 1.0, "tokens": 41 * 512, "loss_by_position": by_position})
    log.close()
    write_report(folder, final=True, say=pytest.fail)
    write_page(folder / "comparison.html", comparison_page([read_run(folder)] * 3))
    return folder


def looked_at(browser, path, **how):
    browser.look(**how)
    browser.open(path)
    assert browser.requests == [path.as_uri()], "it loads something"
    assert browser.console == [], "the console is not silent"


@pytest.mark.parametrize("name", ["report.html", "comparison.html"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_loads_nothing_says_nothing_and_fits_the_window(browser, folder, name, width):
    looked_at(browser, folder / name, width=width, dark=width == 390)
    assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.value("[...document.querySelectorAll('figure svg')].every((s) => s.clientWidth > 200)")
    colour = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colour[4:-1].split(","))) < 3 * 64) == (width == 390), "dark where dark is asked for"


def test_a_page_without_javascript_has_its_charts_and_samples(browser, folder):
    looked_at(browser, folder / "report.html", script=False)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)  # to ask; the page's script did not run
    assert browser.value("document.querySelectorAll('svg path.line').length") >= 5
    assert browser.value("document.querySelector('#controls').hidden")
    assert browser.value("document.querySelector('.sample-set[open] pre').checkVisibility()")


def test_values_follow_the_pointer_and_the_axis_can_be_switched(browser, folder):
    looked_at(browser, folder / "report.html")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {r["step"]: r["loss"] for r in records if "loss" in r}
    browser.value("document.querySelector('#chart-loss').scrollIntoView()")
    box = json.loads(
        browser.value("JSON.stringify(document.querySelector('#chart-loss svg').getBoundingClientRect())")
    )
    browser.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + 60)
    step = int(browser.value(WHERE).removeprefix("step "))
    assert abs(step - 20) < 3 and float(browser.value(READOUT)) == pytest.approx(losses[step], rel=1e-3)
    browser.value("document.querySelector('[data-axis=tokens]').click()")
    browser.mouse("mouseMoved", box["x"] + box["width"] / 2 + 1, box["y"] + 60)
    assert browser.value(WHERE).endswith(" tokens")
    browser.value("document.querySelector('[data-axis=step]').click()")
    assert browser.console == []


def test_a_drag_zooms_all_charts_and_the_keys_move_and_reset(browser, folder):
    looked_at(browser, folder / "report.html")
    browser.value("document.querySelector('#chart-loss').scrollIntoView()")
    box = json.loads(
        browser.value("JSON.stringify(document.querySelector('#chart-loss svg').getBoundingClientRect())")
    )
    ticks = "[...document.querySelectorAll('#chart-bpb svg text')].map((t) => t.textContent).join()"
    whole = browser.value(ticks)
    for kind, share in (("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseReleased", 0.6)):
        pressed = {"button": "left", "buttons": 1, "clickCount": 1}
        browser.mouse(kind, box["x"] + share * box["width"], box["y"] + 60, **pressed)
    assert browser.value(ticks) != whole
    browser.value("document.querySelector('#chart-loss svg').focus()")
    browser.key("ArrowLeft")
    said = browser.value("document.querySelector('#chart-loss svg').getAttribute('aria-valuetext')")
    assert said.startswith("step ") and "loss, smoothed " in said
    browser.key("Escape")
    assert browser.value(ticks) == whole and browser.console == []


def test_the_slider_goes_through_the_samples_in_time(browser, folder):
    looked_at(browser, folder / "report.html")
    texts = "[...document.querySelectorAll('.sample-set pre')].filter((p) => p.checkVisibility())"
    shown = f"{texts}.map((p) => p.textContent)"
    assert browser.value(shown) == ["after 40"]
    browser.value("document.querySelector('#travel-input').focus()")
    browser.key("Home")
    assert browser.value(shown) == ["after 0"] and "after 0 steps" in browser.value(
        "document.querySelector('#travel output').value"
    )
    assert browser.console == []
