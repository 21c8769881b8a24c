"""Scratch buffers are reused and counted."""

import pytest
import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import StoreError
from mpispeed.store.arena import Arena
from tests.helpers.device import stand_in


def test_buffers_are_reused_and_counted():
    arena = Arena()
    first = arena.take(100, torch.float32)
    assert arena.taken_count == 1
    arena.give(first)
    assert arena.take(100, torch.float32) is first
    assert arena.owned_bytes == 400
    other = arena.take(100, torch.bfloat16)
    assert arena.owned_bytes == 600
    arena.give(other)
    arena.trim()
    assert arena.owned_bytes == 400


def test_giving_back_twice_is_refused():
    arena = Arena()
    buffer = arena.take(4, torch.float32)
    arena.give(buffer)
    with pytest.raises(StoreError, match="not taken"):
        arena.give(buffer)


def test_page_locked_buffers_are_reused_as_such(monkeypatch):
    monkeypatch.setattr(devices, "IN_USE", [stand_in()])
    arena = Arena()
    pinned, plain = (arena.take(64, torch.bfloat16, on_host=True, pin=pin) for pin in (True, False))
    assert (pinned.is_pinned(), plain.is_pinned()) == (True, False)
    for buffer in (plain, pinned):
        arena.give(buffer)
    assert arena.take(64, torch.bfloat16, on_host=True, pin=True) is pinned
    assert arena.take(64, torch.bfloat16, on_host=True) is plain
