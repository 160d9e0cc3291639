"""What an installed copy holds: the wheel that pyproject.toml describes."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT, TINY, python_m

# pip does the same, but fetches setuptools first
BUILD = [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('wheel')"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The files of a wheel that is built from a copy of the project."""
    copy = tmp_path_factory.mktemp("packaging")
    for folder in "nanochat", "scripts", "experiments", "tests", "runs":
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in "configurator.py", "pyproject.toml", "README.md", "LICENSE":
        shutil.copy(ROOT / file, copy)
    done = subprocess.run(BUILD, cwd=copy, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (copy / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(copy / "installed")
    return copy / "installed"


def test_a_wheel_holds_every_file_of_the_packages_and_no_tests(installed):
    files = [ROOT / "configurator.py"]
    for package in "nanochat", "scripts", "experiments", "runs":
        files += [path for path in (ROOT / package).rglob("*") if path.is_file()]
    left_out = ".", "__pycache__", "results"  # measured rows stay in the repository
    files = [path for path in files if not any(p.startswith(left_out) for p in path.relative_to(ROOT).parts)]
    assert [path for path in files if not (installed / path.relative_to(ROOT)).exists()] == []
    assert not (installed / "tests").exists()
    for path in files:
        if path.suffix == ".py":
            from_tests = r"^\s*(?:from|import) (?:tests|helpers)\b"
            assert not re.search(from_tests, path.read_text("utf-8"), re.MULTILINE), path


@pytest.mark.parametrize("script", [path.stem for path in sorted((ROOT / "scripts").glob("[!_]*.py"))])
def test_every_script_of_an_installed_copy_starts(installed, script):
    done = python_m([f"scripts.{script}", "--help"], installed)
    assert done.returncode == 0 and "--" in done.stdout, done.stderr


def test_a_benchmark_of_an_installed_copy_finds_its_experiment(installed, corpus, tmp_path):
    few = ["--what=loader", "--shapes=2x32", "--vocab_size=300", "--rounds=1"]
    few += [f"--data={corpus}", f"--base_dir={tmp_path}"]
    done = python_m(["scripts.bench", *few], installed)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_installed_copy_trains_with_its_recipe_chats_and_reports_in_an_empty_folder(
    installed, corpus, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    here = tmp_path / "empty"
    here.mkdir()
    few = [*TINY, f"--data={corpus}", "--target_minutes=-1"]
    for line, says in {
        ("scripts.base_train", "runs/laptop.py", *few): "step 8/8",
        ("scripts.chat", "--prompt=alpha", "--max_tokens=4"): "laptop",
        ("scripts.report", "laptop"): "report.html",
    }.items():
        done = python_m(list(line), here)
        assert done.returncode == 0 and says in done.stdout + done.stderr, done.stdout + done.stderr
    page = (tmp_path / "base" / "base_checkpoints" / "laptop" / "report.html").read_text("utf-8")
    assert (installed / "nanochat/run/report/page.css").read_text("utf-8")[:200] in page
