"""What an installed copy holds: the wheel that pyproject.toml describes."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT

# pip does the same, but fetches setuptools first
BUILD = [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('wheel')"]


@pytest.fixture(scope="module")
def in_wheel(tmp_path_factory) -> set[str]:
    """The names in a wheel that is built from a copy of the project."""
    copy = tmp_path_factory.mktemp("packaging")
    for folder in "nanochat", "scripts", "experiments", "tests", "runs":
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in "configurator.py", "pyproject.toml", "README.md", "LICENSE":
        shutil.copy(ROOT / file, copy)
    done = subprocess.run(BUILD, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (copy / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def visible(path: Path) -> bool:
    return path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.parts)


def test_a_wheel_holds_every_file_of_the_packages(in_wheel):
    files = [
        path.relative_to(ROOT) for folder in ("nanochat", "scripts") for path in (ROOT / folder).rglob("*")
    ]
    files = {path.as_posix() for path in files if visible(path)}
    for module in "data/loader", "checkpoint/__init__", "diagnostics/recorder":
        assert f"nanochat/{module}.py" in files
    assert {"configurator.py", *files} <= in_wheel


def test_a_wheel_holds_neither_tests_nor_experiments(in_wheel):
    notes = "nanochat-"  # the wheel's own metadata
    assert all(name.startswith(("configurator.py", "nanochat/", "scripts/", notes)) for name in in_wheel)
