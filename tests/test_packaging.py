"""What an installed copy holds: the wheel that pyproject.toml describes."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT, python_m

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
    done = subprocess.run(BUILD, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (copy / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(copy / "installed")
    return copy / "installed"


def test_a_wheel_holds_every_file_of_the_packages_and_no_tests(installed):
    files = [ROOT / "configurator.py"]
    for package in "nanochat", "scripts", "experiments":
        files += [path for path in (ROOT / package).rglob("*") if path.is_file()]
    files = [path for path in files if not any(part.startswith((".", "__pycache__")) for part in path.parts)]
    assert [path for path in files if not (installed / path.relative_to(ROOT)).exists()] == []
    assert not (installed / "tests").exists()


def imported(path: Path) -> set[str]:
    """The modules of this project that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""}
    ours = "configurator", "nanochat", "scripts", "experiments", "tests", "helpers"
    return {name for name in names if name.partition(".")[0] in ours}


def test_what_the_scripts_and_the_package_import_is_installed(installed):
    for path in (*installed.glob("scripts/*.py"), *installed.glob("nanochat/**/*.py")):
        for name in imported(path):
            place = installed / name.replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__init__.py").exists(), (path, name)


@pytest.mark.parametrize("script", [path.stem for path in sorted((ROOT / "scripts").glob("[!_]*.py"))])
def test_every_script_of_an_installed_copy_starts(installed, script):
    done = python_m([f"scripts.{script}", "--help"], installed)
    assert done.returncode == 0 and "--" in done.stdout, done.stderr


def test_a_benchmark_of_an_installed_copy_finds_its_experiment(installed, corpus, tmp_path):
    few = ["--what=loader", "--shapes=2x32", "--vocab_size=300", "--rounds=1"]
    few += [f"--data={corpus}", f"--base_dir={tmp_path}"]
    done = python_m(["scripts.bench", *few], installed)
    assert done.returncode == 0, done.stderr
