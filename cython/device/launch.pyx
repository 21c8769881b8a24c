# cython: autotestdict=False
"""Launches of kernels by `cuLaunchKernel`, at an address found at run time: nothing is linked against CUDA.

The arguments of a launch are one packed buffer, as the driver takes it beside `CU_LAUNCH_PARAM_BUFFER_POINTER`. The
driver copies it before it returns.
"""

from cpython.ref cimport PyObject
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy

import ctypes
import os
from functools import partialmethod

import torch

ctypedef int (*launch_entry)(
    void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    void *stream, void **params, void **extra,
) noexcept nogil
ctypedef int (*current_entry)(void **context) noexcept nogil

cdef enum:
    MOST_BYTES = 4096  # of arguments, by the driver
    MOST_POINTERS = 32
    BUFFER_POINTER = 1
    BUFFER_SIZE = 2


cdef inline uintptr_t address_of(object x) except? 1:
    if x is None:
        return 0
    if isinstance(x, int):
        return x
    return x.data_ptr()


def are_aligned(*tensors):
    """True if the data of all these tensors begins at a multiple of 16 bytes; None counts as nothing."""
    cdef uintptr_t bits = 0
    for x in tensors:
        bits |= address_of(x)
    return bits % 16 == 0


cdef inline bint is_like(other, dtype, device) except -1:
    """True for None too."""
    return other is None or (other.dtype is dtype and other.get_device() == device and other.is_contiguous())


def are_alike(x, *others):
    """True if all these tensors are contiguous, of one dtype and on one device; None counts as nothing."""
    cdef object dtype = x.dtype, device = x.get_device()
    if not x.is_contiguous():
        return False
    for other in others:
        if not is_like(other, dtype, device):
            return False
    return True


cdef class Queue:
    """Where launches go: entry points of a driver, the context that they need, and the stream of the moment.

    Args:
        launch: address of `cuLaunchKernel`.
        current: address of `cuCtxGetCurrent`; 0: every thread can launch.
        context: the handle that has to be current.
        stream: gives the handle of the stream for a launch, from `device`.
        device: its argument.
        enter: makes a context manager within which the context is current.
        failed: raises what the code of a failed launch means, from the kernel's name and the code.
    """

    cdef launch_entry launch
    cdef current_entry current
    cdef void *context
    cdef object stream, device, enter, failed

    def __init__(self, uintptr_t launch, uintptr_t current, uintptr_t context, stream, device, enter, failed):
        self.launch, self.current, self.context = <launch_entry>launch, <current_entry>current, <void *>context
        self.stream, self.device, self.enter, self.failed = stream, device, enter, failed

    cdef send(
        self, str name, void *function, unsigned *grid, unsigned *block, unsigned shared, char *bytes_, size_t size,
    ):
        cdef void *now = NULL
        if self.current is not NULL:
            self.current(&now)
            if now != self.context:
                with self.enter():
                    self.put(name, function, grid, block, shared, bytes_, size)
                return
        self.put(name, function, grid, block, shared, bytes_, size)

    cdef put(
        self, str name, void *function, unsigned *grid, unsigned *block, unsigned shared, char *bytes_, size_t size,
    ):
        cdef uintptr_t stream = self.stream(self.device)
        cdef void *extra[5]
        cdef int code
        extra[0], extra[1] = <void *>BUFFER_POINTER, bytes_
        extra[2], extra[3] = <void *>BUFFER_SIZE, &size
        extra[4] = NULL
        with nogil:  # a full queue of the device makes this wait
            code = self.launch(
                function, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, <void *>stream, NULL, extra
            )
        if code:
            self.failed(name, code)

    def run(self, str name, uintptr_t function, tuple grid, tuple threads, unsigned shared, bytes packed):
        """Launch the function with this handle on `packed` arguments."""
        cdef unsigned sizes[6]
        cdef int i
        for i in range(3):
            sizes[i], sizes[3 + i] = grid[i], threads[i]
        self.send(name, <void *>function, sizes, sizes + 3, shared, packed, len(packed))


cdef class Launch:
    """A kernel with its grid, block and packed arguments, of which a call sets the leading pointers.

    A pointer is an integer, a tensor for its data, or None for 0.

    Args:
        queue: where it goes.
        name: of the kernel, for errors.
        function: its handle.
        grid: blocks.
        threads: of a block.
        shared: bytes of dynamic shared memory.
        pointers: how many arguments a call takes.
        tail: what comes after them, packed.
        seed_at: where in the tail the 8 bytes of a seed stand, for `seeded`; -1: nowhere.

    Raises:
        ValueError: more pointers or bytes than a launch takes, or no room for the seed.
    """

    cdef Queue queue
    cdef str name
    cdef void *function
    cdef unsigned sizes[6]
    cdef unsigned shared
    cdef int pointers, seed_at
    cdef bytes tail

    def __init__(
        self, Queue queue, str name, uintptr_t function, tuple grid, tuple threads, unsigned shared, int pointers,
        bytes tail, int seed_at=-1,
    ):
        cdef int i
        if pointers > MOST_POINTERS or 8 * pointers + len(tail) > MOST_BYTES:
            raise ValueError(f"{name}: {pointers} pointers and {len(tail)} bytes are more than a launch takes")
        if seed_at + 8 > len(tail) and seed_at >= 0:
            raise ValueError(f"{name}: no seed fits at byte {seed_at} of {len(tail)}")
        self.seed_at = seed_at
        self.queue, self.name, self.function, self.shared = queue, name, <void *>function, shared
        self.pointers, self.tail = pointers, tail
        for i in range(3):
            self.sizes[i], self.sizes[3 + i] = grid[i], threads[i]

    def __call__(self, *pointers):
        """Launch on these pointers.

        Raises:
            TypeError: another number of them than the kernel takes.
        """
        self.spread(pointers, NULL)

    def seeded(self, uint64_t seed, *pointers):
        """The same with another seed.

        Raises:
            TypeError: another number of pointers than the kernel takes, or it takes no seed.
        """
        if self.seed_at < 0:
            raise TypeError(f"{self.name} was prepared without a place for a seed")
        self.spread(pointers, &seed)

    cdef spread(self, tuple pointers, uint64_t *seed):
        cdef uintptr_t addresses[MOST_POINTERS]
        cdef int i, count = len(pointers)
        if count != self.pointers:
            raise TypeError(f"{self.name} takes {self.pointers} pointers, got {count}")
        for i in range(count):
            addresses[i] = address_of(pointers[i])
        self.go(addresses, count, seed)

    cdef go(self, uintptr_t *addresses, int count, uint64_t *seed=NULL):
        cdef char buffer[MOST_BYTES]
        cdef size_t begin = 8 * <size_t>count, rest = len(self.tail)
        if count != self.pointers:
            raise TypeError(f"{self.name} takes {self.pointers} pointers, got {count}")
        memcpy(buffer, addresses, begin)
        memcpy(buffer + begin, <const char *>self.tail, rest)
        if seed is not NULL:
            memcpy(buffer + begin + self.seed_at, seed, sizeof(uint64_t))
        self.queue.send(self.name, self.function, self.sizes, self.sizes + 3, self.shared, buffer, begin + rest)


include "room.pxi"
include "route.pxi"
include "norm_calls.pxi"
include "face_calls.pxi"
include "layer_calls.pxi"
