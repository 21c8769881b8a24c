# cython: autotestdict=False
"""Block quantizers over flat host buffers given by address; the loops are in block_loops.h."""

from libc.stdint cimport int8_t, uintptr_t
from libc.stdlib cimport free, malloc


cdef extern from "block_loops.h" nogil:
    ctypedef struct mps_grid:
        size_t pieces, piece, block

    ctypedef struct mps_coded:
        const void **codes
        const float **scales
        int count, bits

    ctypedef struct mps_encoding:
        mps_grid grid
        const void *x
        int kind
        mps_coded addends
        void *codes
        float *scales
        int bits
        int8_t *error
        float *error_scales
        float keep, take

    ctypedef struct mps_decoding:
        mps_grid grid
        mps_coded addends
        void *out
        int kind, is_added
        float scale

    int mps_encode(const mps_encoding *job, int threads)
    void mps_decode(const mps_decoding *job, int threads)


cdef const void **addresses_of(list numbers) except NULL:
    """A C array of addresses, to be freed by the caller; never empty."""
    cdef const void **found = <const void **>malloc(sizeof(void *) * (len(numbers) + 1))
    if found == NULL:
        raise MemoryError(f"no memory for {len(numbers)} addresses")
    for i in range(len(numbers)):
        found[i] = <const void *><uintptr_t>numbers[i]
    return found


cdef int encode_job(mps_encoding *job, tuple grid, tuple target, tuple error, double beta, int threads) except -1:
    cdef int code
    job.grid.pieces, job.grid.piece, job.grid.block = grid
    job.codes, job.scales, job.bits = <void *><uintptr_t>target[0], <float *><uintptr_t>target[1], target[2]
    job.error, job.error_scales = <int8_t *><uintptr_t>error[0], <float *><uintptr_t>error[1]
    job.keep, job.take = <float>beta, <float>(1.0 - beta)
    with nogil:
        code = mps_encode(job, threads)
    if code != 0:
        raise MemoryError(f"no memory for tiles of {2 * job.grid.block} floats in each of {threads} threads")
    return 0


def encode(uintptr_t x, int kind, tuple grid, tuple target, tuple error, double beta, int threads):
    """Quantize the floats at `x`; kinds: 1 fp32, 2 bf16, 3 fp16.

    `grid` is (pieces, elements of a piece, elements of a block), `target` (codes, scales, bits) and
    `error` the addresses of kept codes and scales, or zeros.
    """
    cdef mps_encoding job
    job.x, job.kind = <const void *>x, kind
    job.addends.codes, job.addends.scales, job.addends.count, job.addends.bits = NULL, NULL, 0, 8
    encode_job(&job, grid, target, error, beta, threads)


def encode_sum(
    list codes, list scales, int bits, tuple grid, tuple target, tuple error, double beta, int threads,
):
    """Quantize the sum of coded addends, given by the addresses of their codes and scales."""
    cdef mps_encoding job
    cdef const void **first = addresses_of(codes)
    cdef const void **second = NULL
    try:
        second = addresses_of(scales)
        job.x, job.kind = NULL, 1
        job.addends.codes, job.addends.scales = first, <const float **>second
        job.addends.count, job.addends.bits = <int>len(codes), bits
        encode_job(&job, grid, target, error, beta, threads)
    finally:
        free(first)
        free(second)


def decode(
    uintptr_t out, int kind, list codes, list scales, int bits, tuple grid, bint is_added, double scale, int threads,
):
    """Write `scale` times the sum of coded addends, or of `out` and them, to the floats at `out`."""
    cdef mps_decoding job
    cdef const void **first = addresses_of(codes)
    cdef const void **second = NULL
    try:
        second = addresses_of(scales)
        job.grid.pieces, job.grid.piece, job.grid.block = grid
        job.addends.codes, job.addends.scales = first, <const float **>second
        job.addends.count, job.addends.bits = <int>len(codes), bits
        job.out, job.kind, job.is_added, job.scale = <void *>out, kind, is_added, <float>scale
        with nogil:
            mps_decode(&job, threads)
    finally:
        free(first)
        free(second)
