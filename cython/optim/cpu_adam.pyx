# cython: autotestdict=False
"""Adam over flat host buffers given by address; the loops are in adam_loops.h."""

from libc.stdint cimport uintptr_t


cdef extern from "clones.h" nogil:
    int mps_vector_level()


cdef extern from "adam_loops.h" nogil:
    ctypedef struct mps_adam_terms:
        float beta1
        float rest1
        float beta2
        float rest2
        float step_size
        float root_scale
        float eps
        float decay
        float grad_scale
        int decay_mode

    int mps_adam(
        float *p, float *m, float *v, const void *g, void *out, size_t n, int grad, int out_kind,
        const mps_adam_terms *t, int threads,
    )


def vector_level():
    """The x86-64 level (4, 3 or 1) of the loops that run on this processor."""
    return mps_vector_level()


def adam(
    uintptr_t master,
    uintptr_t exp_avg,
    uintptr_t exp_avg_sq,
    uintptr_t grad,
    uintptr_t out,
    size_t count,
    int grad_kind,
    int out_kind,
    double beta1,
    double beta2,
    double step_size,
    double root_scale,
    double eps,
    double decay,
    int decay_mode,
    double grad_scale,
    int threads,
):
    """Update `count` fp32 elements in place; kinds: 0 none, 1 fp32, 2 bf16, 3 fp16."""
    cdef mps_adam_terms terms
    cdef int code
    terms.beta1 = <float>beta1
    terms.rest1 = <float>(1.0 - beta1)
    terms.beta2 = <float>beta2
    terms.rest2 = <float>(1.0 - beta2)
    terms.step_size = <float>step_size
    terms.root_scale = <float>root_scale
    terms.eps = <float>eps
    terms.decay = <float>decay
    terms.decay_mode = decay_mode
    terms.grad_scale = <float>grad_scale
    with nogil:
        code = mps_adam(
            <float *>master, <float *>exp_avg, <float *>exp_avg_sq, <const void *>grad, <void *>out, count,
            grad_kind, out_kind, &terms, threads,
        )
    if code != 0:
        raise ValueError(f"no loop for gradient kind {grad_kind} with output kind {out_kind}")
