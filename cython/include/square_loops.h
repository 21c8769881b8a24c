/* Sums of squares over fixed blocks, added up without rounding error.
 *
 * A block is summed in sixteen fp64 lanes that are joined in a fixed order, so its sum does not depend
 * on the vector width. Block sums are then accumulated exactly, in one long integer
 * that spans the range of fp64. */
#ifndef MPISPEED_SQUARE_LOOPS_H
#define MPISPEED_SQUARE_LOOPS_H

#include "exact.h"
#include "halves.h"
#include "ranges.h"

enum { MPS_SQUARE_F32 = 1, MPS_SQUARE_BF16 = 2, MPS_SQUARE_F16 = 3, MPS_SQUARE_F64 = 4 };

/* Halves are widened by a loop of their own: the compiler does not vectorise their selects inside an initialiser. */
#define MPS_STAGE_NONE(y, w) const __typeof__(*(y)) *w = (y)
#define MPS_STAGE_F16(y, w)                                                                                            \
    float w[MPS_LANES];                                                                                                \
    MPS_SIMD for (int j = 0; j < MPS_LANES; j++) w[j] = mps_load_f16((y)[j])

#define MPS_DEFINE_SQUARE(NAME, IN, LOAD, STAGE, TAKE)                                                                 \
    MPS_CLONES static void NAME(const void *address, size_t n, size_t block, mps_exact *total) {                       \
        const IN *x = (const IN *)address;                                                                             \
        for (size_t begin = 0; begin < n; begin += block) {                                                            \
            size_t length = n - begin < block ? n - begin : block, i = 0;                                              \
            mps_double8 low = {0}, high = {0};                                                                         \
            double lane[MPS_LANES];                                                                                    \
            for (; i + MPS_LANES <= length; i += MPS_LANES) {                                                          \
                const IN *y = x + begin + i;                                                                           \
                MPS_PREFETCH_READ(y + MPS_AHEAD);                                                                      \
                STAGE(y, w);                                                                                           \
                mps_double8 a = {TAKE(w[0]), TAKE(w[1]), TAKE(w[2]), TAKE(w[3]),                                       \
                                 TAKE(w[4]), TAKE(w[5]), TAKE(w[6]), TAKE(w[7])};                                      \
                mps_double8 b = {TAKE(w[8]), TAKE(w[9]), TAKE(w[10]), TAKE(w[11]),                                     \
                                 TAKE(w[12]), TAKE(w[13]), TAKE(w[14]), TAKE(w[15])};                                  \
                low += a * a;                                                                                          \
                high += b * b;                                                                                         \
            }                                                                                                          \
            memcpy(lane, &low, sizeof low);                                                                            \
            memcpy(lane + 8, &high, sizeof high);                                                                      \
            for (int j = 0; i < length; i++, j++) {                                                                    \
                double value = LOAD(x[begin + i]);                                                                     \
                lane[j] += value * value;                                                                              \
            }                                                                                                          \
            mps_exact_add(total, mps_join_lanes(lane));                                                                \
        }                                                                                                              \
    }

MPS_INLINE double mps_wide_f64(double value) { return value; }

MPS_DEFINE_SQUARE(mps_square_f32, float, mps_load_f32, MPS_STAGE_NONE, mps_load_f32)
MPS_DEFINE_SQUARE(mps_square_bf16, uint16_t, mps_load_bf16, MPS_STAGE_NONE, mps_load_bf16)
MPS_DEFINE_SQUARE(mps_square_f16, uint16_t, mps_load_f16, MPS_STAGE_F16, mps_load_f32)
MPS_DEFINE_SQUARE(mps_square_f64, double, mps_wide_f64, MPS_STAGE_NONE, mps_wide_f64)

typedef void (*mps_square_loop)(const void *, size_t, size_t, mps_exact *);

static inline mps_square_loop mps_square_select(int kind) {
    switch (kind) {
        case MPS_SQUARE_F32: return mps_square_f32;
        case MPS_SQUARE_BF16: return mps_square_bf16;
        case MPS_SQUARE_F16: return mps_square_f16;
        case MPS_SQUARE_F64: return mps_square_f64;
        default: return NULL;
    }
}

/* Fills `values` (room for MPS_PARTIALS) and returns their number, or -1 when there is no loop for this dtype. */
static int mps_square_partials(const void *x, size_t n, size_t block, int kind, int threads, double *values) {
    mps_square_loop loop = mps_square_select(kind);
    size_t width = kind == MPS_SQUARE_F64 ? 8 : kind == MPS_SQUARE_F32 ? 4 : 2;
    mps_exact total;
    memset(&total, 0, sizeof total);
    if (!loop || block == 0) return -1;
    int used = mps_useful_threads(n, threads);
    if (used == 1) {
        loop(x, n, block, &total);
        return mps_exact_partials(&total, values);
    }
    unsigned mode = mps_float_mode();
#pragma omp parallel for num_threads(used) schedule(static, 1)
    for (int k = 0; k < used; k++) {
        mps_range r = mps_cut(n, block, used, k);
        mps_exact own;
        memset(&own, 0, sizeof own);
        unsigned before = mps_float_mode();
        mps_set_float_mode(mode);
        loop((const char *)x + r.begin * width, r.end - r.begin, block, &own);
        mps_set_float_mode(before);
#pragma omp critical(mps_square_join)
        mps_exact_join(&total, &own);
    }
    return mps_exact_partials(&total, values);
}

#endif
