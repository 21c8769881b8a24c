"""Scratch buffers are reused and counted."""

import pytest
import torch

from mpispeed.base.errors import StoreError
from mpispeed.store.arena import Arena


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
