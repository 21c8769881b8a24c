/* Passes of a transformer layer between its matrix products: norms, activations, rotary embedding, attention of one
 * query to cached keys. Arithmetic is fp32, every stored value is rounded once. */
#ifndef MPISPEED_LAYER_LOOPS_H
#define MPISPEED_LAYER_LOOPS_H

#include <stdlib.h>

#include "lanes.h"
#include "ranges.h"

enum { MPS_SAME, MPS_RELU, MPS_GELU_TANH, MPS_GELU_ERF, MPS_SILU };

/* Kinds are 1 fp32, 2 bf16, 3 fp16. */
typedef struct {
    int kind, is_centered;      /* centered: the mean is subtracted */
    void *y, *total;            /* [rows, cols]; total: x + residual, NULL without one */
    const void *x, *residual, *weight, *bias; /* weight and bias [cols], or NULL */
    size_t rows, cols;
    float eps;
} mps_norm_job;

typedef struct {
    int kind, what;
    void *out;                  /* may be x or other */
    const void *x, *other;      /* out = f(x) * other; NULL: f(x) */
    size_t n;
} mps_gate_job;

typedef struct {
    int kind, is_halved;        /* halved: i and i + half are a pair, else 2 i and 2 i + 1 */
    void *x;                    /* [rows, heads, size], `stride` elements from row to row; in place */
    const void *cosine, *sine;  /* [table_rows, half], `table_stride` elements from row to row */
    size_t rows, stride, heads, size, half, table_rows, table_stride;
} mps_rotary_job;

typedef struct {
    int kind, mask_kind;        /* of the mask: 0 none, 1 booleans, 2 addends of `kind` */
    void *out;                  /* [batch, heads, size] */
    const void *q, *k, *v;      /* q as out; k and v [batch, key_heads, keys, size] by their strides */
    const void *mask;           /* [batch, keys], `mask_batch` elements from one to the next */
    const float *slopes;        /* [heads], of ALiBi, times the place of a key; NULL: none */
    size_t batch, heads, key_heads, keys, size;
    size_t k_batch, k_head, k_key, v_batch, v_head, v_key, mask_batch;
    float scale;
} mps_attend_job;

/* -- norms -------------------------------------------------------------------------------------------------------- */

#define MPS_DEFINE_NORM(SUFFIX, IN, LANES, LOAD, STORE)                                                                \
    MPS_CLONES static void mps_norm_##SUFFIX(const mps_norm_job *job, size_t begin, size_t end) {                      \
        const size_t cols = job->cols;                                                                                 \
        const IN *weight = (const IN *)job->weight, *bias = (const IN *)job->bias;                                     \
        for (size_t row = begin; row < end; row++) {                                                                   \
            const IN *x = (const IN *)job->x + row * cols;                                                             \
            IN *y = (IN *)job->y + row * cols;                                                                         \
            if (job->residual) {                                                                                       \
                const IN *residual = (const IN *)job->residual + row * cols;                                           \
                IN *total = (IN *)job->total + row * cols;                                                             \
                MPS_SIMD for (size_t i = 0; i < cols; i++) total[i] = STORE(LOAD(x[i]) + LOAD(residual[i]));           \
                x = total;                                                                                             \
            }                                                                                                          \
            float mean = 0.0f;                                                                                         \
            mps_float16 sum = {0};                                                                                     \
            size_t i = 0;                                                                                              \
            if (job->is_centered) {                                                                                    \
                for (; i + MPS_WIDE <= cols; i += MPS_WIDE) sum += LANES(x + i);                                       \
                for (size_t j = 0; i < cols; i++, j++) sum[j] += LOAD(x[i]);                                           \
                mean = mps_join(sum) / (float)cols;                                                                    \
            }                                                                                                          \
            sum = (mps_float16){0};                                                                                    \
            for (i = 0; i + MPS_WIDE <= cols; i += MPS_WIDE) {                                                         \
                mps_float16 centered = LANES(x + i) - mean;                                                            \
                sum += centered * centered;                                                                            \
            }                                                                                                          \
            for (size_t j = 0; i < cols; i++, j++) sum[j] += (LOAD(x[i]) - mean) * (LOAD(x[i]) - mean);                \
            const float rstd = 1.0f / sqrtf(mps_join(sum) / (float)cols + job->eps);                                   \
            if (weight && bias)                                                                                        \
                MPS_SIMD for (i = 0; i < cols; i++)                                                                    \
                    y[i] = STORE(((LOAD(x[i]) - mean) * rstd) * LOAD(weight[i]) + LOAD(bias[i]));                      \
            else if (weight)                                                                                           \
                MPS_SIMD for (i = 0; i < cols; i++) y[i] = STORE(((LOAD(x[i]) - mean) * rstd) * LOAD(weight[i]));      \
            else                                                                                                       \
                MPS_SIMD for (i = 0; i < cols; i++) y[i] = STORE((LOAD(x[i]) - mean) * rstd);                          \
        }                                                                                                              \
    }

