"""Scratch buffers are reused and counted."""

import resource
from pathlib import Path

import pytest
import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import StoreError
from mpispeed.store.arena import LEAST_RETURNED_BYTES, Arena
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


def resident_bytes():
    words = Path("/proc/self/statm").read_text().split()
    return int(words[1]) * resource.getpagesize()


def sparing() -> Arena:
    arena = Arena()
    arena.is_sparing = True
    return arena


def test_long_buffers_go_back_to_the_system():
    arena, numel, before = sparing(), 16 << 20, resident_bytes()
    buffer = arena.take(numel, torch.float32)
    buffer.fill_(1.0)
    view = buffer[: 1 << 20]
    assert resident_bytes() > before + 60 * 2**20
    assert buffer.untyped_storage().nbytes() == 4 * numel
    arena.give(buffer)
    del buffer
    assert arena.owned_bytes == 0  # it is more than half of what was in use
    assert float(view.sum()) == 1 << 20  # memory that somebody looks at stays
    del view
    assert resident_bytes() < before + 16 * 2**20


def test_what_is_spare_is_at_most_half_and_no_more_than_the_longest():
    arena, size = sparing(), LEAST_RETURNED_BYTES
    buffers = [arena.take(size + index, torch.uint8) for index in range(5)]
    for buffer in buffers:
        arena.give(buffer)
    assert arena.owned_bytes == size + 4  # the latest
    assert arena.take(size + 4, torch.uint8) is buffers[4]
    assert arena.take(size + 1, torch.uint8) is not buffers[1]
    assert arena.peak_bytes == 5 * size + 10
    arena.trim()
    assert arena.owned_bytes == 2 * size + 5


def test_all_together_is_no_more_than_was_in_use_at_once():
    arena, size = Arena(), LEAST_RETURNED_BYTES
    buffers = [arena.take(size + index, torch.uint8) for index in range(3)]
    most = arena.owned_bytes
    for buffer in buffers:
        arena.give(buffer)
    assert arena.owned_bytes == most
    long = arena.take(2 * size, torch.uint8)  # the first two have to go
    assert arena.owned_bytes == 3 * size + 2
    assert arena.take(size + 2, torch.uint8) is buffers[2]
    arena.give(long)
    assert arena.take(size, torch.uint8) is not buffers[0]
    assert (arena.peak_bytes, arena.taken_count) == (most, 2)


def test_what_is_too_short_or_to_be_kept_stays():
    for arena, size in ((Arena(), LEAST_RETURNED_BYTES - 2), (Arena(returns=False), LEAST_RETURNED_BYTES)):
        buffer = arena.take(size // 2, torch.bfloat16)
        arena.give(buffer)
        assert arena.take(size // 2, torch.bfloat16) is buffer


def test_a_long_buffer_can_be_lost_and_is_not_given_twice():
    arena = Arena()
    lost, given = (arena.take(LEAST_RETURNED_BYTES, torch.uint8) for _ in range(2))
    arena.lose(lost)
    arena.give(given)
    assert (arena.owned_bytes, arena.taken_count) == (LEAST_RETURNED_BYTES, 0)
    with pytest.raises(StoreError, match="not taken"):
        arena.give(given)


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
