# cython: autotestdict=False
"""Loops of a transformer layer on the host, for inference; they are in thin_loops.h and layer_loops.h.

Kinds: 1 fp32, 2 bf16, 3 fp16. Addresses are those of contiguous tensors; 0 where there is none.
"""

from libc.stdint cimport uintptr_t
from libc.string cimport memset


cdef extern from "thin_loops.h" nogil:
    ctypedef struct mps_thin_job:
        int kind
        void *out
        const void *x
        const void *weight
        const void *bias
        size_t rows, outputs, inputs

    void mps_run_thin(const mps_thin_job *job, int threads)


cdef extern from "layer_loops.h" nogil:
    ctypedef struct mps_norm_job:
        int kind, is_centered
        void *y
        void *total
        const void *x
        const void *residual
        const void *weight
        const void *bias
        size_t rows, cols
        float eps

    ctypedef struct mps_gate_job:
        int kind, what
        void *out
        const void *x
        const void *other
        size_t n

    ctypedef struct mps_rotary_job:
        int kind, is_halved
        void *x
        const void *cosine
        const void *sine
        size_t rows, stride, heads, size, half, table_rows, table_stride

    ctypedef struct mps_attend_job:
        int kind, mask_kind
        void *out
        const void *q
        const void *k
        const void *v
        const void *mask
        const float *slopes
        size_t batch, heads, key_heads, keys, size
        size_t k_batch, k_head, k_key, v_batch, v_head, v_key, mask_batch
        float scale

    int MPS_DO_NORM, MPS_DO_GATE, MPS_DO_ROTARY
    void mps_run_layer(int what, int kind, const void *job, size_t n, size_t cost, size_t grain, int threads)
    int mps_run_attend(const mps_attend_job *job, int threads)


def thin(uintptr_t out, uintptr_t x, uintptr_t weight, uintptr_t bias, size_t rows, size_t outputs, size_t inputs,
         int kind, int threads):
    """Write x [rows, inputs] times the transposed weight [outputs, inputs], and the bias, to `out`; fp32 and bf16."""
    cdef mps_thin_job job
    job.kind, job.out, job.x = kind, <void *>out, <const void *>x
    job.weight, job.bias = <const void *>weight, <const void *>bias
    job.rows, job.outputs, job.inputs = rows, outputs, inputs
    with nogil:
        mps_run_thin(&job, threads)


def norm(uintptr_t y, uintptr_t total, uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t bias, size_t rows,
         size_t cols, float eps, bint is_centered, int kind, int threads):
    """Write x + residual to `total`, and its norm to `y`."""
    cdef mps_norm_job job
    job.kind, job.is_centered, job.y, job.total = kind, is_centered, <void *>y, <void *>total
    job.x, job.residual = <const void *>x, <const void *>residual
    job.weight, job.bias = <const void *>weight, <const void *>bias
    job.rows, job.cols, job.eps = rows, cols, eps
    with nogil:
        mps_run_layer(MPS_DO_NORM, kind, &job, rows, cols, 1, threads)


def gate(uintptr_t out, uintptr_t x, uintptr_t other, size_t n, int what, int kind, int threads):
    """Write f(x) * other to `out`; f is 0 nothing, 1 ReLU, 2 GELU in the tanh form, 3 the exact one, 4 SiLU."""
    cdef mps_gate_job job
    job.kind, job.what, job.out, job.n = kind, what, <void *>out, n
    job.x, job.other = <const void *>x, <const void *>other
    with nogil:
        mps_run_layer(MPS_DO_GATE, kind, &job, n, 4, 64, threads)


def rotary(uintptr_t x, uintptr_t cosine, uintptr_t sine, size_t rows, size_t stride, size_t heads, size_t size,
           size_t half, size_t table_rows, size_t table_stride, bint is_halved, int kind, int threads):
    """Turn the first 2 * half elements of each head of `x` in place."""
    cdef mps_rotary_job job
    job.kind, job.is_halved, job.x = kind, is_halved, <void *>x
    job.cosine, job.sine = <const void *>cosine, <const void *>sine
    job.rows, job.stride, job.heads, job.size, job.half = rows, stride, heads, size, half
    job.table_rows, job.table_stride = table_rows, table_stride
    with nogil:
        mps_run_layer(MPS_DO_ROTARY, kind, &job, rows, heads * size, 1, threads)


def attend(uintptr_t out, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t mask, int mask_kind, size_t mask_batch,
           uintptr_t slopes, tuple sizes, tuple k_strides, tuple v_strides, float scale, int kind, int threads):
    """Write the attention of one query per head to `out`.

    `sizes` is (batch, heads, key heads, keys, size of a head); strides are (batch, head, key), in elements.

    Raises:
        MemoryError: there is no room for the scores.
    """
    cdef mps_attend_job job
    cdef int is_done
    memset(&job, 0, sizeof(job))
    job.kind, job.mask_kind, job.mask_batch, job.scale = kind, mask_kind, mask_batch, scale
    job.out, job.q, job.k, job.v = <void *>out, <const void *>q, <const void *>k, <const void *>v
    job.mask, job.slopes = <const void *>mask, <const float *>slopes
    job.batch, job.heads, job.key_heads, job.keys, job.size = sizes
    job.k_batch, job.k_head, job.k_key = k_strides
    job.v_batch, job.v_head, job.v_key = v_strides
    with nogil:
        is_done = mps_run_attend(&job, threads)
    if not is_done:
        raise MemoryError("attention: no memory for the scores of one head")
