"""scripts/report.py: which files it writes, and what it says of folders that are no runs."""

import os
from pathlib import Path

import pytest
from run.test_report import make_run, write_records

from nanochat import UserError


@pytest.fixture
def folders(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_run(tmp_path / name, samples=["def f"])
    (tmp_path / "empty\x1b[2J").mkdir()
    write_records(tmp_path / "empty\x1b[2J")
    return [str(tmp_path / name) for name in ("one", "two", "empty\x1b[2J")]


@pytest.fixture
def report(run_script):
    """Runs the script; returns what it printed."""
    return lambda *arguments: "".join(run_script("report", *arguments))


def test_one_folder_gets_its_page_again_and_several_get_one_of_their_own(folders, tmp_path, report):
    with open(f"{folders[0]}/metrics.jsonl", "a") as file:
        file.write("{broken\n")
    printed = report(folders[0])
    assert f"report: {folders[0]}/report.html\n" in printed and "damaged line skipped" in printed
    assert "def f" in (tmp_path / "one/report.md").read_text()
    page = tmp_path / "page.html"
    report(folders[0], f"{folders[1]}/../one", f"--out={page}")  # the same one
    assert "<h1>one</h1>" in page.read_text()
    (tmp_path / "base_checkpoints").symlink_to(tmp_path)
    report("one", *folders[1:], f"--out={page}", f"--base_dir={tmp_path}")  # the first one by its tag
    assert "Comparison of runs" in page.read_text()
    assert "report.html" not in os.listdir(folders[1])
    assert "empty\\x1b[2J/report.html" in report(folders[2])
    assert "report.html" in os.listdir(folders[2])


def test_the_price_that_is_given_is_on_the_page_and_in_the_text_and_may_be_none(folders, report):
    one = Path(folders[0])
    (one / "config.json").write_text('{"settings": {"price_per_hour": {"value": 3600}}}')
    for arguments, cost in ([], "12.90"), (["--price_per_hour=7200"], "25.80"), (["--price_per_hour=0"], ""):
        report(folders[0], *arguments)
        for name in ("report.html", "report.md"):
            text = (one / name).read_text()
            assert cost in text and ("an hour" in text) == bool(cost)


def test_without_a_tag_the_runs_are_listed_and_a_tag_of_two_runs_shows_both(tmp_path, report, monkeypatch):
    assert "no run under" in report(f"--base_dir={tmp_path}")
    places = [tmp_path / "base_checkpoints", tmp_path / "mid_checkpoints"]
    for place in places:
        (place / "d4").mkdir(parents=True)
        make_run(place / "d4")
    (places[1] / "d4" / "config.json").write_text('{"settings": {"loss_on": {"value": "all"}}}')
    (places[0] / "broken").mkdir()
    os.mkfifo(places[0] / "broken" / "metrics.jsonl")
    (tmp_path / "here" / "d4").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")  # its folder d4 is no run's
    listed = report(f"--base_dir={tmp_path}")
    assert listed.count("d4 ") == 2 and "broken is left out" in listed
    page = tmp_path / "page.html"
    assert "both are shown" in report("d4", f"--base_dir={tmp_path}", f"--out={page}")
    assert all(name in page.read_text() for name in ("Comparison of runs", "d4 (base)", "d4 (mid)"))
    report("mid_checkpoints/d4", f"--base_dir={tmp_path}")
    assert [(place / "d4/report.html").exists() for place in places] == [False, True]
    (places[1] / "d4" / "metrics.jsonl").unlink()  # as of a run that was refused at its start
    report("d4", f"--base_dir={tmp_path}")
    assert (places[0] / "d4/report.html").exists()


def test_what_is_no_run_is_refused_with_a_sentence(folders, tmp_path, report):
    for arguments, words in (
        ([str(tmp_path)], "has no metrics.jsonl"),
        (["three"], "there is no run three"),
        ([folders[0], f"--out={tmp_path}"], "another place with --out"),
        ([folders[0], f"--out={tmp_path}/no/page.html"], "another place with --out"),
        ([folders[0], "--out=."], "another place with --out"),
    ):
        with pytest.raises(UserError, match=words):
            report(*arguments, f"--base_dir={tmp_path}")
