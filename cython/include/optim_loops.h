/* Update rules over many flat tensors in one call.
 *
 * A task is one tensor with its states, gradient and low-precision copy, each in its own dtype. Loops work in
 * fp32: a tensor of 16 bits passes through a tile that stays in the first-level cache. Threads share
 * the elements of all tasks evenly, so that many small tensors cost no more than one large one. */
#ifndef MPISPEED_OPTIM_LOOPS_H
#define MPISPEED_OPTIM_LOOPS_H

#include <stdlib.h>

#include "halves.h"
#include "levels.h"
#include "ranges.h"
#include "rules.h"

enum { MPS_NONE = 0, MPS_F32 = 1, MPS_BF16 = 2, MPS_F16 = 3 };

#define MPS_TILE MPS_GRAIN /* elements; also the block of LAMB's sums, at whose multiples threads are cut */

typedef struct {
    void *p, *a, *b, *c; /* parameter and states; the third is only read */
    const void *g;
    void *out;
    size_t n;
    int p_kind, state_kind, g_kind, out_kind;
    int lot; /* which terms */
} mps_task;

typedef double mps_double8 __attribute__((vector_size(64)));
typedef void (*mps_span)(float *p, float *a, float *b, float *c, const float *g, size_t n, const mps_terms *t);

typedef struct {
    mps_span span[MPS_RULES][MPS_DECAYS];
    void (*lamb_sums)(const float *p, const float *m, const float *v, size_t n, const mps_terms *t, double *sums);
    void (*lamb_apply)(float *p, const float *m, const float *v, size_t n, const mps_terms *t, float factor);
    void (*load)(float *to, const void *from, int kind, size_t at, size_t n);
    void (*store)(void *to, const float *from, int kind, size_t at, size_t n);
} mps_loops;

#define MPS_TARGET
#define MPS_SUFFIX v1
#include "rule_spans.h"
#undef MPS_TARGET
#undef MPS_SUFFIX
#if MPS_HAS_LEVELS
#define MPS_TARGET MPS_TARGET_V3
#define MPS_SUFFIX v3
#include "rule_spans.h"
#undef MPS_TARGET
#undef MPS_SUFFIX
#define MPS_TARGET MPS_TARGET_V4
#define MPS_SUFFIX v4
#include "rule_spans.h"
#undef MPS_TARGET
#undef MPS_SUFFIX
#endif

static inline const mps_loops *mps_choose_loops(void) {
#if MPS_HAS_LEVELS
    int level = mps_level();
    return level == 4 ? &mps_loops_v4 : level == 3 ? &mps_loops_v3 : &mps_loops_v1;
#else
    return &mps_loops_v1;
#endif
}

typedef struct {
    const mps_loops *loops;
    const mps_task *tasks;
    size_t count, total; /* tasks, elements */
    int rule;
    const mps_terms *terms;
    double *sums;         /* LAMB: two for each tile of each task */
    const float *factors; /* LAMB: of each task */
} mps_job;

/* A tensor as fp32: in place, or in the tile. */
static inline float *mps_open(const mps_job *job, float *tile, const void *x, int kind, size_t at, size_t n) {
    if (kind == MPS_F32) return (float *)x + at;
    job->loops->load(tile, x, kind, at, n);
    return tile;
}

static inline void mps_close(const mps_job *job, void *x, const float *values, int kind, size_t at, size_t n) {
    if (kind != MPS_F32) job->loops->store(x, values, kind, at, n);
}

static inline float *mps_from(void *x, size_t at) { return x ? (float *)x + at : NULL; }

