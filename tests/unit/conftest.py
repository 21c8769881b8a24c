"""What all unit tests share: what is said once per process is said once per test."""

import pytest

from mpispeed.base import log


@pytest.fixture(autouse=True)
def nothing_is_said_yet(monkeypatch):
    """Files that run in one process in another order, as those of `make quick`, find the same."""
    monkeypatch.setattr(log, "_seen", set())