/* -- activations -------------------------------------------------------------------------------------------------- */

#define MPS_GATE_LOOP(F, LOAD, STORE)                                                                                  \
    if (other)                                                                                                         \
        MPS_SIMD for (size_t i = begin; i < end; i++) out[i] = STORE(F(LOAD(x[i])) * LOAD(other[i]));                  \
    else                                                                                                               \
        MPS_SIMD for (size_t i = begin; i < end; i++) out[i] = STORE(F(LOAD(x[i])));                                   \
    break

#define MPS_DEFINE_GATE(SUFFIX, IN, LOAD, STORE)                                                                       \
    MPS_CLONES static void mps_gate_##SUFFIX(const mps_gate_job *job, size_t begin, size_t end) {                      \
        const IN *x = (const IN *)job->x, *other = (const IN *)job->other;                                             \
        IN *out = (IN *)job->out;                                                                                      \
        switch (job->what) {                                                                                           \
            case MPS_SAME: MPS_GATE_LOOP(mps_same, LOAD, STORE);                                                       \
            case MPS_RELU: MPS_GATE_LOOP(mps_relu, LOAD, STORE);                                                       \
            case MPS_GELU_TANH: MPS_GATE_LOOP(mps_gelu_tanh, LOAD, STORE);                                             \
            case MPS_GELU_ERF: MPS_GATE_LOOP(mps_gelu_erf, LOAD, STORE);                                               \
            default: MPS_GATE_LOOP(mps_silu, LOAD, STORE);                                                             \
        }                                                                                                              \
    }

/* -- rotary embedding --------------------------------------------------------------------------------------------- */

