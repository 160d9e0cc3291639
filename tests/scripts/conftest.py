"""What the tests of scripts share."""

import shutil
from pathlib import Path

import pytest
from helpers import ROOT


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the sources to edit."""
    folder = tmp_path / "tree"
    for name in ("nanochat", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "configurator.py", folder)
    return folder
