"""What one rank moves between the host and a device: no peers, but windows, dtypes and factors."""

import itertools

import pytest
import torch

from mpispeed.base import device as devices
from mpispeed.mesh import solo_comm
from mpispeed.mesh.collectives import device_collectives
from tests.helpers.device import stand_in

COUNT = 5003


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(devices, "IN_USE", [])
    monkeypatch.setattr(device_collectives, "WINDOW_BYTES", 1 << 12)
    devices.use(stand_in())
    return stand_in()


def values(dtype):
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(3)).mul_(100).to(dtype)


def on_host(dtype, *, pin):
    return devices.pinned(COUNT, dtype) if pin else torch.zeros(COUNT, dtype=dtype)


PAIRS = [
    *itertools.product((torch.bfloat16, torch.float16), (torch.float32,)),
    *((dtype, dtype) for dtype in (torch.bfloat16, torch.float32, torch.int64)),
]


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize(("dtype", "of_sum"), PAIRS, ids=str)
def test_sums_go_to_the_host(device, dtype, of_sum, pin):
    """With the bits of the same sum on the host, and complete when the verb returns."""
    comm, x = solo_comm(), values(dtype)
    for scale in (1.0,) if dtype == torch.int64 else (1.0, 1 / 3):
        expected, shard = on_host(of_sum, pin=False), on_host(of_sum, pin=pin)
        comm.reduce_scatter(expected, x, scale=scale)
        comm.reduce_scatter(shard, x.to(device), scale=scale)
        assert torch.equal(shard, expected)


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_parts_go_to_the_device(device, dtype, pin):
    """What is sent may be overwritten at once."""
    x, sent = values(dtype), on_host(dtype, pin=pin)
    sent.copy_(x)
    out = torch.zeros(COUNT, dtype=dtype, device=device)
    solo_comm().all_gather(out, sent)
    sent.zero_()
    assert torch.equal(out.cpu(), x)


def test_nothing_is_asked_of_pageable_memory_twice(device):
    """Values for memory that is not pinned travel in their own 16 bits: pinned slots have no more."""
    shard = torch.zeros(COUNT)
    slots = device_collectives._OWN.__dict__
    slots.pop("slots", None)
    solo_comm().reduce_scatter(shard, values(torch.bfloat16).to(device))
    assert all(slot._memory.is_pinned() for slot in slots["slots"])
    assert max(slot._memory.numel() for slot in slots["slots"]) <= device_collectives.WINDOW_BYTES
