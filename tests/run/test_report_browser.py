"""The report in a browser, if one is installed: it loads nothing, says nothing, and shows its charts."""

import math
import time

import pytest
from browser import BINARY, Browser
from test_report import SAMPLES, make_run, write_records
from test_report_page import NASTY, configure

from nanochat.run.report import comparison_page, elements, read_run, run_page, write_report

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed")


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


@pytest.mark.parametrize("name", ["report.html", "comparison.html"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_loads_nothing_says_nothing_and_fits_the_window(browser, folder, name, width):
    looked_at(browser, folder / name, width=width, dark=width == 390)
    assert browser.value("document.documentElement.scrollWidth") == width
    figures = "[...document.querySelectorAll('figure svg')]"
    assert browser.value(f"{figures}.every((s) => s.querySelector('path').getBBox().width)"), (
        "each chart is drawn"
    )


def test_a_page_follows_dark_mode_and_needs_no_javascript(browser, folder):
    colors = []
    for dark in (False, True):
        looked_at(browser, folder / "report.html", dark=dark, script=False)
        browser.call("Emulation.setScriptExecutionDisabled", value=False)  # to ask
        parts = "['#chart-loss svg path[stroke]', '#chart-loss svg text']"
        style = "(part) => JSON.stringify([getComputedStyle(document.querySelector(part)).stroke, "
        style += "getComputedStyle(document.querySelector(part)).fill])"
        colors.append(browser.value(f"{parts}.map({style})"))
    assert all(light != dark for light, dark in zip(*colors, strict=True))
    assert browser.value("document.querySelectorAll('#chart-loss tbody tr').length") > 5
    assert browser.value("document.querySelector('#samples details[open] pre').checkVisibility()")


def test_the_page_of_a_run_that_goes_on_reloads_itself_where_it_is(browser, folder, monkeypatch):
    monkeypatch.setattr(elements, "RELOAD_S", 1)
    path = folder / "running.html"
    page = run_page(read_run(folder), final=False)
    path.write_text(page, encoding="utf-8")
    looked_at(browser, path, width=390)
    browser.value("scrollTo(0, 800)")
    path.write_text(page.replace("<h1>", "<h1>now "), encoding="utf-8")
    end = time.monotonic() + 300
    again = "document.querySelector('h1')?.textContent.startsWith('now ') === true && scrollY == 800"
    while not browser.value(again):
        assert time.monotonic() < end, "the page does not reload, or not where it was"
        time.sleep(0.1)
