# cython: autotestdict=False
"""Signs of flat host buffers given by address, packed eight to a byte; the loops are in one_bit_loops.h."""

from libc.stdint cimport uint8_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset


cdef extern from "one_bit_loops.h" nogil:
    ctypedef struct mps_mix:
        const void *x
        const void *grad
        int x_kind, grad_kind
        float keep, take

    ctypedef struct mps_parts:
        const uint8_t **bits
        const float *weights
        int count

    ctypedef struct mps_coding:
        int what
        float *error
        mps_mix mix
        mps_parts parts
        uint8_t *bits
        float scale
        void *out
        int out_kind

    int MPS_DO_MIX, MPS_DO_SUM, MPS_DO_ENCODE, MPS_DO_DECODE
    void mps_one_bit_init()
    int mps_code(const mps_coding *job, size_t n, int threads, double *values)


mps_one_bit_init()


cdef list run(mps_coding *job, size_t count, int threads):
    cdef double[68] values  # MPS_PARTIALS
    cdef int number
    with nogil:
        number = mps_code(job, count, threads, values)
    return [values[i] for i in range(number)]


def mix(uintptr_t error, tuple x, tuple grad, size_t count, int threads):
    """Add keep * x + take * grad to `error`; doubles whose exact sum is that of the squares of the result.

    `x` and `grad` are (address, kind, factor), an address of 0 is no gradient; kinds: 1 fp32, 2 bf16, 3 fp16.
    """
    cdef mps_coding job
    memset(&job, 0, sizeof(job))
    job.what, job.error = MPS_DO_MIX, <float *>error
    job.mix.x, job.mix.x_kind, job.mix.keep = <const void *><uintptr_t>x[0], x[1], x[2]
    job.mix.grad, job.mix.grad_kind, job.mix.take = <const void *><uintptr_t>grad[0], grad[1], grad[2]
    return run(&job, count, threads)


def add_parts(uintptr_t error, list bits, list weights, size_t count, int threads):
    """Add the decoded parts (addresses, weights) to `error`; squares as in `mix`. `count` is a multiple of 8."""
    cdef mps_coding job
    cdef int number = <int>len(bits)
    cdef const uint8_t **addresses = <const uint8_t **>malloc(sizeof(void *) * (number + 1))
    cdef float *factors = <float *>malloc(sizeof(float) * (number + 1))
    if addresses == NULL or factors == NULL:
        free(addresses)
        free(factors)
        raise MemoryError(f"no memory for {number} addresses")
    try:
        for i in range(number):
            addresses[i], factors[i] = <const uint8_t *><uintptr_t>bits[i], weights[i]
        memset(&job, 0, sizeof(job))
        job.what, job.error = MPS_DO_SUM, <float *>error
        job.parts.bits, job.parts.weights, job.parts.count = addresses, factors, number
        return run(&job, count, threads)
    finally:
        free(addresses)
        free(factors)


def encode(uintptr_t bits, uintptr_t error, float scale, size_t count, int threads):
    """Write the signs of `error` to `bits` and take scale times them away; `count` is a multiple of 8."""
    cdef mps_coding job
    memset(&job, 0, sizeof(job))
    job.what, job.bits, job.error, job.scale = MPS_DO_ENCODE, <uint8_t *>bits, <float *>error, scale
    run(&job, count, threads)


def decode(uintptr_t out, int kind, uintptr_t bits, float scale, size_t count, int threads):
    """Write scale times the signs to `out`."""
    cdef mps_coding job
    memset(&job, 0, sizeof(job))
    job.what, job.bits, job.scale = MPS_DO_DECODE, <uint8_t *>bits, scale
    job.out, job.out_kind = <void *>out, kind
    run(&job, count, threads)
