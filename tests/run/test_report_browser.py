"""The report in a browser, if one is installed: it loads nothing, says nothing, and its charts are live."""

import json
import math

import pytest
from browser import BINARY, Browser
from test_report import SAMPLES, make_run, write_records
from test_report_page import NASTY, configure

from nanochat.run.report import comparison_page, read_run, write_report

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed")
TICKS = "[...document.querySelectorAll('#chart-bpb svg text')].map((t) => t.textContent).join()"


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    make_run(folder, samples=[*NASTY, *SAMPLES])
    configure(folder)
    by_position = {"1-16": 4.25, "17-64": 3.5, "65-256": 3.0}
    write_records(
        folder,
        {"step": 40, "loss": math.nan, "skipped": 1, "spike": True, "tokens": 41 * 512},
        {"step": 0, "own_score": -0.1, "own_tasks": {NASTY[0]: -0.1}, "samples": ["after 0"]},
        {"step": 40, "own_score": 0.5, "own_tasks": {NASTY[0]: 0.5}, "samples": ["after 40"]},
        {"step": 41, "val_bpb": 1.0, "tokens": 41 * 512, "loss_by_position": by_position},
    )
    write_report(folder, final=True, say=pytest.fail)
    (folder / "comparison.html").write_text(comparison_page([read_run(folder)] * 3), encoding="utf-8")
    return folder


def looked_at(browser, path, **how):
    browser.look(**how)
    browser.open(path)
    assert [url for url in browser.requests if not url.startswith("data:")] == [path.as_uri()]
    assert browser.console == [], "the console is not silent"


def middle_of_the_loss(browser):
    """(x, y, width) of the middle of the chart of the loss, which is scrolled into the window."""
    browser.value("document.querySelector('#chart-loss').scrollIntoView()")
    box = "JSON.stringify(document.querySelector('#chart-loss svg').getBoundingClientRect())"
    box = json.loads(browser.value(box))
    return box["x"] + box["width"] / 2, box["y"] + 60, box["width"]


@pytest.mark.parametrize("name", ["report.html", "comparison.html"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_loads_nothing_says_nothing_and_fits_the_window(browser, folder, name, width):
    looked_at(browser, folder / name, width=width, dark=width == 390)
    assert browser.value("document.documentElement.scrollWidth") == width
    figures = "[...document.querySelectorAll('figure svg')]"
    assert browser.value(f"{figures}.every((s) => s.querySelector('path.line'))"), "each chart is drawn"


def test_a_page_without_javascript_has_a_picture_of_the_loss_tables_and_samples(browser, folder):
    looked_at(browser, folder / "report.html", script=False)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)  # to ask; the page's script did not run
    assert browser.value("document.querySelector('noscript img').naturalWidth") > 600
    assert browser.value("document.querySelectorAll('#chart-loss tbody tr').length") > 5
    assert browser.value("document.querySelector('.sample-set[open] pre').checkVisibility()")


def test_values_follow_the_pointer_and_the_axis_can_be_switched(browser, folder):
    looked_at(browser, folder / "report.html")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {r["step"]: r["loss"] for r in records if "loss" in r}
    where = "document.querySelector('#chart-bpb .where').textContent"
    x, y, _ = middle_of_the_loss(browser)
    browser.mouse("mouseMoved", x, y)
    step = int(browser.value(where).removeprefix("step "))
    shown = float(browser.value("document.querySelector('#chart-loss .value').textContent"))
    assert 10 < step < 30 and shown == pytest.approx(losses[step], rel=1e-3)
    browser.value("document.querySelector('[data-axis=tokens]').click()")
    browser.mouse("mouseMoved", x + 1, y)
    assert browser.value(where).endswith(" tokens")
    browser.value("document.querySelector('[data-axis=step]').click()")
    assert browser.console == []


def test_a_drag_zooms_all_charts_and_the_keys_move_and_reset(browser, folder):
    looked_at(browser, folder / "report.html")
    whole = browser.value(TICKS)
    x, y, width = middle_of_the_loss(browser)
    for kind, share in (("mousePressed", -0.1), ("mouseMoved", 0), ("mouseReleased", 0.1)):
        browser.mouse(kind, x + share * width, y, button="left", buttons=1, clickCount=1)
    assert browser.value(TICKS) != whole
    browser.value("document.querySelector('#chart-loss svg').focus()")
    browser.key("ArrowLeft")
    said = browser.value("document.querySelector('#chart-loss svg').getAttribute('aria-valuetext')")
    assert said.startswith("step ") and "loss " in said
    browser.key("Escape")
    assert browser.value(TICKS) == whole and browser.console == []


def test_the_slider_goes_through_the_samples_in_time(browser, folder):
    looked_at(browser, folder / "report.html")
    texts = "[...document.querySelectorAll('.sample-set pre')].filter((p) => p.checkVisibility())"
    shown = f"{texts}.map((p) => p.textContent)"
    assert browser.value(shown) == ["after 40"]
    browser.value("document.querySelector('#travel-input').focus()")
    browser.key("Home")
    assert browser.value(shown) == ["after 0"] and browser.console == []
