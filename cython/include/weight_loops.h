/* Matrices of 8- or 4-bit codes with one scale, and maybe one offset, for each group of neighbours in a row.
 *
 * A row is `width` codes, cut into groups of `group` (the last may be short); it begins at a full byte. An element is
 * code * scale + offset. Products read codes once and never write a dequantized matrix.
 *
 * A product sums in sixteen fp32 lanes: over runs of at most eight steps of sixteen elements, which are multiplied
 * by the scale of their group and added up in order; then the offsets times the sums of x over their groups; then the
 * lanes are joined. Of 4-bit codes a step is the low nibbles of sixteen bytes, and the next one the high nibbles.
 * So bits depend neither on threads, nor on the vector width, nor on how many rows x has. */
#ifndef MPISPEED_WEIGHT_LOOPS_H
#define MPISPEED_WEIGHT_LOOPS_H

#include <stdlib.h>

#include "block_loops.h"
#include "levels.h"

#if MPS_HAS_LEVELS
#include <immintrin.h>
#endif

#define MPS_LANE 16           /* elements of a step */
#define MPS_RUN 8             /* steps */
#define MPS_CODES_AHEAD 8192  /* bytes */

typedef float mps_float_lanes __attribute__((vector_size(64)));
typedef int32_t mps_int_lanes __attribute__((vector_size(64)));
typedef int16_t mps_short_lanes __attribute__((vector_size(32)));
typedef int8_t mps_byte_lanes __attribute__((vector_size(16)));

typedef struct {
    const void *codes;
    const float *scales, *offsets; /* offsets NULL: zeros */
    size_t rows, width, group;
    int bits;
} mps_weight;

typedef struct {
    mps_weight weight;
    const void *x, *bias; /* floats of `kind`; bias NULL: zeros */
    void *out;
    int kind;
    size_t count; /* rows of x and out */
} mps_product;

/* Sizes of one row. */
typedef struct {
    size_t groups, bytes, group_bytes, steps, last_steps, lanes, sums;
} mps_row;

/* The rows of x as the loops read them: in steps, filled up with zeros, and sums over groups. */
typedef struct {
    float *x, *sums;
} mps_arranged;

static inline size_t mps_steps(size_t n, int bits) {
    return bits == 8 ? (n + 15) / 16 : ((n + 1) / 2 + 15) / 16 * 2;
}

static inline mps_row mps_row_of(const mps_weight *w) {
    mps_row row;
    row.groups = (w->width + w->group - 1) / w->group;
    row.bytes = w->bits == 8 ? w->width : (w->width + 1) / 2;
    row.group_bytes = w->bits == 8 ? w->group : w->group / 2;
    row.steps = mps_steps(w->group, w->bits);
    row.last_steps = mps_steps(w->width - (row.groups - 1) * w->group, w->bits);
    row.lanes = MPS_LANE * ((row.groups - 1) * row.steps + row.last_steps);
    row.sums = (row.groups + MPS_LANE - 1) / MPS_LANE * MPS_LANE;
    return row;
}

