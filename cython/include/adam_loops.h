/* One pass of Adam over flat buffers: master, both moments and gradient in, all but the gradient out. */
#ifndef MPISPEED_ADAM_LOOPS_H
#define MPISPEED_ADAM_LOOPS_H

#include <math.h>

#include "halves.h"
#include "ranges.h"

enum { MPS_NONE = 0, MPS_F32 = 1, MPS_BF16 = 2, MPS_F16 = 3, MPS_F64 = 4 };
enum { MPS_DECAY_NONE = 0, MPS_DECAY_DECOUPLED = 1, MPS_DECAY_L2 = 2 };

typedef struct {
    float beta1, rest1;     /* beta1, 1 - beta1 */
    float beta2, rest2;     /* beta2, 1 - beta2 */
    float step_size;        /* lr / (1 - beta1^t) */
    float root_scale;       /* 1 / sqrt(1 - beta2^t) */
    float eps;
    float decay;            /* decoupled: lr * weight_decay; L2: weight_decay */
    float grad_scale;
    int decay_mode;
} mps_adam_terms;

/* p - (lr wd) p, not p (1 - lr wd): rounding 1 - lr wd to fp32 would bias a small decay by several per cent. */
MPS_INLINE float mps_adam_one(float p, float g, float *m, float *v, const mps_adam_terms *t, const int mode) {
    g = g * t->grad_scale;
    if (mode == MPS_DECAY_L2) g = g + t->decay * p;
    float m1 = t->beta1 * *m + t->rest1 * g;
    float v1 = t->beta2 * *v + t->rest2 * g * g;
    float d = sqrtf(v1) * t->root_scale + t->eps;
    *m = m1;
    *v = v1;
    if (mode == MPS_DECAY_DECOUPLED) p = p - t->decay * p;
    return p - t->step_size * (m1 / d);
}

#define MPS_NO_OUT(out, j, value)
#define MPS_OUT_BF16(out, j, value) (out)[j] = mps_store_bf16(value)
#define MPS_OUT_F16(out, j, value) (out)[j] = mps_store_f16(value)

#define MPS_DEFINE_ADAM(NAME, GRAD, LOAD, STORE)                                                                       \
    MPS_INLINE void NAME##_span(float *p, float *m, float *v, const GRAD *g, uint16_t *out, size_t n,                  \
                                const mps_adam_terms *terms, const int mode) {                                         \
        const mps_adam_terms t = *terms;                                                                               \
        size_t i = 0;                                                                                                  \
        for (; i + MPS_STRIP <= n; i += MPS_STRIP) {                                                                   \
            for (size_t q = i + MPS_AHEAD; q < i + MPS_AHEAD + MPS_STRIP; q += 16) {                                   \
                MPS_PREFETCH_WRITE(p + q);                                                                             \
                MPS_PREFETCH_WRITE(m + q);                                                                             \
                MPS_PREFETCH_WRITE(v + q);                                                                             \
                MPS_PREFETCH_READ(g + q);                                                                              \
            }                                                                                                          \
            MPS_SIMD for (size_t j = i; j < i + MPS_STRIP; j++) {                                                      \
                float value = mps_adam_one(p[j], LOAD(g[j]), m + j, v + j, &t, mode);                                  \
                p[j] = value;                                                                                          \
                STORE(out, j, value);                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
        for (; i < n; i++) {                                                                                           \
            float value = mps_adam_one(p[i], LOAD(g[i]), m + i, v + i, &t, mode);                                      \
            p[i] = value;                                                                                              \
            STORE(out, i, value);                                                                                      \
        }                                                                                                              \
        (void)out;                                                                                                     \
    }                                                                                                                  \
    MPS_CLONES static void NAME(float *p, float *m, float *v, const void *g, void *out, size_t n,                      \
                                const mps_adam_terms *t) {                                                             \
        if (t->decay_mode == MPS_DECAY_NONE)                                                                           \
            NAME##_span(p, m, v, (const GRAD *)g, (uint16_t *)out, n, t, MPS_DECAY_NONE);                              \
        else if (t->decay_mode == MPS_DECAY_DECOUPLED)                                                                 \
            NAME##_span(p, m, v, (const GRAD *)g, (uint16_t *)out, n, t, MPS_DECAY_DECOUPLED);                         \
        else                                                                                                           \
            NAME##_span(p, m, v, (const GRAD *)g, (uint16_t *)out, n, t, MPS_DECAY_L2);                                \
    }

MPS_DEFINE_ADAM(mps_adam_f32, float, mps_load_f32, MPS_NO_OUT)
MPS_DEFINE_ADAM(mps_adam_f32_bf16, float, mps_load_f32, MPS_OUT_BF16)
MPS_DEFINE_ADAM(mps_adam_f32_f16, float, mps_load_f32, MPS_OUT_F16)
MPS_DEFINE_ADAM(mps_adam_bf16, uint16_t, mps_load_bf16, MPS_NO_OUT)
MPS_DEFINE_ADAM(mps_adam_bf16_bf16, uint16_t, mps_load_bf16, MPS_OUT_BF16)
MPS_DEFINE_ADAM(mps_adam_bf16_f16, uint16_t, mps_load_bf16, MPS_OUT_F16)
MPS_DEFINE_ADAM(mps_adam_f16, uint16_t, mps_load_f16, MPS_NO_OUT)
MPS_DEFINE_ADAM(mps_adam_f16_bf16, uint16_t, mps_load_f16, MPS_OUT_BF16)
MPS_DEFINE_ADAM(mps_adam_f16_f16, uint16_t, mps_load_f16, MPS_OUT_F16)

typedef void (*mps_adam_loop)(float *, float *, float *, const void *, void *, size_t, const mps_adam_terms *);

static inline mps_adam_loop mps_adam_select(int grad, int out) {
    if (grad == MPS_F32) return out == MPS_NONE ? mps_adam_f32 : out == MPS_BF16 ? mps_adam_f32_bf16 : mps_adam_f32_f16;
    if (grad == MPS_BF16)
        return out == MPS_NONE ? mps_adam_bf16 : out == MPS_BF16 ? mps_adam_bf16_bf16 : mps_adam_bf16_f16;
    return out == MPS_NONE ? mps_adam_f16 : out == MPS_BF16 ? mps_adam_f16_bf16 : mps_adam_f16_f16;
}

/* Returns 0, or -1 when there is no loop for these dtypes. */
static int mps_adam(float *p, float *m, float *v, const void *g, void *out, size_t n, int grad, int out_kind,
                    const mps_adam_terms *t, int threads) {
    if (grad < MPS_F32 || grad > MPS_F16 || !(out_kind == MPS_NONE || out_kind == MPS_BF16 || out_kind == MPS_F16))
        return -1;
    mps_adam_loop loop = mps_adam_select(grad, out_kind);
    size_t width = grad == MPS_F32 ? 4 : 2;
    int used = mps_useful_threads(n, threads);
    if (used == 1) {
        loop(p, m, v, g, out, n, t);
        return 0;
    }
    unsigned mode = mps_float_mode();
#pragma omp parallel for num_threads(used) schedule(static, 1)
    for (int k = 0; k < used; k++) {
        mps_range r = mps_cut(n, MPS_GRAIN, used, k);
        unsigned before = mps_float_mode();
        mps_set_float_mode(mode);
        loop(p + r.begin, m + r.begin, v + r.begin, (const char *)g + r.begin * width,
             out ? (char *)out + r.begin * 2 : NULL, r.end - r.begin, t);
        mps_set_float_mode(before);
    }
    return 0;
}

#endif
