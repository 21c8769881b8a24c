"""Meetings in shared memory, of threads that wait without the lock of the interpreter; and the same by messages."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh import sim
from mpispeed.mesh.backends import meetings, shared_slots
from mpispeed.mesh.collectives.transport import Waiting
from mpispeed.native import status
from tests.helpers import verbs

SLOT_BYTES = 4096
SPIN_NS = 50_000


def memory_for(size):
    """What `size` processes would map, all zero."""
    lines = meetings.DOOR_BYTES + 2 * size * (meetings.LINE_BYTES + SLOT_BYTES)
    kept = torch.zeros(lines + 64, dtype=torch.uint8)
    return kept[-kept.data_ptr() % 64 :][:lines]


def meet_all(size, program):
    """Run `program(place, meeting, slots)` in a thread for each place; slots are [turn, place, line and data]."""
    memory, failures = memory_for(size), []
    slots = memory[meetings.DOOR_BYTES :].view(2, size, -1)

    def run(place):
        try:
            program(place, status.require("meeting").Meeting(memory.data_ptr(), place, size, SLOT_BYTES), slots)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_layout_is_that_of_the_header():
    module = status.require("meeting")
    assert (module.DOOR_BYTES, module.LINE_BYTES) == (meetings.DOOR_BYTES, meetings.LINE_BYTES)


@pytest.mark.parametrize("spin_ns", [0, SPIN_NS])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_everybody_sees_what_all_have_brought(size, spin_ns):
    def program(place, meeting, slots):
        late = random.Random(place)
        mine = torch.zeros(SLOT_BYTES // 8, dtype=torch.int64)
        for call in range(200):
            mine.fill_(call * size + place)
            if late.random() < 0.1:
                time.sleep(late.random() * 0.001)
            turn = meeting.meet(mine.data_ptr(), mine.nbytes, call, spin_ns, lambda: None)
            assert turn == (call + 1) % 2
            found = slots[turn, :, meetings.LINE_BYTES :].view(torch.int64)
            assert torch.equal(found, torch.arange(size).add(call * size)[:, None].expand_as(found)), call

    meet_all(size, program)


def test_codes_that_differ_are_seen_by_all_and_the_next_meeting_is_good():
    def program(place, meeting, _):
        x = torch.zeros(8)
        assert meeting.meet(x.data_ptr(), x.nbytes, 7 + place // 2, SPIN_NS, lambda: None) == 1 - 2
        assert meeting.meet(x.data_ptr(), x.nbytes, 7, SPIN_NS, lambda: None) == 0

    meet_all(3, program)


def test_who_waits_is_called_between_naps_and_may_leave_by_an_error():
    beats = []

    def program(place, meeting, _):
        x = torch.zeros(8)

        def beat():
            beats.append(place)
            if len(beats) == 3:
                raise InterruptedError

        if place == 0:
            with pytest.raises(InterruptedError):
                meeting.meet(x.data_ptr(), x.nbytes, 1, SPIN_NS, beat)
        else:
            time.sleep(0.2)
            assert meeting.meet(x.data_ptr(), x.nbytes, 1, SPIN_NS, lambda: None) == 1
        for turn in (0, 1):
            assert meeting.meet(x.data_ptr(), x.nbytes, 2, SPIN_NS, lambda: None) == turn

    meet_all(2, program)
    assert beats == [0, 0, 0]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", verbs.REALS, ids=str)
def test_slots_without_compiled_meetings(size, dtype):
    """Simulated ranks share the memory of one process and meet by its messages."""

    def check(world):
        transport = world.comm.transport
        memory = transport.library_share(memory_for(size), 0)
        met = meetings.Meetings(transport, Waiting(world.comm.ranks), memory, SLOT_BYTES)
        slots = shared_slots.SharedSlots(transport, met)
        transport.fast = lambda *, is_small=False: slots if is_small else None
        verbs.check_ordered_bits(world.comm, dtype, (0, 1, 7, 900))
        verbs.check_reductions(world.comm, dtype)
        verbs.check_moves(world.comm, dtype)
        with pytest.raises(CommError, match=r"rank 0 calls all_reduce of 8 bytes \(sum of float32\); ranks? 1"):
            world.comm.all_reduce(torch.ones(3 if world.rank else 2))

    sim.run(size, check)