#define MPS_DEFINE_ROTARY(SUFFIX, IN, LOAD, STORE)                                                                     \
    MPS_CLONES static void mps_rotary_##SUFFIX(const mps_rotary_job *job, size_t begin, size_t end) {                  \
        const size_t half = job->half, step = job->is_halved ? 1 : 2, apart = job->is_halved ? half : 1;               \
        for (size_t row = begin; row < end; row++) {                                                                   \
            const IN *cosine = (const IN *)job->cosine + row % job->table_rows * job->table_stride;                    \
            const IN *sine = (const IN *)job->sine + row % job->table_rows * job->table_stride;                        \
            for (size_t head = 0; head < job->heads; head++) {                                                         \
                IN *x = (IN *)job->x + row * job->stride + head * job->size;                                           \
                MPS_SIMD for (size_t i = 0; i < half; i++) {                                                           \
                    float a = LOAD(x[i * step]), b = LOAD(x[i * step + apart]);                                        \
                    float c = LOAD(cosine[i]), s = LOAD(sine[i]);                                                      \
                    x[i * step] = STORE(a * c - b * s);                                                                \
                    x[i * step + apart] = STORE(b * c + a * s);                                                        \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

/* -- attention of one query --------------------------------------------------------------------------------------- */

#define MPS_KEYS 8u /* values that are added to a result at once */

/* Of one batch entry and one key head: `group` query heads. `scores` has room for group * keys. */
#define MPS_DEFINE_ATTEND(SUFFIX, IN, LANES, LOAD, STORE)                                                              \
    MPS_INLINE float mps_scores_##SUFFIX(                                                                              \
        const mps_attend_job *job, const IN *q, const IN *k, size_t entry, size_t head, float *scores) {               \
        const size_t size = job->size;                                                                                 \
        const uint8_t *kept = job->mask_kind == 1 ? (const uint8_t *)job->mask + entry * job->mask_batch : NULL;       \
        const IN *added = job->mask_kind == 2 ? (const IN *)job->mask + entry * job->mask_batch : NULL;                \
        float most = -INFINITY;                                                                                        \
        for (size_t t = 0; t < job->keys; t++) {                                                                       \
            if (kept && !kept[t]) {                                                                                    \
                scores[t] = -INFINITY;                                                                                 \
                continue;                                                                                              \
            }                                                                                                          \
            const IN *key = k + t * job->k_key;                                                                        \
            mps_float16 sum = {0};                                                                                     \
            size_t i = 0;                                                                                              \
            for (; i + MPS_WIDE <= size; i += MPS_WIDE) sum += LANES(q + i) * LANES(key + i);                          \
            for (size_t j = 0; i < size; i++, j++) sum[j] += LOAD(q[i]) * LOAD(key[i]);                                \
            float score = mps_join(sum) * job->scale;                                                                  \
            if (job->slopes) score += job->slopes[head] * (float)t;                                                    \
            if (added) score += LOAD(added[t]);                                                                        \
            scores[t] = score;                                                                                         \
            most = score > most ? score : most;                                                                        \
        }                                                                                                              \
        return most;                                                                                                   \
    }                                                                                                                  \
    MPS_INLINE void mps_values_##SUFFIX(const mps_attend_job *job, const IN *v, const float *weight, float *sum) {     \
        const size_t size = job->size;                                                                                 \
        for (size_t t = 0; t < job->keys; t += MPS_KEYS) {                                                             \
            const size_t count = job->keys - t < MPS_KEYS ? job->keys - t : MPS_KEYS;                                  \
            size_t i = 0;                                                                                              \
            for (; i + MPS_WIDE <= size; i += MPS_WIDE) {                                                              \
                mps_float16 lanes = mps_lanes_of_f32(sum + i);                                                         \
                for (size_t c = 0; c < count; c++) lanes += weight[t + c] * LANES(v + (t + c) * job->v_key + i);       \
                memcpy(sum + i, &lanes, sizeof lanes);                                                                 \
            }                                                                                                          \
            for (; i < size; i++)                                                                                      \
                for (size_t c = 0; c < count; c++) sum[i] += weight[t + c] * LOAD(v[(t + c) * job->v_key + i]);        \
        }                                                                                                              \
    }                                                                                                                  \
    MPS_CLONES static void mps_attend_##SUFFIX(const mps_attend_job *job, size_t begin, size_t end, float *room) {     \
        const size_t size = job->size, keys = job->keys, group = job->heads / job->key_heads;                          \
        float *sums = room + keys;                                                                                     \
        for (size_t item = begin; item < end; item++) {                                                                \
            const size_t entry = item / job->key_heads, key_head = item % job->key_heads;                              \
            const IN *k = (const IN *)job->k + entry * job->k_batch + key_head * job->k_head;                          \
            const IN *v = (const IN *)job->v + entry * job->v_batch + key_head * job->v_head;                          \
            for (size_t g = 0; g < group; g++) {                                                                       \
                const size_t head = key_head * group + g, at = (entry * job->heads + head) * size;                     \
                IN *out = (IN *)job->out + at;                                                                         \
                const float most = mps_scores_##SUFFIX(job, (const IN *)job->q + at, k, entry, head, room);            \
                if (most == -INFINITY) {                                                                               \
                    memset(out, 0, size * sizeof *out);                                                                \
                    continue;                                                                                          \
                }                                                                                                      \
                MPS_SIMD for (size_t t = 0; t < keys; t++) room[t] = mps_exp(room[t] - most);                          \
                mps_float16 whole = {0};                                                                               \
                size_t t = 0;                                                                                          \
                for (; t + MPS_WIDE <= keys; t += MPS_WIDE) whole += mps_lanes_of_f32(room + t);                       \
                for (size_t j = 0; t < keys; t++, j++) whole[j] += room[t];                                            \
                memset(sums, 0, size * sizeof *sums);                                                                  \
                mps_values_##SUFFIX(job, v, room, sums);                                                               \
                const float total = mps_join(whole);                                                                   \
                MPS_SIMD for (size_t i = 0; i < size; i++) out[i] = STORE(sums[i] / total);                            \
            }                                                                                                          \
        }                                                                                                              \
    }

