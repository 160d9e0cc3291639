"""A run's folder that comes from a stranger: names in it that are links or pipes lead to no other file."""

import os
from pathlib import Path

import pytest

from nanochat import UserError, checkpoint
from nanochat.files import write_whole
from nanochat.run import metrics, report

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links need a right there, and pipes have no names")


@pytest.fixture(params=["file", "nothing yet"])
def outside(tmp_path, request) -> Path:
    """A file that no run may change, or a name at which no run may make one."""
    path = tmp_path / "outside"
    if request.param == "file":
        path.write_bytes(b"mine\n")
    yield path
    assert (path.read_bytes() if path.exists() else None) == (b"mine\n" if request.param == "file" else None)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def open_metrics(folder: Path):
    metrics.read_metrics(folder / "metrics.jsonl")
    metrics.Metrics(folder)


@pytest.mark.parametrize(
    ("name", "use"), [(".lock", checkpoint.lock_folder), ("metrics.jsonl", open_metrics)]
)
def test_a_link_or_a_pipe_in_place_of_a_file_is_refused_at_once(folder, outside, name, use):
    for make in (lambda path: path.symlink_to(outside), os.mkfifo):
        make(folder / name)
        with pytest.raises(UserError, match="it is a link, a pipe"):
            use(folder)
        (folder / name).unlink()


def test_no_temporary_name_is_a_way_out_of_the_folder(folder, outside):
    names = ["config.json", "report.md", "report.html", "loss.png"]
    for name in (*names, ".tmp-config.json", "metrics.tmp"):
        (folder / name).symlink_to(outside)
    log = metrics.Metrics(folder)
    log.write({"step": 0, "loss": 2.0})
    metrics.rewind_metrics(folder / "metrics.jsonl", 1)
    write_whole(folder / "config.json", b"{}")
    report.write_report(folder, True, pytest.fail)
    assert (folder / "config.json").read_bytes() == b"{}" and not (folder / "config.json").is_symlink()
    assert (folder / "report.md").stat().st_size and not any((folder / name).is_symlink() for name in names)


def test_leftovers_that_are_links_are_removed_and_what_they_point_at_stays(folder, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (folder / ".tmp-step_000001-1").symlink_to(tmp_path / "other")
    (folder / ".tmp-config.json").symlink_to(tmp_path / "other" / "file")
    checkpoint.lock_folder(folder).close()
    assert (tmp_path / "other" / "file").exists() and not list(folder.glob(".tmp-*"))
