/* Update rules over states and parameters at rest: each tile is decoded, updated and coded again while it is in the
 * first-level cache, in one pass over memory and one parallel region. */
#ifndef MPISPEED_CODED_LOOPS_H
#define MPISPEED_CODED_LOOPS_H

#include "optim_loops.h"
#include "state_loops.h"

typedef struct {
    mps_state_job code; /* its `what` writes, `read` reads; `wide` alone: fp32 in place */
    int read, is_coded;
} mps_rest;

typedef struct {
    mps_rest rest[3]; /* parameter, states */
    int count;
    const void *grad;
    void *out;
    size_t n;
    int grad_kind, out_kind, rule;
    mps_terms terms;
} mps_coded_update;

/* The same for elements [i, i + n), with fp32 values in `tile`. */
static inline mps_state_job mps_rest_part(const mps_rest *rest, float *tile, int what, size_t i, size_t n) {
    mps_state_job part = rest->code;
    part.what = what;
    part.wide = tile;
    part.count = n;
    part.start += i;
    if (part.codes) {
        part.codes += i;
        part.scales += i / MPS_STATE_BLOCK;
    }
    if (part.high) part.high += i;
    if (part.low) part.low += i;
    return part;
}

static inline void mps_rest_read(const mps_rest *rest, float *tile, size_t i, size_t n) {
    mps_state_job part = mps_rest_part(rest, tile, rest->read, i, n);
    mps_state_range(&part, 0, n);
}

static inline void mps_rest_write(const mps_rest *rest, float *tile, size_t i, size_t n) {
    mps_state_job part = mps_rest_part(rest, tile, rest->code.what, i, n);
    mps_state_range(&part, 0, n);
    if (part.what != MPS_SPLIT) return;
    for (int k = 0; k < 2; k++) { /* joined and split again, as `encode` of native/coded_update.py */
        part.what = k ? MPS_SPLIT : MPS_JOIN;
        mps_state_range(&part, 0, n);
    }
}

static void mps_coded_range(const mps_coded_update *job, size_t begin, size_t end) {
    const mps_loops *loops = mps_choose_loops();
    mps_span span = loops->span[job->rule][job->terms.decay_mode];
    float tiles[3][MPS_TILE] __attribute__((aligned(64))), grad[MPS_TILE] __attribute__((aligned(64)));
    for (size_t i = begin; i < end; i += MPS_TILE) {
        size_t n = end - i < MPS_TILE ? end - i : MPS_TILE;
        float *x[3] = {NULL, NULL, NULL};
        for (int k = 0; k < job->count; k++) {
            const mps_rest *rest = job->rest + k;
            x[k] = rest->is_coded ? tiles[k] : rest->code.wide + i;
            if (rest->is_coded) mps_rest_read(rest, x[k], i, n);
        }
        const float *g = (const float *)job->grad + i;
        if (job->grad_kind != MPS_F32) {
            loops->load(grad, job->grad, job->grad_kind, i, n);
            g = grad;
        }
        span(x[0], x[1], x[2], NULL, g, n, &job->terms);
        for (int k = 0; k < job->count; k++)
            if (job->rest[k].is_coded) mps_rest_write(job->rest + k, x[k], i, n);
        if (!job->out) continue;
        if (job->rest[0].is_coded) mps_rest_read(job->rest, x[0], i, n); /* what was stored */
        loops->store(job->out, x[0], job->out_kind, i, n);
    }
}

static void mps_run_coded(const mps_coded_update *job, int threads) {
    int used = mps_useful_threads(job->n, threads);
    if (used == 1) {
        mps_coded_range(job, 0, job->n);
        return;
    }
    MPS_ON_THREADS(used, k, {
        mps_range r = mps_cut(job->n, MPS_TILE, used, k);
        mps_coded_range(job, r.begin, r.end);
    });
}

#endif
