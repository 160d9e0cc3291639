"""A small Hub for the tests of the data."""

from hub_server import hub  # noqa: F401 (a fixture)
