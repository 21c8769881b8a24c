/* Sums of many buffers, element by element, in a fixed pairwise tree over their order.
 *
 * Neighbours are added, an odd one passes up, and so on: the left branch of every node is a full tree
 * over a power of two. Two to four parts are one fused pass; more go through tiles that stay in cache,
 * on a stack where equal trees merge like the carries of a binary counter. */
#ifndef MPISPEED_SUM_LOOPS_H
#define MPISPEED_SUM_LOOPS_H

#include "halves.h"
#include "ranges.h"

enum { MPS_SUM_F32 = 1, MPS_SUM_BF16 = 2, MPS_SUM_F16 = 3, MPS_SUM_F64 = 4 };

#define MPS_TILE 1024       /* elements */
#define MPS_LEVELS 18       /* stack of partial trees */
#define MPS_MOST_PARTS 65536

MPS_INLINE double mps_load_f64(double value) { return value; }
MPS_INLINE double mps_store_f64(double value) { return value; }

/* `out` may be one of the parts: element j is read from all parts before it is written. */
#define MPS_DEFINE_SUM(NAME, ACC, IN, LOAD, OUT, STORE)                                                                \
    MPS_INLINE void NAME##_few(OUT *out, const IN *const *x, int count, size_t b, size_t n, ACC scale) {               \
        const IN *x0 = x[0] + b, *x1 = x[count > 1 ? 1 : 0] + b, *x2 = x[count > 2 ? 2 : 0] + b,                       \
                 *x3 = x[count > 3 ? 3 : 0] + b;                                                                       \
        out += b;                                                                                                      \
        if (count == 1) {                                                                                              \
            MPS_SIMD for (size_t j = 0; j < n; j++) out[j] = STORE(LOAD(x0[j]) * scale);                               \
        } else if (count == 2) {                                                                                       \
            MPS_SIMD for (size_t j = 0; j < n; j++) out[j] = STORE((LOAD(x0[j]) + LOAD(x1[j])) * scale);               \
        } else if (count == 3) {                                                                                       \
            MPS_SIMD for (size_t j = 0; j < n; j++) out[j] =                                                           \
                STORE(((LOAD(x0[j]) + LOAD(x1[j])) + LOAD(x2[j])) * scale);                                            \
        } else {                                                                                                       \
            MPS_SIMD for (size_t j = 0; j < n; j++) out[j] =                                                           \
                STORE(((LOAD(x0[j]) + LOAD(x1[j])) + (LOAD(x2[j]) + LOAD(x3[j]))) * scale);                            \
        }                                                                                                              \
    }                                                                                                                  \
    MPS_INLINE void NAME##_leaf(ACC *tile, const IN *const *x, int count, size_t b, size_t n) {                        \
        const IN *x0 = x[0] + b, *x1 = x[count > 1 ? 1 : 0] + b, *x2 = x[count > 2 ? 2 : 0] + b,                       \
                 *x3 = x[count > 3 ? 3 : 0] + b;                                                                       \
        if (count == 1) {                                                                                              \
            MPS_SIMD for (size_t j = 0; j < n; j++) tile[j] = LOAD(x0[j]);                                             \
        } else if (count == 2) {                                                                                       \
            MPS_SIMD for (size_t j = 0; j < n; j++) tile[j] = LOAD(x0[j]) + LOAD(x1[j]);                               \
        } else if (count == 3) {                                                                                       \
            MPS_SIMD for (size_t j = 0; j < n; j++) tile[j] = (LOAD(x0[j]) + LOAD(x1[j])) + LOAD(x2[j]);               \
        } else {                                                                                                       \
            MPS_SIMD for (size_t j = 0; j < n; j++) tile[j] =                                                          \
                (LOAD(x0[j]) + LOAD(x1[j])) + (LOAD(x2[j]) + LOAD(x3[j]));                                             \
        }                                                                                                              \
    }                                                                                                                  \
    MPS_INLINE void NAME##_tile(OUT *out, const IN *const *x, int count, size_t b, size_t n, ACC scale) {              \
        ACC tiles[MPS_LEVELS][MPS_TILE] __attribute__((aligned(64)));                                                  \
        int depth = 0;                                                                                                 \
        for (int first = 0; first < count; first += 4) {                                                               \
            int leaves = count - first < 4 ? count - first : 4;                                                        \
            NAME##_leaf(tiles[depth++], x + first, leaves, b, n);                                                      \
            if (leaves < 4) break;                                                                                     \
            for (int group = first / 4 + 1; !(group & 1); group >>= 1, depth--) {                                      \
                ACC *left = tiles[depth - 2], *right = tiles[depth - 1];                                               \
                MPS_SIMD for (size_t j = 0; j < n; j++) left[j] = left[j] + right[j];                                  \
            }                                                                                                          \
        }                                                                                                              \
        for (; depth > 1; depth--) {                                                                                   \
            ACC *left = tiles[depth - 2], *right = tiles[depth - 1];                                                   \
            MPS_SIMD for (size_t j = 0; j < n; j++) left[j] = left[j] + right[j];                                      \
        }                                                                                                              \
        ACC *sum = tiles[0];                                                                                           \
        out += b;                                                                                                      \
        MPS_SIMD for (size_t j = 0; j < n; j++) out[j] = STORE(sum[j] * scale);                                        \
    }                                                                                                                  \
    MPS_CLONES static void NAME(void *out, const void *const *parts, int count, size_t b, size_t n, double factor) {   \
        const IN *const *x = (const IN *const *)parts;                                                                 \
        const ACC scale = (ACC)factor;                                                                                 \
        if (count <= 4) {                                                                                              \
            NAME##_few((OUT *)out, x, count, b, n, scale);                                                             \
            return;                                                                                                    \
        }                                                                                                              \
        for (size_t i = 0; i < n; i += MPS_TILE)                                                                       \
            NAME##_tile((OUT *)out, x, count, b + i, n - i < MPS_TILE ? n - i : MPS_TILE, scale);                      \
    }

