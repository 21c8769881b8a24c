"""The device of these tests: memory of its own that the host cannot read, with the arithmetic of the host."""

import pytest
import torch

import mpispeed
from mpispeed.base import device as devices
from tests.helpers.device import stand_in


@pytest.fixture
def device(monkeypatch):
    """Engines that are made in the test compute on it, and none afterwards. The ranks of a node share two."""
    kind = stand_in().type
    monkeypatch.setenv("MPISPEED_DEVICE", kind)
    monkeypatch.setenv("MPISPEED_DEVICE_PATH", "staged")  # and not what happens to be faster here
    yield torch.device(kind, mpispeed.init_distributed().local_rank % torch.get_device_module(kind).device_count())
    devices.IN_USE.clear()


@pytest.fixture
def on_host(monkeypatch):
    """Call it to let engines that are made afterwards compute on the host again."""

    def switch():
        monkeypatch.setenv("MPISPEED_DEVICE", "cpu")
        devices.IN_USE.clear()

    return switch
