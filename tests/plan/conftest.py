"""What the tests of plans share."""

import pytest


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """What a test looks for stands in one line."""
    monkeypatch.setenv("COLUMNS", "1000")
