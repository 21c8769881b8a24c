# cython: autotestdict=False
"""Meetings of processes that share memory, each with a slot for what it brings; the counter is in meeting.h."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint32_t, uintptr_t
from libc.string cimport memcpy


cdef extern from "meeting.h" nogil:
    ctypedef struct mps_door:
        pass
    int MPS_LINE
    void mps_arrive(mps_door *door, uint32_t target)
    int mps_wait(mps_door *door, uint32_t target, int64_t spin_ns, int64_t nap_ns)


cdef int64_t SHORTEST_NAP_NS = 500_000
cdef int64_t LONGEST_NAP_NS = 8_000_000

LINE_BYTES = MPS_LINE
DOOR_BYTES = sizeof(mps_door)


cdef class Meeting:
    """One process's side. The memory, all zero at first, is the door and then two sets of `size` slots in turn.

    A slot is a line, which begins with a code of 8 bytes, and `slot_bytes` of data.
    """

    cdef mps_door *_door
    cdef char *_slots
    cdef size_t _stride
    cdef uint32_t _place, _size, _count
    cdef bint _is_awaited

    def __init__(self, uintptr_t memory, int place, int size, size_t slot_bytes):
        self._door = <mps_door *>memory
        self._slots = <char *>memory + sizeof(mps_door)
        self._stride = MPS_LINE + slot_bytes
        self._place, self._size, self._count, self._is_awaited = place, size, 0, False

    cdef char *slot(self, uint32_t turn, uint32_t place) noexcept nogil:
        return self._slots + (turn * self._size + place) * self._stride

    cdef int wait(self, int64_t spin_ns, object beat) except -1:
        """Until all have come; `beat` is called between naps, where signals are served too."""
        cdef int64_t nap_ns = SHORTEST_NAP_NS
        cdef int is_over
        while self._is_awaited:
            with nogil:
                is_over = mps_wait(self._door, self._count * self._size, spin_ns, nap_ns)
            if is_over:
                self._is_awaited = False
                break
            PyErr_CheckSignals()
            beat()
            spin_ns, nap_ns = 0, min(2 * nap_ns, LONGEST_NAP_NS)
        return 0

    def meet(self, uintptr_t source, size_t nbytes, int64_t code, int64_t spin_ns, object beat):
        """Copy `nbytes` into the own slot and wait for all others: 0 or 1, the set of slots; 2 less if codes differ."""
        cdef uint32_t turn, place
        cdef bint is_same = True
        self.wait(0, beat)  # for the meeting before, if an exception of a signal has ended the wait
        self._count += 1
        turn = self._count & 1
        with nogil:
            (<int64_t *>self.slot(turn, self._place))[0] = code
            memcpy(self.slot(turn, self._place) + MPS_LINE, <const void *>source, nbytes)
            mps_arrive(self._door, self._count * self._size)
        self._is_awaited = True
        self.wait(spin_ns, beat)
        for place in range(self._size):
            is_same &= (<int64_t *>self.slot(turn, place))[0] == code
        return <int>turn if is_same else <int>turn - 2
