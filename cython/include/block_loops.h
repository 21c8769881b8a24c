/* Block codecs: floats to and from small integers with one fp32 scale per block.
 *
 * A buffer is `pieces` equal pieces; blocks are counted from the start of each piece, the last one of a
 * piece may be short. Every block passes through a tile that stays in cache: read or sum, add the kept
 * error, find the largest magnitude, round, keep the new error. Sums are in list order, in fp32. */
#ifndef MPISPEED_BLOCK_LOOPS_H
#define MPISPEED_BLOCK_LOOPS_H

#include <stdlib.h>

#include "ranges.h"
#include "tiles.h"

#define MPS_DECODE_TILE 1024          /* elements; even, so that a tile of nibbles starts at a byte */
#define MPS_ROUNDER 12582912.0f       /* 1.5 * 2^23: adding it rounds to an integer, ties to even, everywhere */
#define MPS_QUIET_NAN 0x7fc00000u
#define MPS_INFINITY 0x7f800000u
#define MPS_HALF_SMALLEST 0x00400000u /* 2^-127, half of the smallest scale */

typedef struct {
    size_t pieces, piece, block;
} mps_grid;

typedef struct {
    const void *const *codes;
    const float *const *scales;
    int count, bits;
} mps_coded;

typedef struct {
    mps_grid grid;
    const void *x; /* floats of `kind`; NULL: the sum of `addends` */
    int kind;
    mps_coded addends;
    void *codes;
    float *scales;
    int bits;
    int8_t *error; /* kept error, read and written; NULL: none */
    float *error_scales;
    float keep, take;
} mps_encoding;

typedef struct {
    mps_grid grid;
    mps_coded addends;
    void *out;
    int kind, is_added;
    float scale;
} mps_decoding;

/* Where block number `index` of the whole grid lies. */
typedef struct {
    size_t at, n, scale_at, byte4;
} mps_place;

static inline size_t mps_piece_blocks(const mps_grid *grid) {
    return grid->piece / grid->block + (grid->piece % grid->block != 0);
}

static inline mps_place mps_locate(const mps_grid *grid, size_t index) {
    size_t each = mps_piece_blocks(grid), piece = index / each, inside = index % each * grid->block;
    size_t left = grid->piece - inside;
    mps_place place = {piece * grid->piece + inside, left < grid->block ? left : grid->block, index,
                       piece * ((grid->piece + 1) / 2) + inside / 2};
    return place;
}

/* -- one tile ---------------------------------------------------------------------------------------------- */

MPS_INLINE void mps_decode8(float *v, const int8_t *q, float s, size_t n, int is_added) {
    if (is_added) {
        MPS_SIMD for (size_t j = 0; j < n; j++) v[j] = v[j] + (float)q[j] * s;
    } else {
        MPS_SIMD for (size_t j = 0; j < n; j++) v[j] = (float)q[j] * s;
    }
}

MPS_INLINE float mps_low(uint8_t byte) { return (float)((int)((byte & 15u) ^ 8u) - 8); }
MPS_INLINE float mps_high(uint8_t byte) { return (float)((int)((uint32_t)(byte >> 4) ^ 8u) - 8); }

MPS_INLINE void mps_decode4(float *v, const uint8_t *q, float s, size_t n, int is_added) {
    size_t pairs = n / 2;
    if (is_added) {
        MPS_SIMD for (size_t j = 0; j < pairs; j++) {
            v[2 * j] = v[2 * j] + mps_low(q[j]) * s;
            v[2 * j + 1] = v[2 * j + 1] + mps_high(q[j]) * s;
        }
        if (n & 1) v[n - 1] = v[n - 1] + mps_low(q[pairs]) * s;
    } else {
        MPS_SIMD for (size_t j = 0; j < pairs; j++) {
            v[2 * j] = mps_low(q[j]) * s;
            v[2 * j + 1] = mps_high(q[j]) * s;
        }
        if (n & 1) v[n - 1] = mps_low(q[pairs]) * s;
    }
}

/* Elements [skip, skip + n) of one block of all addends; `skip` is even. */
MPS_INLINE void mps_sum_tile(float *v, const mps_coded *c, mps_place p, size_t skip, size_t n, int is_added) {
    for (int k = 0; k < c->count; k++) {
        float s = c->scales[k][p.scale_at];
        if (c->bits == 8) {
            mps_decode8(v, (const int8_t *)c->codes[k] + p.at + skip, s, n, is_added || k > 0);
        } else {
            mps_decode4(v, (const uint8_t *)c->codes[k] + p.byte4 + skip / 2, s, n, is_added || k > 0);
        }
    }
}

/* The largest magnitude as an integer: NaNs rank above infinity, infinity above all numbers. */
MPS_INLINE uint32_t mps_peak(const float *v, size_t n) {
    int32_t peak = 0;
    _Pragma("omp simd reduction(max : peak)") for (size_t j = 0; j < n; j++) {
        int32_t size = (int32_t)(mps_as_bits(v[j]) & 0x7fffffffu);
        peak = size > peak ? size : peak;
    }
    return (uint32_t)peak;
}

/* Scales are normal floats, so that quotients stay within the levels; and the largest code times the
 * largest scale stays finite. */
MPS_INLINE float mps_block_scale(uint32_t peak, int bits) {
    float smallest = mps_as_float(0x00800000u), largest = mps_as_float(bits == 8 ? 0x7c010203u : 0x7e124924u);
    float scale = mps_as_float(peak) / (bits == 8 ? 127.0f : 7.0f);
    if (peak <= MPS_HALF_SMALLEST) return 0.0f;
    if (peak >= MPS_INFINITY) return mps_as_float(MPS_QUIET_NAN);
    return scale < smallest ? smallest : scale > largest ? largest : scale;
}