/* The local update of 0/1 Adam leaves the parameter as it is and gives the new one to `out` alone. */
static void mps_update_range(const mps_job *job, const mps_task *task, size_t begin, size_t end) {
    const mps_terms *t = job->terms + task->lot;
    mps_span span = job->loops->span[job->rule][t->decay_mode];
    int is_kept = job->rule == MPS_RULE_ZERO_ONE_LOCAL;
    if (task->p_kind == MPS_F32 && task->state_kind == MPS_F32 && task->g_kind == MPS_F32 && !task->out && !is_kept) {
        span((float *)task->p + begin, (float *)task->a + begin, mps_from(task->b, begin), mps_from(task->c, begin),
             (const float *)task->g + begin, end - begin, t);
        return;
    }
    float p_tile[MPS_TILE], a_tile[MPS_TILE], b_tile[MPS_TILE], c_tile[MPS_TILE], g_tile[MPS_TILE];
    for (size_t i = begin; i < end; i += MPS_TILE) {
        size_t n = end - i < MPS_TILE ? end - i : MPS_TILE;
        float *p = p_tile;
        if (is_kept) job->loops->load(p, task->p, task->p_kind, i, n);
        else p = mps_open(job, p_tile, task->p, task->p_kind, i, n);
        float *a = mps_open(job, a_tile, task->a, task->state_kind, i, n);
        float *b = task->b ? mps_open(job, b_tile, task->b, task->state_kind, i, n) : NULL;
        float *c = task->c ? mps_open(job, c_tile, task->c, task->state_kind, i, n) : NULL;
        span(p, a, b, c, mps_open(job, g_tile, task->g, task->g_kind, i, n), n, t);
        if (!is_kept) mps_close(job, task->p, p, task->p_kind, i, n);
        mps_close(job, task->a, a, task->state_kind, i, n);
        if (task->b) mps_close(job, task->b, b, task->state_kind, i, n);
        if (task->out) job->loops->store(task->out, p, task->out_kind, i, n);
    }
}

/* First half of LAMB: moments, and sums over tiles. The direction is that of the moments as stored. */
static void mps_lamb_first(const mps_job *job, const mps_task *task, size_t begin, size_t end, double *sums) {
    const mps_terms *t = job->terms + task->lot;
    mps_span span = job->loops->span[MPS_RULE_LAMB][t->decay_mode];
    float p_tile[MPS_TILE], m_tile[MPS_TILE], v_tile[MPS_TILE], g_tile[MPS_TILE];
    for (size_t i = begin; i < end; i += MPS_TILE) {
        size_t n = end - i < MPS_TILE ? end - i : MPS_TILE;
        float *p = mps_open(job, p_tile, task->p, task->p_kind, i, n);
        float *m = mps_open(job, m_tile, task->a, task->state_kind, i, n);
        float *v = mps_open(job, v_tile, task->b, task->state_kind, i, n);
        span(p, m, v, NULL, mps_open(job, g_tile, task->g, task->g_kind, i, n), n, t);
        if (task->state_kind != MPS_F32) {
            mps_close(job, task->a, m, task->state_kind, i, n);
            mps_close(job, task->b, v, task->state_kind, i, n);
            job->loops->load(m, task->a, task->state_kind, i, n);
            job->loops->load(v, task->b, task->state_kind, i, n);
        }
        job->loops->lamb_sums(p, m, v, n, t, sums + 2 * (i / MPS_TILE));
    }
}

static void mps_lamb_second(const mps_job *job, const mps_task *task, size_t begin, size_t end, float factor) {
    const mps_terms *t = job->terms + task->lot;
    float p_tile[MPS_TILE], m_tile[MPS_TILE], v_tile[MPS_TILE];
    for (size_t i = begin; i < end; i += MPS_TILE) {
        size_t n = end - i < MPS_TILE ? end - i : MPS_TILE;
        float *p = mps_open(job, p_tile, task->p, task->p_kind, i, n);
        const float *m = mps_open(job, m_tile, task->a, task->state_kind, i, n);
        const float *v = mps_open(job, v_tile, task->b, task->state_kind, i, n);
        job->loops->lamb_apply(p, m, v, n, t, factor);
        mps_close(job, task->p, p, task->p_kind, i, n);
        if (task->out) job->loops->store(task->out, p, task->out_kind, i, n);
    }
}

static inline size_t mps_tiles(size_t n) { return n / MPS_TILE + (n % MPS_TILE != 0); }

/* Where the cut at element `at` of all tasks falls in a task of n elements that begins at `start`. */
static inline size_t mps_cut_inside(size_t at, size_t start, size_t n) {
    if (at <= start) return 0;
    return at - start >= n ? n : (at - start) / MPS_GRAIN * MPS_GRAIN;
}

enum { MPS_PASS_UPDATE = 0, MPS_PASS_LAMB_FIRST = 1, MPS_PASS_LAMB_SECOND = 2 };

