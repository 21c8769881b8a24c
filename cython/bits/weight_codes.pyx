# cython: autotestdict=False
"""Products with matrices of 8- or 4-bit codes on the host, and their values; the loops are in weight_loops.h."""

from libc.stdint cimport uintptr_t


cdef extern from "weight_loops.h" nogil:
    ctypedef struct mps_weight:
        const void *codes
        const float *scales
        const float *offsets
        size_t rows, width, group
        int bits

    ctypedef struct mps_product:
        mps_weight weight
        const void *x
        const void *bias
        void *out
        int kind
        size_t count

    int mps_multiply(const mps_product *job, int threads)
    void mps_expand(const mps_weight *weight, void *out, int kind, int threads)


include "../include/levels.pxi"


cdef mps_weight weight_of(tuple addresses, tuple sizes, int bits):
    cdef mps_weight weight
    weight.codes = <const void *><uintptr_t>addresses[0]
    weight.scales, weight.offsets = <const float *><uintptr_t>addresses[1], <const float *><uintptr_t>addresses[2]
    weight.rows, weight.width, weight.group = sizes
    weight.bits = bits
    return weight


def multiply(
    uintptr_t out, uintptr_t x, uintptr_t bias, size_t count, int kind, tuple weight, tuple sizes, int bits,
    int threads,
):
    """Write `count` rows at `x` times the transposed weight, plus the bias (0: none), to `out`.

    Kinds of all three: 1 fp32, 2 bf16, 3 fp16. `weight` is the addresses of codes, scales and offsets (0: none),
    `sizes` is (rows, elements of a row, elements of a group).
    """
    cdef mps_product job
    cdef int code
    job.weight = weight_of(weight, sizes, bits)
    job.x, job.bias, job.out = <const void *>x, <const void *>bias, <void *>out
    job.kind, job.count = kind, count
    with nogil:
        code = mps_multiply(&job, threads)
    if code != 0:
        raise MemoryError(f"no memory for {count} rows of {job.weight.width} floats beside the codes")


def expand(uintptr_t out, int kind, tuple weight, tuple sizes, int bits, int threads):
    """Write the values of the elements of the weight to `out`."""
    cdef mps_weight job = weight_of(weight, sizes, bits)
    with nogil:
        mps_expand(&job, <void *>out, kind, threads)