MPS_DEFINE_SUM(mps_sum_f32_f32, float, float, mps_load_f32, float, mps_store_f32)
MPS_DEFINE_SUM(mps_sum_f32_bf16, float, float, mps_load_f32, uint16_t, mps_store_bf16)
MPS_DEFINE_SUM(mps_sum_f32_f16, float, float, mps_load_f32, uint16_t, mps_store_f16)
MPS_DEFINE_SUM(mps_sum_bf16_bf16, float, uint16_t, mps_load_bf16, uint16_t, mps_store_bf16)
MPS_DEFINE_SUM(mps_sum_bf16_f32, float, uint16_t, mps_load_bf16, float, mps_store_f32)
MPS_DEFINE_SUM(mps_sum_f16_f16, float, uint16_t, mps_load_f16, uint16_t, mps_store_f16)
MPS_DEFINE_SUM(mps_sum_f16_f32, float, uint16_t, mps_load_f16, float, mps_store_f32)
MPS_DEFINE_SUM(mps_sum_f64_f64, double, double, mps_load_f64, double, mps_store_f64)

typedef void (*mps_sum_loop)(void *, const void *const *, int, size_t, size_t, double);

static inline mps_sum_loop mps_sum_select(int in, int out) {
    switch (in * 8 + out) {
        case MPS_SUM_F32 * 8 + MPS_SUM_F32: return mps_sum_f32_f32;
        case MPS_SUM_F32 * 8 + MPS_SUM_BF16: return mps_sum_f32_bf16;
        case MPS_SUM_F32 * 8 + MPS_SUM_F16: return mps_sum_f32_f16;
        case MPS_SUM_BF16 * 8 + MPS_SUM_BF16: return mps_sum_bf16_bf16;
        case MPS_SUM_BF16 * 8 + MPS_SUM_F32: return mps_sum_bf16_f32;
        case MPS_SUM_F16 * 8 + MPS_SUM_F16: return mps_sum_f16_f16;
        case MPS_SUM_F16 * 8 + MPS_SUM_F32: return mps_sum_f16_f32;
        case MPS_SUM_F64 * 8 + MPS_SUM_F64: return mps_sum_f64_f64;
        default: return NULL;
    }
}

/* Returns 0, or -1 when there is no loop for these dtypes or this many parts. */
static int mps_tree_sum(void *out, const void *const *parts, int count, size_t n, int in_kind, int out_kind,
                        double scale, int threads) {
    mps_sum_loop loop = mps_sum_select(in_kind, out_kind);
    if (!loop || count < 1 || count > MPS_MOST_PARTS) return -1;
    int used = mps_useful_threads(n, threads);
    if (used == 1) {
        loop(out, parts, count, 0, n, scale);
        return 0;
    }
    MPS_ON_THREADS(used, k, {
        mps_range r = mps_cut(n, MPS_GRAIN, used, k);
        loop(out, parts, count, r.begin, r.end - r.begin, scale);
    });
    return 0;
}

#endif
