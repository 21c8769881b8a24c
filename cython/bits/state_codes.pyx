# cython: autotestdict=False
"""States of optimizers in 8 and 16 bits, in flat host buffers given by address; the loops are in state_loops.h."""

from libc.stdint cimport uint8_t, uint16_t, uint64_t, uintptr_t
from libc.string cimport memset


cdef extern from "state_loops.h" nogil:
    ctypedef struct mps_state_job:
        int what
        float *wide
        uint8_t *codes
        float *scales
        uint16_t *high
        uint16_t *low
        size_t count
        int kind, is_signed, is_drawn
        uint64_t seed, step, start

    int MPS_ENCODE8, MPS_DECODE8, MPS_ROUND, MPS_ENCODE16, MPS_DECODE16, MPS_SPLIT, MPS_JOIN
    void mps_run_state(const mps_state_job *job, int threads)


cdef mps_state_job job_of(int what, uintptr_t wide, size_t count):
    cdef mps_state_job job
    memset(&job, 0, sizeof(job))
    job.what, job.wide, job.count = what, <float *>wide, count
    return job


cdef void take_draw(mps_state_job *job, tuple draw):
    if draw is not None:
        job.is_drawn, job.seed, job.step, job.start = 1, draw[0], draw[1], draw[2]


cdef void run(const mps_state_job *job, int threads):
    with nogil:
        mps_run_state(job, threads)


def encode8(
    uintptr_t codes, uintptr_t scales, uintptr_t x, size_t count, bint is_signed, tuple draw, int threads,
):
    """Write codes and scales of the fp32 numbers at `x`; `draw` is (seed, step, start) of random rounding, or None."""
    cdef mps_state_job job = job_of(MPS_ENCODE8, x, count)
    job.codes, job.scales, job.is_signed = <uint8_t *>codes, <float *>scales, is_signed
    take_draw(&job, draw)
    run(&job, threads)


def decode8(uintptr_t out, uintptr_t codes, uintptr_t scales, size_t count, bint is_signed, int threads):
    """Write the values of codes to `out`."""
    cdef mps_state_job job = job_of(MPS_DECODE8, out, count)
    job.codes, job.scales, job.is_signed = <uint8_t *>codes, <float *>scales, is_signed
    run(&job, threads)


def round(uintptr_t out, int kind, uintptr_t x, size_t count, tuple draw, int threads):
    """Round fp32 numbers at random; kinds: 2 bf16, 3 fp16."""
    cdef mps_state_job job = job_of(MPS_ROUND, x, count)
    job.high, job.kind = <uint16_t *>out, kind
    take_draw(&job, draw)
    run(&job, threads)


cdef halves(int what, uintptr_t wide, uintptr_t high, uintptr_t low, int kind, size_t count, int threads):
    cdef mps_state_job job = job_of(what, wide, count)
    job.high, job.low, job.kind = <uint16_t *>high, <uint16_t *>low, kind
    run(&job, threads)


def encode16(uintptr_t x, uintptr_t out, int kind, size_t count, int threads):
    """Round fp32 numbers to the nearest."""
    halves(MPS_ENCODE16, x, out, 0, kind, count, threads)


def decode16(uintptr_t out, uintptr_t x, int kind, size_t count, int threads):
    """Widen to fp32."""
    halves(MPS_DECODE16, out, x, 0, kind, count, threads)


def split(uintptr_t x, uintptr_t high, uintptr_t low, int kind, size_t count, int threads):
    """Write the nearest 16-bit floats, and those of what is left."""
    halves(MPS_SPLIT, x, high, low, kind, count, threads)


def join(uintptr_t out, uintptr_t high, uintptr_t low, int kind, size_t count, int threads):
    """Write the sums of pairs."""
    halves(MPS_JOIN, out, high, low, kind, count, threads)
