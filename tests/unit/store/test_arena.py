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


def test_long_buffers_go_back_to_the_system_at_rest():
    arena, numel, before = Arena(), 16 << 20, resident_bytes()
    buffer = arena.take(numel, torch.float32)
    buffer.fill_(1.0)
    view = buffer[: 1 << 20]
    assert resident_bytes() > before + 60 * 2**20
    assert buffer.untyped_storage().nbytes() == 4 * numel
    arena.give(buffer)
    del buffer
    assert arena.owned_bytes == 4 * numel
    arena.rest()
    assert arena.owned_bytes == 0  # it is more than half of what was in use
    assert float(view.sum()) == 1 << 20  # memory that somebody looks at stays
    del view
    assert resident_bytes() < before + 16 * 2**20


def test_what_is_kept_at_rest_is_at_most_half_and_the_latest():
    arena, size = Arena(), LEAST_RETURNED_BYTES
    buffers = [arena.take(size + index, torch.uint8) for index in range(5)]
    arena.give(buffers[3])
    arena.rest()
    assert arena.owned_bytes == 5 * size + 10  # four are in use
    for buffer in (*buffers[:3], buffers[4]):
        arena.give(buffer)
    arena.rest()
    assert arena.owned_bytes == 2 * size + 6
    assert arena.take(size + 4, torch.uint8) is buffers[4]
    assert arena.take(size + 2, torch.uint8) is buffers[2]
    assert arena.take(size + 3, torch.uint8) is not buffers[3]
    assert arena.peak_bytes == 5 * size + 10


def test_with_rests_the_longest_does_not_go_for_two_short_ones():
    size = LEAST_RETURNED_BYTES
    for rests in (False, True):
        arena = Arena()
        arena.rests = rests
        long, short = arena.take(4 * size, torch.uint8), arena.take(size, torch.uint8)
        arena.give(long)
        other = arena.take(size, torch.uint8)
        assert arena.owned_bytes == (6 if rests else 2) * size
        assert (arena.take(4 * size, torch.uint8) is long) == rests
        assert arena.owned_bytes == 6 * size
        del short, other


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