MPS_INLINE int32_t mps_rounded(float quotient) { return (int32_t)(mps_as_bits(quotient + MPS_ROUNDER) - 0x4b400000u); }

MPS_INLINE void mps_code8(int8_t *q, const float *v, float s, size_t n) {
    if (!(s > 0.0f)) {
        memset(q, 0, n);
        return;
    }
    MPS_SIMD for (size_t j = 0; j < n; j++) q[j] = (int8_t)mps_rounded(v[j] / s);
}

MPS_INLINE void mps_code4(uint8_t *q, const float *v, float s, size_t n) {
    size_t pairs = n / 2;
    if (!(s > 0.0f)) {
        memset(q, 0, (n + 1) / 2);
        return;
    }
    MPS_SIMD for (size_t j = 0; j < pairs; j++) {
        int32_t low = mps_rounded(v[2 * j] / s), high = mps_rounded(v[2 * j + 1] / s);
        q[j] = (uint8_t)((low & 15) | ((high & 15) << 4));
    }
    if (n & 1) q[pairs] = (uint8_t)(mps_rounded(v[n - 1] / s) & 15);
}

/* Moving average of what rounding took away; a block that is not finite forgets its error. */
MPS_INLINE void mps_keep_error(const mps_encoding *job, mps_place p, const float *v, float *e, float s) {
    float keep = job->keep, take = job->take, divisor = s > 0.0f ? s : 1.0f;
    if (s != s) {
        memset(e, 0, p.n * sizeof *e);
    } else {
        MPS_SIMD for (size_t j = 0; j < p.n; j++) {
            float level = (v[j] / divisor + MPS_ROUNDER) - MPS_ROUNDER;
            e[j] = keep * e[j] + take * (v[j] - level * s);
        }
    }
    float error_scale = mps_block_scale(mps_peak(e, p.n), 8);
    job->error_scales[p.scale_at] = error_scale == error_scale ? error_scale : 0.0f;
    mps_code8(job->error + p.at, e, error_scale, p.n);
}

/* -- ranges of blocks -------------------------------------------------------------------------------------- */

MPS_CLONES static void mps_encode_range(const mps_encoding *job, size_t first, size_t last, float *v, float *e) {
    for (size_t index = first; index < last; index++) {
        mps_place p = mps_locate(&job->grid, index);
        if (job->x) {
            mps_read_tile(v, job->x, job->kind, p.at, p.n);
        } else {
            mps_sum_tile(v, &job->addends, p, 0, p.n, 0);
        }
        if (job->error) {
            mps_decode8(e, job->error + p.at, job->error_scales[p.scale_at], p.n, 0);
            MPS_SIMD for (size_t j = 0; j < p.n; j++) v[j] = v[j] + e[j];
        }
        float s = mps_block_scale(mps_peak(v, p.n), job->bits);
        job->scales[p.scale_at] = s;
        if (job->bits == 8) {
            mps_code8((int8_t *)job->codes + p.at, v, s, p.n);
        } else {
            mps_code4((uint8_t *)job->codes + p.byte4, v, s, p.n);
        }
        if (job->error) mps_keep_error(job, p, v, e, s);
    }
}

MPS_CLONES static void mps_decode_range(const mps_decoding *job, size_t first, size_t last) {
    float v[MPS_DECODE_TILE] __attribute__((aligned(64)));
    for (size_t index = first; index < last; index++) {
        mps_place p = mps_locate(&job->grid, index);
        for (size_t skip = 0; skip < p.n; skip += MPS_DECODE_TILE) {
            size_t n = p.n - skip < MPS_DECODE_TILE ? p.n - skip : MPS_DECODE_TILE;
            if (job->is_added) mps_read_tile(v, job->out, job->kind, p.at + skip, n);
            mps_sum_tile(v, &job->addends, p, skip, n, job->is_added);
            mps_write_tile(job->out, job->kind, p.at + skip, v, n, job->scale);
        }
    }
}

static inline int mps_encode_with_tiles(const mps_encoding *job, size_t first, size_t last) {
    float *tiles = (float *)malloc(2 * job->grid.block * sizeof *tiles);
    if (!tiles) return -1;
    mps_encode_range(job, first, last, tiles, tiles + job->grid.block);
    free(tiles);
    return 0;
}

/* -1: no memory for the tiles. */
static inline int mps_encode(const mps_encoding *job, int threads) {
    size_t blocks = job->grid.pieces * mps_piece_blocks(&job->grid);
    int used = mps_useful_threads(job->grid.pieces * job->grid.piece, threads), failed = 0;
    if (used == 1) return mps_encode_with_tiles(job, 0, blocks);
    unsigned mode = mps_float_mode();
#pragma omp parallel for num_threads(used) schedule(static, 1) reduction(| : failed)
    for (int k = 0; k < used; k++) {
        mps_range r = mps_cut(blocks, 1, used, k);
        unsigned before = mps_float_mode();
        mps_set_float_mode(mode);
        failed |= mps_encode_with_tiles(job, r.begin, r.end) != 0;
        mps_set_float_mode(before);
    }
    return failed ? -1 : 0;
}

static inline void mps_decode(const mps_decoding *job, int threads) {
    size_t blocks = job->grid.pieces * mps_piece_blocks(&job->grid);
    int used = mps_useful_threads(job->grid.pieces * job->grid.piece, threads);
    if (used == 1) {
        mps_decode_range(job, 0, blocks);
        return;
    }
    MPS_ON_THREADS(used, k, {
        mps_range r = mps_cut(blocks, 1, used, k);
        mps_decode_range(job, r.begin, r.end);
    });
}

#endif
