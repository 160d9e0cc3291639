"""scripts/report.py: which files it writes, and what it says of folders that are no runs."""

import os
import runpy
import sys

import pytest
from helpers import run
from test_report import make_run

from nanochat import UserError
from nanochat.run.metrics import Metrics


@pytest.fixture
def folders(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_run(tmp_path / name, samples=["def f"])
    return [str(tmp_path / name) for name in ("one", "two")]


@pytest.fixture
def report(monkeypatch, capsys):
    """Runs the script in this process; returns what it printed."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["report", *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which the script changes
        runpy.run_module("scripts.report", run_name="__main__")
        printed = capsys.readouterr()
        return printed.out + printed.err

    return call


def test_one_folder_gets_its_page_again_and_several_get_one_of_their_own(folders, tmp_path, report):
    printed = report(folders[0])
    assert (
        printed == f"report: {folders[0]}/report.html\n"
        and "def f" in (tmp_path / "one/report.md").read_text()
    )
    page = tmp_path / "page.html"
    report(folders[0], f"--out={page}")
    assert "<h1>one</h1>" in page.read_text()
    report(*folders, f"--out={page}")
    assert "Comparison of runs" in page.read_text()
    assert "report.html" not in os.listdir(folders[1])


def test_what_is_no_run_is_refused_with_a_sentence(folders, tmp_path, report):
    for arguments, words in (
        ([], "name 1 to"),
        ([str(tmp_path)], "has no metrics.jsonl"),
        ([f"{tmp_path}/three"], "there is no run"),
        ([folders[0], f"--out={tmp_path}"], "give another place with --out"),
        ([folders[0], f"--out={tmp_path}/no/page.html"], "give another place with --out"),
    ):
        with pytest.raises(UserError, match=words):
            report(*arguments, f"--base_dir={tmp_path}")
    os.unlink(f"{folders[0]}/metrics.jsonl")
    os.mkfifo(f"{folders[0]}/metrics.jsonl")
    assert "error: " in run(["scripts.report", folders[0]], status=2)


def test_a_damaged_line_is_named_and_a_run_of_no_steps_has_a_page(folders, tmp_path, report):
    with open(f"{folders[0]}/metrics.jsonl", "a") as file:
        file.write("{broken\n")
    assert "is damaged and skipped" in report(folders[0])
    (tmp_path / "empty").mkdir()
    Metrics(tmp_path / "empty").close()
    report(f"{tmp_path}/empty")
    report(f"{tmp_path}/empty", *folders, f"--out={tmp_path}/page.html")


def test_a_link_in_the_place_of_a_page_is_replaced_and_not_followed(folders, tmp_path, report):
    (kept := tmp_path / "kept").write_text("kept")
    for name in ("report.html", ".tmp-report.html"):
        os.symlink(kept, f"{folders[0]}/{name}")
    report(folders[0])
    assert kept.read_text() == "kept" and not os.path.islink(f"{folders[0]}/report.html")