#define MPS_DEFINE_LAYER(SUFFIX, IN)                                                                                   \
    MPS_DEFINE_NORM(SUFFIX, IN, mps_lanes_of_##SUFFIX, mps_load_##SUFFIX, mps_store_##SUFFIX)                          \
    MPS_DEFINE_GATE(SUFFIX, IN, mps_load_##SUFFIX, mps_store_##SUFFIX)                                                 \
    MPS_DEFINE_ROTARY(SUFFIX, IN, mps_load_##SUFFIX, mps_store_##SUFFIX)                                               \
    MPS_DEFINE_ATTEND(SUFFIX, IN, mps_lanes_of_##SUFFIX, mps_load_##SUFFIX, mps_store_##SUFFIX)

MPS_DEFINE_LAYER(f32, float)
MPS_DEFINE_LAYER(bf16, uint16_t)
MPS_DEFINE_LAYER(f16, uint16_t)

/* -- over threads ------------------------------------------------------------------------------------------------- */

enum { MPS_DO_NORM, MPS_DO_GATE, MPS_DO_ROTARY };

typedef void (*mps_layer_loop)(const void *, size_t, size_t);
#define MPS_LOOPS(NAME) {NULL, (mps_layer_loop)mps_##NAME##_f32, (mps_layer_loop)mps_##NAME##_bf16, (mps_layer_loop)mps_##NAME##_f16}

/* By what is done, then by kind. */
static const mps_layer_loop mps_layer_loops[][4] = {
    [MPS_DO_NORM] = MPS_LOOPS(norm),
    [MPS_DO_GATE] = MPS_LOOPS(gate),
    [MPS_DO_ROTARY] = MPS_LOOPS(rotary),
};

/* A job of `n` items of `cost` elements each, cut at multiples of `grain` items. */
static void mps_run_layer(int what, int kind, const void *job, size_t n, size_t cost, size_t grain, int threads) {
    mps_layer_loop loop = mps_layer_loops[what][kind];
    int used = mps_useful_threads(n * cost, threads);
    if (used == 1) {
        loop(job, 0, n);
        return;
    }
    MPS_ON_THREADS(used, k, {
        mps_range r = mps_cut(n, grain, used, k);
        loop(job, r.begin, r.end);
    });
}

static int mps_attend_range(const mps_attend_job *job, size_t begin, size_t end) {
    if (begin == end) return 1;
    float *room = malloc((job->keys + job->size) * sizeof *room);
    if (!room) return 0;
    if (job->kind == 1) mps_attend_f32(job, begin, end, room);
    else if (job->kind == 2) mps_attend_bf16(job, begin, end, room);
    else mps_attend_f16(job, begin, end, room);
    free(room);
    return 1;
}

/* 0: there is no memory for the scores. */
static int mps_run_attend(const mps_attend_job *job, int threads) {
    size_t items = job->batch * job->key_heads;
    int used = mps_useful_threads(2 * job->batch * job->heads * job->keys * job->size, threads), is_done = 1;
    if ((size_t)used > items) used = items ? (int)items : 1;
    if (used == 1) return mps_attend_range(job, 0, items);
    unsigned mode = mps_float_mode();
#pragma omp parallel for num_threads(used) schedule(static, 1) reduction(&& : is_done)
    for (int k = 0; k < used; k++) {
        mps_range r = mps_cut(items, 1, used, k);
        unsigned before = mps_float_mode();
        mps_set_float_mode(mode);
        is_done = mps_attend_range(job, r.begin, r.end) && is_done;
        mps_set_float_mode(before);
    }
    return is_done;
}

#endif
