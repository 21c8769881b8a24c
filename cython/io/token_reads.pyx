# cython: autotestdict=False
"""Rows of token ids read by position and widened into host matrices; the loops are in token_loops.h."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t


cdef extern from "token_loops.h" nogil:
    const int MPS_TOKENS_PAST_END
    const int MPS_TOKENS_NO_PLACE

    ctypedef struct mps_token_job:
        int handle
        uint64_t offset, total
        size_t itemsize
        const int64_t *starts
        const int64_t *counts
        size_t rows, length
        void *ids
        void *labels
        size_t wide
        int64_t fill, label_fill
        size_t shift
        size_t failed_row

    int mps_read_tokens(mps_token_job *job)


def read(
    tuple table, const int64_t[::1] starts, const int64_t[::1] counts, size_t length, size_t wide, uintptr_t ids,
    int64_t fill, uintptr_t labels, int64_t label_fill, size_t shift,
):
    """Read rows and widen them, without the interpreter lock; (code, row that failed).

    Codes: 0, an errno, -1 the file ends within the row, -2 the row is not within the table.

    `table` is (descriptor, offset in the file, elements, bytes of an element), `length` the elements of a row of `ids`
    and `labels`, `wide` the bytes of one; the address `labels` may be 0.
    """
    cdef mps_token_job job
    cdef int code
    job.handle, job.offset, job.total, job.itemsize = table
    job.rows, job.length = starts.shape[0], length
    if job.rows == 0:
        return 0, 0
    job.starts, job.counts = &starts[0], &counts[0]
    job.ids, job.labels, job.wide = <void *>ids, <void *>labels, wide
    job.fill, job.label_fill, job.shift, job.failed_row = fill, label_fill, shift, 0
    with nogil:
        code = mps_read_tokens(&job)
    return code, job.failed_row
