"""What all unit tests share: what is said once per process is said once per test."""

import sys

import pytest

from mpispeed.base import log


@pytest.fixture(autouse=True)
def nothing_is_said_yet(monkeypatch):
    """Files that run in one process in another order, as those of `make quick`, find the same."""
    monkeypatch.setattr(log, "_seen", set())


@pytest.fixture
def no_world(monkeypatch):
    """For commands, which leave their errors to the hooks of a process that has joined a world, as other tests may."""
    world = sys.modules.get("mpispeed.mesh.world")
    if world is not None:
        monkeypatch.setattr(world, "_PROCESS", {})
