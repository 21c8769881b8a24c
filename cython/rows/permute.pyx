# cython: autotestdict=False
"""Rows of host matrices picked, put, spread, summed and multiplied by index; the loops are in row_loops.h."""

from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.string cimport memset


cdef extern from "row_loops.h" nogil:
    ctypedef struct mps_row_job:
        int what, kind
        void *out
        const void *x
        const void *y
        const int64_t *index
        const void *weights
        const uint8_t *named
        size_t tokens, choices, rows, width, element

    int MPS_DO_PICK, MPS_DO_COMBINE, MPS_DO_SPREAD, MPS_DO_DOT, MPS_DO_MERGE
    ptrdiff_t mps_wrong_place(const int64_t *index, size_t n, size_t rows, int may_drop, uint8_t *named)
    void mps_run_rows(const mps_row_job *job, int threads)


def wrong_place(uintptr_t index, size_t count, size_t rows, bint may_drop, uintptr_t named):
    """The first of `count` places that names none of `rows` rows, or one that was named before; -1: there is none.

    `named` is the address of a zero for each row, which becomes 1 for rows that are named; 0: rows may be named often.
    """
    return mps_wrong_place(<const int64_t *>index, count, rows, may_drop, <uint8_t *>named)


cdef mps_row_job job_of(int what, uintptr_t out, uintptr_t x, uintptr_t index, tuple sizes):
    """`sizes` is (tokens, choices, rows, elements of a row, bytes of an element)."""
    cdef mps_row_job job
    memset(&job, 0, sizeof(job))
    job.what, job.out, job.x, job.index = what, <void *>out, <const void *>x, <const int64_t *>index
    job.tokens, job.choices, job.rows, job.width, job.element = sizes
    return job


def pick(uintptr_t out, uintptr_t x, uintptr_t index, tuple sizes, int threads):
    """Copy the rows of `x` that `index` names to `out`, one after the other."""
    cdef mps_row_job job = job_of(MPS_DO_PICK, out, x, index, sizes)
    with nogil:
        mps_run_rows(&job, threads)


def merge(uintptr_t out, uintptr_t x, uintptr_t rest, uintptr_t index, tuple sizes, int threads):
    """Copy to each row of `out` the row of `x` that `index` names, or where that is negative its own of `rest`.

    Rows of an address that is 0 are zero.
    """
    cdef mps_row_job job = job_of(MPS_DO_MERGE, out, x, index, sizes)
    job.y = <const void *>rest
    with nogil:
        mps_run_rows(&job, threads)


def combine(uintptr_t out, uintptr_t x, uintptr_t index, uintptr_t weights, tuple sizes, int kind, int threads):
    """Write for each token the weighted sum of its rows of `x` to `out`; no weights (0) are ones.

    Kinds: 1 fp32, 2 bf16, 3 fp16, 4 fp64.
    """
    cdef mps_row_job job = job_of(MPS_DO_COMBINE, out, x, index, sizes)
    job.weights, job.kind = <const void *>weights, kind
    with nogil:
        mps_run_rows(&job, threads)


def spread(
    uintptr_t out, uintptr_t x, uintptr_t index, uintptr_t weights, uintptr_t named, tuple sizes, int kind, int threads,
):
    """Write the weighted tokens of `x` to their rows of `out`, and zeros to rows whose number at `named` is 0."""
    cdef mps_row_job job = job_of(MPS_DO_SPREAD, out, x, index, sizes)
    job.weights, job.named, job.kind = <const void *>weights, <const uint8_t *>named, kind
    with nogil:
        mps_run_rows(&job, threads)


def dot(uintptr_t out, uintptr_t x, uintptr_t y, uintptr_t index, tuple sizes, int kind, int threads):
    """Write the product of each token of `y` with each of its rows of `x` to `out`."""
    cdef mps_row_job job = job_of(MPS_DO_DOT, out, x, index, sizes)
    job.y, job.kind = <const void *>y, kind
    with nogil:
        mps_run_rows(&job, threads)
