"""The package hjson, which accepts many texts that are no JSON, is away: mistakes in JSON are what is tested here."""

import sys

import pytest


@pytest.fixture(autouse=True)
def without_hjson(request, monkeypatch):
    """Hide the package hjson from all tests but its own."""
    if request.path.name != "test_hjson.py":
        monkeypatch.setitem(sys.modules, "hjson", None)
