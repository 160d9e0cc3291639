"""report.html and the comparison of runs: what the page says, and that nothing in a folder can break it."""

import json
import math
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from helpers import DEFAULTS
from test_report import SAMPLES, make_run, write_records

import configurator
from nanochat.run.report import elements, summary, write_report
from nanochat.run.report.pages import comparison_page, run_page
from nanochat.run.report.run_data import read_run, text

NASTY = [
    "</script><script>alert(1)</script>", "<!--<script>", "]]></style><img src=x onerror=alert(1)>",
    '" onload="x', "\u2028\u202e\x00\x1b[31m \ud800", "&lt;b&gt;",
]  # fmt: skip
SETTINGS = {
    "depth": {"value": 4, "source": "command line"},
    "data": {"value": "it's; rm -rf $HOME `x`\n", "source": "runs/a.py:3"},
    "run": {"value": "dummy", "source": "default"},
    "out_dir": {"value": "/tmp/x", "source": "command line"},
    "seed": {"value": DEFAULTS["seed"], "source": "command line"},  # given, and the same as the default
}


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text in them."""

    def __init__(self, content: str):
        super().__init__()
        self.elements, self.text, self.inside = [], "", []
        self.parts = {"pre": [], "b": [], "figure": []}  # the text of each such element
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)
        if tag in self.parts:
            self.parts[tag].append("")

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        for tag in set(self.inside) & set(self.parts):
            self.parts[tag][-1] += data
        if "style" not in self.inside:
            self.text += data

    def names(self):
        return [tag for tag, _ in self.elements]

    def figures(self):
        """{id: text} of the charts."""
        ids = [attributes["id"] for tag, attributes in self.elements if tag == "figure"]
        return dict(zip(ids, self.parts["figure"], strict=True))


def page_of(folder, final=True):
    return Page(run_page(read_run(folder), final))


def configure(folder, **more):
    identity = {"model": {"depth": 4, "width": 192}, "seed": 42, "data": "f00d"}
    derived = {"num_iterations": 40, "parameters": 4_915_400, "data_tokens": 40_960}
    facts = {"settings": SETTINGS, "identity": identity, "derived": derived, "device": "AMD EPYC, 2 cores"}
    (folder / "config.json").write_text(json.dumps(facts | more), encoding="utf-8")


def test_the_page_shows_the_run_at_a_glance_its_samples_and_its_curves(tmp_path):
    make_run(tmp_path, samples=SAMPLES)
    configure(tmp_path)
    assert "cost" not in page_of(tmp_path).text
    configure(tmp_path, settings=SETTINGS | {"price_per_hour": {"value": 1000}})
    page = page_of(tmp_path)
    assert "3.58" in page.text  # 12.9 seconds in steps
    for words in ("1.2346", "depth 4, width 192", "0.5 epochs", "25.0 %", "5,120", "AMD EPYC", "finished"):
        assert words in page.text
    assert [pre for pre in page.parts["pre"] if "base_train" not in pre] == SAMPLES
    figures = page.figures()
    assert {"chart-loss", "chart-val_bpb", "chart-tok_per_sec"} <= figures.keys()
    assert page.names().count("svg") == len(figures)
    table = figures["chart-val_bpb"].partition("Values")[2]  # below the curve
    assert "102.75" in table and "401.2346" in table  # step and bits per byte


def test_the_page_names_no_address_and_has_no_script(tmp_path):
    make_run(tmp_path, samples=SAMPLES)
    content = run_page(read_run(tmp_path), final=True)
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\((?!#)", content)
    page = Page(content)
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    assert "script" not in page.names()
    assert not any(name.startswith("on") or name == "style" for _, a in page.elements for name in a)


def test_every_number_of_a_record_gets_its_chart_by_itself(tmp_path):
    make_run(tmp_path)
    more = {"my_number": 3.0, "far/out": -1.5, "words": "no", "<b>": 1.0}
    write_records(
        tmp_path,
        *({"step": step, "loss": 4.0} | more for step in range(40, 50)),
        {"step": 50, "val_bpb": 1.0, "val_bpb_other.txt": 2.125, "my_score": 0.0, "tokens": 7},
        {"step": 60, "val_bpb": 0.9, "val_bpb_other.txt": 2.0, "my_score": 0.5},
    )
    page = page_of(tmp_path)
    figures = page.figures()
    assert {"chart-my_number", "chart-far/out", "chart-my_score"} <= figures.keys()
    assert not {"chart-words", "chart-<b>", "chart-val_bpb_other.txt"} & figures.keys()
    assert "other.txt" in figures["chart-val_bpb"] and "2.125" in figures["chart-val_bpb"]
    assert "validation of other.txt" in page.text


@pytest.mark.parametrize("nasty", NASTY)
def test_no_text_of_a_folder_breaks_out_of_the_page(tmp_path, nasty, monkeypatch):
    monkeypatch.setattr(elements, "svg", lambda chart: "")  # pictures have no such text
    make_run(tmp_path, samples=["calm"], plan=["calm: calm"])

    def poison(words):
        settings = {"data": {"value": words, "source": words}, nasty: {"value": 1}}
        facts = {"device": words, "git_commit": words, "versions": {words: words}, "plan": [words]}
        configure(tmp_path, settings=settings, **facts)
        tasks = {"own_score": 0.5, "own_tasks": {words: 0.5}, "samples": [words]}
        write_records(
            tmp_path, {"step": 41, "val_bpb": 1.0, "loss_by_position": {words: 1.0, "1-16": 2.0}} | tasks
        )
        run = read_run(tmp_path)
        run.name = text(words)
        assert summary.markdown(run, True).encode()
        return Page(run_page(run, True))

    calm, page = poison("calm"), poison(nasty)
    assert set(page.names()) == set(calm.names()) and "script" not in page.names()


def test_a_page_says_whether_the_run_goes_on_and_reloads_itself_only_then(tmp_path):
    make_run(tmp_path)
    for planned, final, state in ((40, False, "running"), (40, True, "finished"), (400, True, "stopped")):
        configure(tmp_path, derived={"num_iterations": planned})
        page = page_of(tmp_path, final)
        reloads = [a for tag, a in page.elements if tag == "meta" and a.get("http-equiv") == "refresh"]
        assert len(reloads) == (not final)
        assert state in page.text and ("40 of 400 steps" in page.text) == (state == "stopped")


# -- Settings, and several runs


def test_the_command_gives_back_every_setting_that_was_given(tmp_path):
    make_run(tmp_path)
    configure(tmp_path)
    words = shlex.split(summary.command(read_run(tmp_path)))
    assert words[:3] == ["python", "-m", "scripts.base_train"]
    assert words[3:-1] == ["--depth=4", f"--data={SETTINGS['data']['value']}", f"--seed={DEFAULTS['seed']}"]
    assert words[-1].startswith("--model_tag=") and words[-1].endswith("-again")
    configure(tmp_path, world_size=8)
    assert summary.command(read_run(tmp_path)).startswith("torchrun --standalone --nproc_per_node=8 -m ")


def test_settings_are_shown_beside_the_defaults_of_the_script_that_made_the_run(tmp_path):
    make_run(tmp_path)
    mid = {"loss_on": {"value": "all", "source": "command line"}}
    mid |= {"data": {"value": "embedded", "source": "command line"}}
    for script, settings, changed in (
        ("base_train", SETTINGS, ["depth", "data", "out_dir"]),
        ("mid_train", mid, ["loss_on"]),
    ):
        configure(tmp_path, settings=settings)
        run = read_run(tmp_path)
        defaults = summary.defaults_of(summary.script_of(run))
        assert defaults == configurator.defaults(f"scripts/{script}.py")
        assert list(summary.changed_settings(run, defaults)) == changed
        assert f"scripts.{script} " in summary.command(run)


@pytest.mark.parametrize(
    "half", ["depth = 'a", "depth = (", "if depth:", "  depth = 1", "depth: list[int] = 3"]
)
def test_a_script_that_somebody_is_editing_costs_the_report_its_defaults_alone(tmp_path, monkeypatch, half):
    (tmp_path / "half_written.py").write_text(f"{half}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert summary.defaults_of("half_written") == {}


def test_a_comparison_shows_each_run_what_differs_and_the_best_where_they_can_be_compared(tmp_path):
    runs = []
    for name, depth in (("a/one", 4), ("b/one", 6), ("c/two", 6)):
        (folder := tmp_path / name).mkdir(parents=True)
        make_run(folder, samples=NASTY)
        configure(folder, settings=SETTINGS | {"depth": {"value": depth, "source": "command line"}})
        write_records(folder, {"step": 40, "val_bpb": depth - 3.5}, {"step": 40, "loss": math.nan})
        runs.append(read_run(folder))
    page = Page(comparison_page(runs))
    assert {"chart-loss", "chart-loss-tokens", "chart-val_bpb-tokens"} <= page.figures().keys()
    assert all(name in page.figures()["chart-loss"] for name in ("a/one", "b/one", "c/two"))
    differs = page.text.partition("What differs")[2]
    assert "depth" in differs and "seed" not in differs and "script" not in page.names()
    assert [b for b in page.parts["b"] if b] == ["0.5000", *["4.1000"] * 3]
    runs[0].config["identity"]["tokenizer"] = "another"  # bits per byte can still be compared
    assert [b for b in Page(comparison_page(runs)).parts["b"] if b] == ["0.5000"]
    runs[0].config["settings"]["loss_on"] = {"value": "all"}
    page = Page(comparison_page(runs))
    assert not any(page.parts["b"]) and "loss_on" in page.text


def test_the_list_of_runs_fits_a_terminal(tmp_path):
    runs = []
    for i, planned in enumerate((40, 400_000)):
        (folder := tmp_path / f"a-long-name-that-says-what-was-tried-in-this-run-{i}").mkdir()
        make_run(folder)
        configure(folder, derived={"num_iterations": planned})
        runs.append(read_run(folder))
        runs[-1].written = i
    newer, older = summary.table_of_runs(runs).splitlines()[1:]
    assert all(len(line) <= 80 for line in (newer, older))
    assert older.endswith("finished") and newer.endswith("stopped") and "40 of 400,000" in newer
    write_records(folder, {"step": 41, "val_bpb": 9e99})  # damage: no line of 80 characters has room for it
    assert "running" in summary.table_of_runs([read_run(folder)])


# -- In a browser, if one is installed

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
