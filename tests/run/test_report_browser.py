"""The report in a browser, if one is installed: it fits the window, and draws its charts in both modes."""

import json
import math
import re
import shutil
import subprocess

import pytest
from test_report import SAMPLES, make_run, write_records
from test_report_page import NASTY, configure

from nanochat.run.report import comparison_page, read_run, write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--disable-web-security",  # so that the page around the frames may look into them
    "--enable-logging=stderr", "--dump-dom",
]  # fmt: skip
FRAMES = {  # a page, and how it is seen
    "narrow": '<iframe src="report.html" width=390></iframe>',
    "wide": '<iframe src="report.html" width=1280></iframe>',
    "dark": '<iframe src="report.html" width=390 style="color-scheme: dark"></iframe>',
    "comparison": '<iframe src="comparison.html" width=390></iframe>',
}
LOOK = """<script>
function look(frame) {
    const charts = [...frame.document.querySelectorAll("figure svg")];
    const color = (part) => frame.getComputedStyle(frame.document.querySelector(part));
    return {
        width: frame.innerWidth, needed: frame.document.documentElement.scrollWidth,
        drawn: charts.map((svg) => svg.querySelector("path").getBBox().width),
        colors: [color("#chart-loss svg text").fill, color("#chart-loss svg path[stroke]").stroke],
    };
}
onload = () => { document.title = JSON.stringify(Array.from(frames).map(look)); };
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_pages_fit_their_window_draw_every_chart_follow_dark_mode_and_break_no_policy(tmp_path):
    make_run(tmp_path, samples=[*NASTY, *SAMPLES])
    configure(tmp_path)
    write_records(
        tmp_path,
        {"step": 40, "loss": math.nan, "skipped": 1, "spike": True, "tokens": 41 * 512},
        {"step": 40, "own_score": 0.5, "own_tasks": {NASTY[0]: 0.5}, "samples": ["after 40"]},
        {"step": 41, "val_bpb": 1.0, "loss_by_position": {"1-16": 4.25, "17-64": 3.5, "65-256": 3.0}},
    )
    write_report(tmp_path, final=True, say=pytest.fail)
    (tmp_path / "comparison.html").write_text(comparison_page([read_run(tmp_path)] * 3), encoding="utf-8")
    (tmp_path / "frames.html").write_text("".join(FRAMES.values()) + LOOK)
    place = [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "frames.html").as_uri()]
    done = subprocess.run([CHROMIUM, *FLAGS, *place], capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in done.stderr, done.stderr  # as a breach of a page's policy would be
    seen = dict(zip(FRAMES, json.loads(re.search("<title>(.*?)</title>", done.stdout)[1]), strict=True))
    for name, page in seen.items():
        assert page["needed"] == page["width"], f"{name} is wider than its window"
        assert len(page["drawn"]) > 3 and all(page["drawn"]), name
    colors = zip(seen["narrow"]["colors"], seen["dark"]["colors"], strict=True)
    assert all(light != dark for light, dark in colors)
