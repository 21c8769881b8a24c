"""Memory that is mapped for itself: its pages, its addresses, and what is said when there is none."""

import re
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mpispeed.store import host_memory
from mpispeed.store.arena import Arena

MIB = 1 << 20


def address_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def mappings():
    return Path("/proc/self/maps").read_bytes().count(b"\n")


@contextmanager
def at_most(more):
    """No more addresses than this process has and `more`."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("is_brief", [False, True])
@pytest.mark.parametrize("size", [MIB - 8, MIB, 2 * MIB, 3 * MIB + 4, 4 * MIB, 64 * MIB - 4, 64 * MIB, 65 * MIB + 4])
def test_every_element_can_be_written(size, is_brief):
    values = host_memory.empty(size // 4, torch.float32, is_brief=is_brief)
    assert (values.numel(), values.dtype) == (size // 4, torch.float32)
    values[0], values[-1] = 1.0, 2.0
    assert (float(values[0]), float(values[-1])) == (1.0, 2.0)
    if size >= (MIB if is_brief else 64 * MIB):
        assert values.data_ptr() % (2 * MIB) == 0


def test_zeros_are_zeros_and_copies_are_copies():
    given = torch.arange(MIB, dtype=torch.float32)
    assert not host_memory.zeros(MIB, torch.float32).any()
    assert torch.equal(host_memory.copied(given, torch.float64), given.double())


def test_states_take_hardly_more_addresses_than_bytes():
    before = address_bytes()
    states = [host_memory.zeros(MIB, torch.uint8) for _ in range(100)] + [host_memory.zeros(80 * MIB, torch.uint8)]
    assert address_bytes() - before < 190 * MIB
    assert len(states) == 101


def test_memory_goes_back_with_the_last_view():
    before = mappings()
    views = [host_memory.zeros(3 * MIB, torch.uint8)[:5] for _ in range(50)]
    assert mappings() > before
    del views
    assert mappings() <= before + 2


@pytest.mark.parametrize("make", [host_memory.zeros, host_memory.empty])
def test_a_limit_of_addresses_is_a_sentence(make):
    with at_most(8 * MIB), pytest.raises(MemoryError) as caught:
        make(64 * MIB, torch.uint8)
    message = str(caught.value)
    assert message.startswith("64 MiB of host memory cannot be mapped: Cannot allocate memory; raise the limit")
    assert "\n" not in message
    with pytest.raises(MemoryError, match="cannot be mapped"):
        make(2**62, torch.float32)


def test_an_arena_goes_on_after_a_refusal():
    arena = Arena()
    with at_most(8 * MIB), pytest.raises(MemoryError, match="cannot be mapped"):
        arena.take(64 * MIB, torch.uint8)
    assert (arena.owned_bytes, arena.taken_count) == (0, 0)
    for size in (40, 41, 42):  # a refused buffer is none that was in use: what is free goes for each of these
        arena.give(arena.take(size * MIB, torch.uint8))
        assert arena.owned_bytes == size * MIB
    assert arena.peak_bytes == 42 * MIB


MANY_MAPPINGS = """
import mmap, sys, torch
from mpispeed.store import host_memory
most = int(sys.argv[1])
pages = mmap.mmap(-1, (most + 2) * mmap.PAGESIZE)
try:
    for page in range(0, most + 2, 2):  # each of these pages is a mapping by itself
        pages.madvise(mmap.MADV_DONTDUMP, page * mmap.PAGESIZE, mmap.PAGESIZE)
except OSError:
    pass
try:
    made = [host_memory.zeros(3 << 20, torch.uint8) for _ in range(9)]
except MemoryError as error:
    message = str(error)
pages.close()
print(message)
"""


def test_too_many_mappings_are_named():
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    if most > 200_000:
        pytest.skip(f"vm.max_map_count is {most} here, and so many mappings take a while")
    command = [sys.executable, "-c", MANY_MAPPINGS, str(most)]  # a process of its own: others' mappings count too
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert re.search(r"of \d+ \(sysctl vm.max_map_count\), raise that", found.stdout)
