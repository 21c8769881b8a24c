# cython: autotestdict=False
"""Transfers between file descriptors and memory given by address, in threads that need no interpreter."""

from libc.errno cimport errno
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport strerror
from posix.types cimport pid_t


cdef extern from "block_io_pool.h" nogil:
    const int MPS_IO_PAST_END

    ctypedef struct mps_transfer:
        int error, is_done
        uint64_t error_at
        double began, ended

    ctypedef struct mps_io_options:
        int kind, threads, depth, is_single, is_overlapped
        uint64_t block

    ctypedef struct mps_pool:
        pid_t owner
        uint64_t[4] counters

    ctypedef struct mps_ring:
        pass

    int mps_ring_open(mps_ring *ring, int kind, int depth)
    void mps_ring_close(mps_ring *ring)
    mps_pool *mps_pool_new(const mps_io_options *options)
    void mps_pool_close(mps_pool *pool)
    void mps_pool_free(mps_pool *pool)
    mps_transfer *mps_transfer_new(
        int direct, int plain, int is_write, char *memory, uint64_t length, uint64_t offset, int count,
    )
    int mps_is_done(const mps_transfer *t)
    int mps_submit(mps_pool *pool, mps_transfer *t)
    int mps_wait(mps_pool *pool, mps_transfer *t, double seconds)
    void mps_inject(int kind, uint64_t nth, int error, uint64_t nbytes)
    void mps_inject_latency(double seconds)


cdef extern from "<unistd.h>" nogil:
    pid_t getpid()


cdef class Job:
    """A submitted transfer. Its owner keeps it, the memory and the descriptors until it is done."""

    cdef mps_transfer *transfer
    cdef Pool pool

    def __dealloc__(self):
        if self.transfer != NULL and mps_is_done(self.transfer):
            free(self.transfer)

    def is_done(self):
        """Whether nothing of it is under way any more."""
        return mps_is_done(self.transfer) != 0

    def wait(self, double seconds):
        """Wait at most so many seconds, below 1, without the interpreter lock; whether it is done."""
        cdef int is_done
        with nogil:
            is_done = mps_wait(self.pool.pool, self.transfer, seconds)
        return is_done != 0

    def error(self):
        """(errno, offset in the file) of the first failure of a transfer that is done.

        The errno is 0 without a failure and -1 when the file ends before the range does.
        """
        return self.transfer.error, self.transfer.error_at

    def times(self):
        """Seconds of CLOCK_MONOTONIC at which a transfer that is done was asked for, and was done."""
        return self.transfer.began, self.transfer.ended


cdef class Pool:
    """Threads that perform transfers; kinds: 0 system calls, 1 libaio, 2 io_uring."""

    cdef mps_pool *pool

    def __cinit__(self, int kind, int threads, int depth, uint64_t block, bint is_single, bint is_overlapped):
        cdef mps_io_options options
        options.kind, options.threads, options.depth, options.block = kind, threads, depth, block
        options.is_single, options.is_overlapped = is_single, is_overlapped
        self.pool = mps_pool_new(&options)
        if self.pool == NULL:
            raise OSError(errno, f"{threads} I/O threads cannot be started: {strerror(errno).decode()}")

    def __dealloc__(self):
        mps_pool_free(self.pool)

    def is_foreign(self):
        """Whether this process is a fork of the one whose threads these are."""
        return self.pool.owner != getpid()

    def submit(
        self, int direct, int plain, bint is_write, uintptr_t address, uint64_t length, uint64_t offset, int parts,
    ):
        """Queue a transfer, cut into at most `parts`; None if the pool is closed."""
        cdef Job job = Job.__new__(Job)
        cdef int is_open
        job.pool = self
        job.transfer = mps_transfer_new(direct, plain, is_write, <char *>address, length, offset, parts)
        if job.transfer == NULL:
            raise MemoryError("no memory for a transfer")
        with nogil:
            is_open = mps_submit(self.pool, job.transfer)
        if not is_open:
            job.transfer.is_done = 1
            return None
        return job

    def counters(self):
        """Bytes and requests read, bytes and requests written."""
        return self.pool.counters[0], self.pool.counters[1], self.pool.counters[2], self.pool.counters[3]

    def close(self):
        """Wait for what is queued and end the threads; in a forked process nothing happens."""
        with nogil:
            mps_pool_close(self.pool)


def probe_kernel(int kind):
    """Errno with which the kernel refuses a queue of this kind to this process; 0 if it grants it."""
    cdef mps_ring ring
    cdef int code
    with nogil:
        code = mps_ring_open(&ring, kind, 1)
        if code == 0:
            mps_ring_close(&ring)
    return code


def inject(str op, uint64_t nth, int error, uint64_t nbytes):
    """For tests: the nth call from now of this process comes short at `nbytes` (0: does not), then fails.

    Calls: "read", "write"; "submit" and "reap" of a queue of the kernel, which only fail.
    """
    mps_inject(("read", "write", "submit", "reap").index(op), nth, error, nbytes)


def inject_latency(double seconds):
    """For tests: every request of this process takes so much longer."""
    mps_inject_latency(seconds)
