/* Products of few rows with a weight: y = x w^T + bias, with the weight read from memory once.
 *
 * A block of outputs is worked on for up to four rows at once, each sum in sixteen lanes along the inputs: the bits of
 * a row depend neither on the other rows, nor on threads, nor on the vector width. */
#ifndef MPISPEED_THIN_LOOPS_H
#define MPISPEED_THIN_LOOPS_H

#include "lanes.h"
#include "ranges.h"

#define MPS_OUTPUTS 8u /* of a block: as many streams of memory */
#define MPS_THIN_AHEAD 1024u /* bytes */

typedef struct {
    int kind;                /* 1 fp32, 2 bf16 */
    void *out;               /* [rows, outputs] */
    const void *x;           /* [rows, inputs] */
    const void *weight;      /* [outputs, inputs] */
    const void *bias;        /* [outputs]; NULL: none */
    size_t rows, outputs, inputs;
} mps_thin_job;

/* COUNT outputs from `n` on, of ROWS rows from `row` on. */
#define MPS_DEFINE_THIN_BLOCK(NAME, IN, LANES, LOAD, STORE, COUNT, ROWS)                                               \
    MPS_INLINE void NAME(const mps_thin_job *job, size_t n, size_t row) {                                              \
        const size_t inputs = job->inputs;                                                                             \
        const IN *w = (const IN *)job->weight + n * inputs, *x = (const IN *)job->x + row * inputs;                    \
        const IN *bias = (const IN *)job->bias;                                                                        \
        mps_float16 sum[COUNT][ROWS];                                                                                  \
        size_t k = 0;                                                                                                  \
        for (size_t c = 0; c < COUNT; c++)                                                                             \
            for (size_t r = 0; r < ROWS; r++) sum[c][r] = (mps_float16){0};                                            \
        for (; k + MPS_WIDE <= inputs; k += MPS_WIDE) {                                                                \
            mps_float16 factor[ROWS];                                                                                  \
            for (size_t r = 0; r < ROWS; r++) factor[r] = LANES(x + r * inputs + k);                                   \
            _Pragma("GCC unroll 8") for (size_t c = 0; c < COUNT; c++) {                                               \
                MPS_PREFETCH_READ(w + c * inputs + k + MPS_THIN_AHEAD / sizeof(IN));                                   \
                mps_float16 lanes = LANES(w + c * inputs + k);                                                         \
                _Pragma("GCC unroll 4") for (size_t r = 0; r < ROWS; r++) sum[c][r] += lanes * factor[r];              \
            }                                                                                                          \
        }                                                                                                              \
        for (size_t c = 0; c < COUNT; c++)                                                                             \
            for (size_t r = 0; r < ROWS; r++) {                                                                        \
                for (size_t i = k; i < inputs; i++)                                                                    \
                    sum[c][r][i - k] += LOAD(w[c * inputs + i]) * LOAD(x[r * inputs + i]);                             \
                float y = mps_join(sum[c][r]);                                                                         \
                ((IN *)job->out)[(row + r) * job->outputs + n + c] = STORE(bias ? y + LOAD(bias[n + c]) : y);          \
            }                                                                                                          \
    }

#define MPS_DEFINE_THIN(SUFFIX, IN, LANES, LOAD, STORE)                                                                \
    MPS_DEFINE_THIN_BLOCK(mps_thin_##SUFFIX##_84, IN, LANES, LOAD, STORE, MPS_OUTPUTS, 4)                              \
    MPS_DEFINE_THIN_BLOCK(mps_thin_##SUFFIX##_82, IN, LANES, LOAD, STORE, MPS_OUTPUTS, 2)                              \
    MPS_DEFINE_THIN_BLOCK(mps_thin_##SUFFIX##_81, IN, LANES, LOAD, STORE, MPS_OUTPUTS, 1)                              \
    MPS_DEFINE_THIN_BLOCK(mps_thin_##SUFFIX##_11, IN, LANES, LOAD, STORE, 1, 1)                                        \
    MPS_CLONES static void mps_thin_##SUFFIX(const mps_thin_job *job, size_t begin, size_t end) {                      \
        size_t n = begin;                                                                                              \
        for (; n + MPS_OUTPUTS <= end; n += MPS_OUTPUTS) {                                                             \
            size_t row = 0;                                                                                            \
            for (; row + 4 <= job->rows; row += 4) mps_thin_##SUFFIX##_84(job, n, row);                                \
            for (; row + 2 <= job->rows; row += 2) mps_thin_##SUFFIX##_82(job, n, row);                                \
            if (row < job->rows) mps_thin_##SUFFIX##_81(job, n, row);                                                  \
        }                                                                                                              \
        for (; n < end; n++)                                                                                           \
            for (size_t row = 0; row < job->rows; row++) mps_thin_##SUFFIX##_11(job, n, row);                          \
    }

MPS_DEFINE_THIN(f32, float, mps_lanes_of_f32, mps_load_f32, mps_store_f32)
MPS_DEFINE_THIN(bf16, uint16_t, mps_lanes_of_bf16, mps_load_bf16, mps_store_bf16)

static void mps_thin_part(const mps_thin_job *job, int parts, int part) {
    mps_range r = mps_cut(job->outputs, MPS_OUTPUTS, parts, part);
    if (job->kind == 1) mps_thin_f32(job, r.begin, r.end);
    else mps_thin_bf16(job, r.begin, r.end);
}

static void mps_run_thin(const mps_thin_job *job, int threads) {
    int used = mps_useful_threads(job->outputs * job->inputs, threads);
    if (used == 1) {
        mps_thin_part(job, 1, 0);
        return;
    }
    MPS_ON_THREADS(used, k, mps_thin_part(job, used, k));
}

#endif