static void mps_run_part(const mps_job *job, int pass, int parts, int index) {
    size_t from = job->total / (size_t)parts * (size_t)index + job->total % (size_t)parts * (size_t)index / (size_t)parts;
    size_t next = (size_t)index + 1;
    size_t to = job->total / (size_t)parts * next + job->total % (size_t)parts * next / (size_t)parts;
    size_t start = 0, tile = 0;
    for (size_t k = 0; k < job->count && start < to; k++) {
        const mps_task *task = job->tasks + k;
        size_t begin = mps_cut_inside(from, start, task->n), end = mps_cut_inside(to, start, task->n);
        if (begin < end) {
            if (pass == MPS_PASS_UPDATE) mps_update_range(job, task, begin, end);
            else if (pass == MPS_PASS_LAMB_FIRST) mps_lamb_first(job, task, begin, end, job->sums + 2 * tile);
            else mps_lamb_second(job, task, begin, end, job->factors[k]);
        }
        start += task->n;
        tile += mps_tiles(task->n);
    }
}

static void mps_run_pass(const mps_job *job, int pass, int threads) {
    int used = mps_useful_threads(job->total, threads);
    if (used == 1) {
        mps_run_part(job, pass, 1, 0);
        return;
    }
    MPS_ON_THREADS(used, k, mps_run_part(job, pass, used, k));
}

/* Of each task the sums of squares of parameter and direction, added in the order of the tiles. */
static void mps_join_sums(const mps_job *job, double *joined) {
    size_t tile = 0;
    for (size_t k = 0; k < job->count; k++) {
        size_t tiles = mps_tiles(job->tasks[k].n);
        double weights = 0.0, directions = 0.0;
        for (size_t j = tile; j < tile + tiles; j++) {
            weights += job->sums[2 * j];
            directions += job->sums[2 * j + 1];
        }
        joined[2 * k] = weights;
        joined[2 * k + 1] = directions;
        tile += tiles;
    }
}

static double mps_trust(double weights, double directions, const mps_terms *t) {
    if (weights == 0.0 || directions == 0.0) return 1.0;
    double ratio = sqrt(weights) / sqrt(directions);
    ratio = ratio > t->most ? t->most : ratio;
    return ratio < t->least ? t->least : ratio; /* NaN stays */
}

/* What to do of LAMB: all of it, or one half, where norms of cut parameters are agreed on in between. */
enum { MPS_BOTH_HALVES = 0, MPS_FIRST_HALF = 1, MPS_SECOND_HALF = 2 };

static int mps_update_lamb(mps_job *job, size_t tiles, int threads, int half, double *found) {
    size_t count = job->count;
    double *sums = malloc((2 * tiles + 2 * count + 1) * sizeof *sums);
    float *factors = malloc((count + 1) * sizeof *factors);
    int code = sums && factors ? 0 : -1;
    if (!code) {
        double *joined = half == MPS_FIRST_HALF ? found : sums + 2 * tiles;
        job->sums = sums;
        job->factors = factors;
        if (half != MPS_SECOND_HALF) {
            mps_run_pass(job, MPS_PASS_LAMB_FIRST, threads);
            mps_join_sums(job, joined);
        }
        if (half != MPS_FIRST_HALF) {
            for (size_t k = 0; k < count; k++) {
                const mps_terms *t = job->terms + job->tasks[k].lot;
                if (half == MPS_BOTH_HALVES) found[k] = mps_trust(joined[2 * k], joined[2 * k + 1], t);
                factors[k] = (float)(t->full_step * found[k]);
            }
            mps_run_pass(job, MPS_PASS_LAMB_SECOND, threads);
        }
    }
    free(sums);
    free(factors);
    return code;
}

/* Update all tasks. `found` is of LAMB only: receives the trust ratio of each task; or, of the first half, two sums of
   each; the second half takes the ratios from it. Returns -1 without memory for the sums. */
static inline int mps_update(const mps_task *tasks, size_t count, int rule, const mps_terms *terms, int threads, int half,
                             double *found) {
    mps_job job = {mps_choose_loops(), tasks, count, 0, rule, terms, NULL, NULL};
    size_t tiles = 0;
    for (size_t k = 0; k < count; k++) {
        job.total += tasks[k].n;
        tiles += mps_tiles(tasks[k].n);
    }
    if (rule == MPS_RULE_LAMB) return mps_update_lamb(&job, tiles, threads, half, found);
    mps_run_pass(&job, MPS_PASS_UPDATE, threads);
    return 0;
}

#endif