MPS_INLINE float mps_join(const float *lane) {
    float a[8], b[4];
    for (int j = 0; j < 8; j++) a[j] = lane[j] + lane[j + 8];
    for (int j = 0; j < 4; j++) b[j] = a[j] + a[j + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

/* One row of x; `at` has room for row->lanes floats, `sums` for row->sums. */
MPS_CLONES static void mps_arrange(const mps_product *p, const mps_row *row, size_t index, float *at, float *sums) {
    const mps_weight *w = &p->weight;
    float v[2 * MPS_LANE], total[MPS_LANE];
    size_t stride = w->bits == 8 ? MPS_LANE : 2 * MPS_LANE;
    memset(sums, 0, row->sums * sizeof *sums);
    for (size_t g = 0; g < row->groups; g++) {
        size_t begin = g * w->group, left = w->width - begin, n = left < w->group ? left : w->group;
        memset(total, 0, sizeof total);
        for (size_t k = 0; k < n; k += stride, at += stride) {
            size_t here = n - k < stride ? n - k : stride;
            memset(v, 0, sizeof v);
            mps_read_tile(v, p->x, p->kind, index * w->width + begin + k, here);
            if (w->bits == 8) {
                for (int j = 0; j < MPS_LANE; j++) at[j] = v[j];
                for (int j = 0; j < MPS_LANE; j++) total[j] = total[j] + v[j];
            } else {
                for (int j = 0; j < MPS_LANE; j++) at[j] = v[2 * j];
                for (int j = 0; j < MPS_LANE; j++) at[MPS_LANE + j] = v[2 * j + 1];
                for (int j = 0; j < MPS_LANE; j++) total[j] = (total[j] + v[2 * j]) + v[2 * j + 1];
            }
        }
        sums[g] = mps_join(total);
    }
}

MPS_INLINE void mps_add_offsets(float *sum, const float *offset, const float *sums, const mps_row *row, int many) {
    for (size_t g = 0; g < row->groups; g += MPS_LANE) {
        size_t n = row->groups - g < MPS_LANE ? row->groups - g : MPS_LANE;
        for (int m = 0; m < many; m++) {
            const float *of = sums + (size_t)m * row->sums + g;
            for (size_t j = 0; j < n; j++) sum[m * MPS_LANE + (int)j] += offset[g + j] * of[j];
        }
    }
}

MPS_INLINE void mps_put(const mps_product *p, size_t m, size_t r, float value) {
    if (p->bias) {
        float bias;
        mps_read_tile(&bias, p->bias, p->kind, r, 1);
        value = value + bias;
    }
    mps_write_tile(p->out, p->kind, m * p->weight.rows + r, &value, 1, 1.0f);
}

#define MPS_STEP8(part, code, x, stride, many)                                                                         \
    do {                                                                                                               \
        mps_float_lanes value_ = __builtin_convertvector(code, mps_float_lanes);                                       \
        for (int m = 0; m < (many); m++) part[m] += value_ * *(const mps_float_lanes *)((x) + (size_t)m * (stride));   \
    } while (0)

#define MPS_STEP4(part, code, x, stride, many)                                                                         \
    do {                                                                                                               \
        mps_float_lanes low_ = __builtin_convertvector((code << 28) >> 28, mps_float_lanes);                           \
        mps_float_lanes high_ = __builtin_convertvector(code >> 4, mps_float_lanes);                                   \
        for (int m = 0; m < (many); m++) {                                                                             \
            const mps_float_lanes *x_ = (const mps_float_lanes *)((x) + (size_t)m * (stride));                         \
            part[m] += low_ * x_[0];                                                                                   \
            part[m] += high_ * x_[1];                                                                                  \
        }                                                                                                              \
    } while (0)

typedef void (*mps_dot)(const mps_product *, const mps_row *, const mps_arranged *, size_t, size_t, size_t, char *);

#define MPS_TARGET
#define MPS_SUFFIX v1
#include "weight_dots.h"
#undef MPS_TARGET
#undef MPS_SUFFIX
#if MPS_HAS_LEVELS
#define MPS_TARGET MPS_TARGET_V3
#define MPS_SUFFIX v3
#include "weight_dots.h"
#undef MPS_TARGET
#undef MPS_SUFFIX
#define MPS_TARGET MPS_TARGET_V4
#define MPS_SUFFIX v4
#define MPS_WIDE_REGISTERS
#include "weight_dots.h"
#undef MPS_WIDE_REGISTERS
#undef MPS_TARGET
#undef MPS_SUFFIX
#endif

static inline const mps_dot *mps_dots_of(int bits) {
#if MPS_HAS_LEVELS
    int level = mps_level();
    if (level == 4) return dots_v4[bits == 4];
    if (level == 3) return dots_v3[bits == 4];
#endif
    return dots_v1[bits == 4];
}

/* A few rows of the weight at a time, so that their codes stay in cache while all rows of x pass. */
static inline void mps_dot_range(const mps_product *p, const mps_row *row, const mps_arranged *a, size_t first,
                                 size_t last, char *spare) {
    const mps_dot *dots = mps_dots_of(p->weight.bits);
    for (size_t r = first; r < last; r += MPS_LANE) {
        size_t stop = last - r < MPS_LANE ? last : r + MPS_LANE;
        for (size_t m = 0; m < p->count;) {
            size_t left = p->count - m;
            int size = left >= 4 ? 2 : left >= 2 ? 1 : 0;
            dots[size](p, row, a, m, r, stop, spare);
            m += (size_t)1 << size;
        }
    }
}

/* out = x times the weight, transposed. -1: no memory for x in fp32. */
static int mps_multiply(const mps_product *p, int threads) {
    const mps_row row = mps_row_of(&p->weight);
    size_t floats = p->count * (row.lanes + row.sums), spare = (row.bytes + 2 * MPS_LANE) / 64 * 64 + 64;
    int used = mps_useful_threads(p->weight.rows * row.bytes, threads);
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, floats * sizeof(float) + (size_t)used * spare)) return -1;
    mps_arranged a = {(float *)memory, (float *)memory + p->count * row.lanes};
    char *spares = memory + floats * sizeof(float);
    memset(spares, 0, (size_t)used * spare);
    for (size_t m = 0; m < p->count; m++) mps_arrange(p, &row, m, a.x + m * row.lanes, a.sums + m * row.sums);
    if (used == 1) {
        mps_dot_range(p, &row, &a, 0, p->weight.rows, spares);
    } else {
        MPS_ON_THREADS(used, k, {
            mps_range r = mps_cut(p->weight.rows, MPS_LANE, used, k);
            mps_dot_range(p, &row, &a, r.begin, r.end, spares + (size_t)k * spare);
        });
    }
    free(memory);
    return 0;
}

/* -- values ------------------------------------------------------------------------------------------------ */

MPS_CLONES static void mps_expand_range(const mps_weight *w, const mps_row *row, void *out, int kind, size_t first,
                                        size_t last) {
    float v[MPS_DECODE_TILE] __attribute__((aligned(64)));
    for (size_t r = first; r < last; r++) {
        const char *q = (const char *)w->codes + r * row->bytes;
        for (size_t k = 0, n; k < w->width; k += n) {
            size_t g = k / w->group, edge = (g + 1) * w->group, index = r * row->groups + g;
            n = (edge < w->width ? edge : w->width) - k;
            if (n > MPS_DECODE_TILE) n = MPS_DECODE_TILE;
            if (w->bits == 8) {
                mps_decode8(v, (const int8_t *)q + k, w->scales[index], n, 0);
            } else {
                mps_decode4(v, (const uint8_t *)q + k / 2, w->scales[index], n, 0);
            }
            if (w->offsets) {
                float offset = w->offsets[index];
                MPS_SIMD for (size_t j = 0; j < n; j++) v[j] = v[j] + offset;
            }
            mps_write_tile(out, kind, r * w->width + k, v, n, 1.0f);
        }
    }
}

/* out[r][k] = the value of every element, rounded once to `kind`. */
static void mps_expand(const mps_weight *w, void *out, int kind, int threads) {
    const mps_row row = mps_row_of(w);
    int used = mps_useful_threads(w->rows * w->width, threads);
    if (used == 1) {
        mps_expand_range(w, &row, out, kind, 0, w->rows);
        return;
    }
    MPS_ON_THREADS(used, k, {
        mps_range r = mps_cut(w->rows, 1, used, k);
        mps_expand_range(w, &row, out, kind, r.begin, r.end);
    });
}

#endif
