# cython: autotestdict=False
"""Update rules over states and parameters at rest, given by address; the loops are in coded_loops.h."""

from libc.stdint cimport uint8_t, uint16_t, uint64_t, uintptr_t
from libc.string cimport memset


cdef extern from "coded_loops.h" nogil:
    int MPS_RULE_ADAM, MPS_RULE_LION
    int MPS_DECAYS

    ctypedef struct mps_terms:
        float beta1, rest1, beta2, rest2, step_size, root_scale, eps, decay, grad_scale
        int decay_mode, is_eps_inside
        double full_step, least, most

    ctypedef struct mps_state_job:
        int what
        float *wide
        uint8_t *codes
        float *scales
        uint16_t *high
        uint16_t *low
        int kind, is_signed, is_drawn
        uint64_t seed, step, start

    ctypedef struct mps_rest:
        mps_state_job code
        int read, is_coded

    ctypedef struct mps_coded_update:
        mps_rest rest[3]
        int count
        const void *grad
        void *out
        size_t n
        int grad_kind, out_kind, rule
        mps_terms terms

    int MPS_ENCODE8, MPS_DECODE8, MPS_ROUND, MPS_ENCODE16, MPS_DECODE16, MPS_SPLIT, MPS_JOIN
    void mps_run_coded(const mps_coded_update *job, int threads)


include "../include/levels.pxi"


cdef int take(mps_rest *rest, tuple place, tuple where) except -1:
    """`place` is (form, addresses, kind, is signed, seed or None); forms: 0 fp32, 1 codes, 2 halves, 3 pairs."""
    cdef mps_state_job *code = &rest.code
    form, addresses, code.kind, code.is_signed, seed = place
    first, second = <uintptr_t>addresses[0], <uintptr_t>addresses[1]
    rest.is_coded = form != 0
    code.step, code.start = where
    if seed is not None:
        code.is_drawn, code.seed = 1, seed
    if form == 0:
        code.wide = <float *><uintptr_t>first
    elif form == 1:
        code.what, rest.read = MPS_ENCODE8, MPS_DECODE8
        code.codes, code.scales = <uint8_t *><uintptr_t>first, <float *><uintptr_t>second
    elif form == 2:
        code.what, rest.read = MPS_ENCODE16 if seed is None else MPS_ROUND, MPS_DECODE16
        code.high = <uint16_t *><uintptr_t>first
    elif form == 3:
        code.what, rest.read = MPS_SPLIT, MPS_JOIN
        code.high, code.low = <uint16_t *><uintptr_t>first, <uint16_t *><uintptr_t>second
    else:
        raise ValueError(f"form {form}; forms go from 0 to 3")
    return 0


cdef int pack(mps_terms *t, tuple values) except -1:
    cdef double beta1, beta2
    beta1, beta2, t.full_step, t.root_scale, t.eps, t.decay, mode, t.grad_scale, inside, t.least, t.most = values
    if not 0 <= mode < MPS_DECAYS:
        raise ValueError(f"decay mode {mode}; modes go from 0 to {MPS_DECAYS - 1}")
    t.beta1, t.rest1 = <float>beta1, <float>(1.0 - beta1)
    t.beta2, t.rest2 = <float>beta2, <float>(1.0 - beta2)
    t.step_size, t.decay_mode, t.is_eps_inside = <float>t.full_step, mode, inside
    return 0


def update(int rule, list places, tuple grad, tuple out, size_t count, tuple terms, tuple where, int threads):
    """Update in place: `places` are parameter and states, `grad` and `out` (address, kind), `where` (step, start)."""
    cdef mps_coded_update job
    cdef int k
    if not MPS_RULE_ADAM <= rule <= MPS_RULE_LION or not 2 <= len(places) <= 3:
        raise ValueError(f"rule {rule} with {len(places)} tensors; rules go from {MPS_RULE_ADAM} to {MPS_RULE_LION}")
    memset(&job, 0, sizeof(job))
    job.rule, job.n, job.count = rule, count, <int>len(places)
    for k in range(job.count):
        take(&job.rest[k], places[k], where)
    job.grad, job.grad_kind = <const void *><uintptr_t>grad[0], grad[1]
    job.out, job.out_kind = <void *><uintptr_t>out[0], out[1]
    pack(&job.terms, terms)
    with nogil:
        mps_run_coded(&job, threads)
