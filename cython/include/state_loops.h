/* States of optimizers at rest: 8-bit codes with one fp32 scale for each 256 elements, and 16-bit floats.
 *
 * A level is (code / top)^4 of the scale. Its root is only a guess of the code; what counts is the comparison with the
 * levels on both sides, so that rounding is right and random rounding has the value for its mean. Random bits are
 * Philox 4x32-10, sixteen counters for each run of 128 elements: the bits depend neither on threads, nor on where a
 * range begins, nor on the vector width. */
#ifndef MPISPEED_STATE_LOOPS_H
#define MPISPEED_STATE_LOOPS_H

#include <math.h>

#include "ranges.h"
#include "tiles.h"

#define MPS_STATE_BLOCK 256        /* elements of a scale, and of a tile */
#define MPS_DRAW_RUN 128           /* elements */
#define MPS_SMALLEST_NORMAL 0x00800000u
#define MPS_NOT_FINITE 0x7f800000u
#define MPS_SMALLEST_SCALE 0x10800000u        /* 2^-94 */
#define MPS_SMALLEST_SIGNED_SCALE 0x0e800000u /* 2^-98 */

enum { MPS_ENCODE8, MPS_DECODE8, MPS_ROUND, MPS_ENCODE16, MPS_DECODE16, MPS_SPLIT, MPS_JOIN };

typedef struct {
    int what;
    float *wide;         /* fp32 values, read or written */
    uint8_t *codes;
    float *scales;
    uint16_t *high, *low; /* floats of `kind` */
    size_t count;
    int kind, is_signed, is_drawn;
    uint64_t seed, step, start;
} mps_state_job;

/* -- random bits ------------------------------------------------------------------------------------------------- */

/* Sixteen bits for each element of run number `run`. */
MPS_INLINE void mps_draw_run(uint16_t *u, const mps_state_job *job, uint64_t run) {
    uint32_t c0[16], c1[16], c2[16], c3[16];
    uint32_t key0 = (uint32_t)job->seed, key1 = (uint32_t)(job->seed >> 32);
    uint32_t first = (uint32_t)(run << 4), above = (uint32_t)(run >> 28); /* sixteen counters share their high word */
    MPS_SIMD for (int j = 0; j < 16; j++) {
        c0[j] = first + (uint32_t)j;
        c1[j] = above;
        c2[j] = (uint32_t)job->step;
        c3[j] = (uint32_t)(job->step >> 32);
    }
    for (int round = 0; round < 10; round++) {
        MPS_SIMD for (int j = 0; j < 16; j++) {
            uint64_t a = (uint64_t)0xD2511F53u * c0[j], b = (uint64_t)0xCD9E8D57u * c2[j];
            uint32_t n0 = (uint32_t)(b >> 32) ^ c1[j] ^ key0, n2 = (uint32_t)(a >> 32) ^ c3[j] ^ key1;
            c1[j] = (uint32_t)b;
            c3[j] = (uint32_t)a;
            c0[j] = n0;
            c2[j] = n2;
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    MPS_SIMD for (int j = 0; j < 16; j++) {
        u[j] = (uint16_t)c0[j];
        u[16 + j] = (uint16_t)(c0[j] >> 16);
        u[32 + j] = (uint16_t)c1[j];
        u[48 + j] = (uint16_t)(c1[j] >> 16);
        u[64 + j] = (uint16_t)c2[j];
        u[80 + j] = (uint16_t)(c2[j] >> 16);
        u[96 + j] = (uint16_t)c3[j];
        u[112 + j] = (uint16_t)(c3[j] >> 16);
    }
}

/* The bits of n elements from place `at` on; `room` has those of three runs. */
MPS_INLINE const uint16_t *mps_draws(uint16_t *room, const mps_state_job *job, size_t at, size_t n) {
    uint64_t begin = job->start + at, first = begin / MPS_DRAW_RUN;
    size_t skip = (size_t)(begin % MPS_DRAW_RUN);
    for (size_t k = 0; k * MPS_DRAW_RUN < skip + n; k++) mps_draw_run(room + k * MPS_DRAW_RUN, job, first + k);
    return room + skip;
}

/* -- 8 bits ------------------------------------------------------------------------------------------------------ */

MPS_INLINE float mps_level(int32_t code, float unit) {
    float wide = (float)code, root = wide * wide * unit;
    return root * root;
}

/* Largest magnitude as an integer; values that no code has rank above all others. */
MPS_INLINE uint32_t mps_state_peak(const float *x, size_t n, int is_signed) {
    uint32_t peak = 0;
    _Pragma("omp simd reduction(max : peak)") for (size_t j = 0; j < n; j++) {
        uint32_t bits = mps_as_bits(x[j]), size = bits & 0x7fffffffu;
        if (is_signed) size = size < MPS_SMALLEST_NORMAL ? 0 : size;
        else size = size ? bits : 0; /* a negative value has the highest bit */
        peak = size > peak ? size : peak;
    }
    return peak;
}

MPS_INLINE void mps_encode_block(uint8_t *q, float *scale, const float *x, const float *share, size_t n,
                                 int is_signed) {
    const float top = is_signed ? 127.0f : 255.0f, unit = 1.0f / (top * top);
    const int32_t last = (int32_t)top - 1;
    const uint32_t least = is_signed ? MPS_SMALLEST_SIGNED_SCALE : MPS_SMALLEST_SCALE;
    uint32_t peak = mps_state_peak(x, n, is_signed);
    if (peak == 0 || peak >= MPS_NOT_FINITE) {
        *scale = peak ? mps_as_float(0x7fc00000u) : 0.0f;
        memset(q, 0, n);
        return;
    }
    float s = mps_as_float(peak < least ? least : peak);
    *scale = s;
    MPS_SIMD for (size_t j = 0; j < n; j++) {
        uint32_t bits = mps_as_bits(x[j]), size = bits & 0x7fffffffu;
        float y = mps_as_float(size < MPS_SMALLEST_NORMAL ? 0 : size) / s;
        int32_t code = (int32_t)(sqrtf(sqrtf(y)) * top);
        code = code > last ? last : code;
        float low = mps_level(code, unit), high = mps_level(code + 1, unit);
        code += y - low > (high - low) * (share ? share[j] : 0.5f);
        if (is_signed) {
            code = bits >> 31 ? -code : code;
        } else {
            code = size && !code ? 1 : code;
        }
        q[j] = (uint8_t)code;
    }
}

MPS_INLINE void mps_decode_block(float *x, const uint8_t *q, float s, size_t n, int is_signed) {
    if (is_signed) {
        const float unit = 1.0f / (127.0f * 127.0f);
        MPS_SIMD for (size_t j = 0; j < n; j++) {
            int32_t code = (int8_t)q[j];
            float value = mps_level(code, unit) * s;
            x[j] = code < 0 ? -value : value;
        }
    } else {
        const float unit = 1.0f / (255.0f * 255.0f);
        MPS_SIMD for (size_t j = 0; j < n; j++) x[j] = mps_level(q[j], unit) * s;
    }
}

/* -- 16 bits ----------------------------------------------------------------------------------------------------- */

MPS_INLINE uint16_t mps_round_bf16(float x, uint32_t draw) {
    uint32_t bits = mps_as_bits(x);
    uint32_t found = (bits + draw) >> 16;
    return (uint16_t)((found & 0x7fffu) >= 0x7f80u || (bits & 0x7fffffffu) >= MPS_NOT_FINITE ? mps_store_bf16(x)
                                                                                              : found);
}

/* Below 2^-14 steps are 2^-24. */
MPS_INLINE uint16_t mps_round_f16(float x, uint32_t draw) {
    uint32_t bits = mps_as_bits(x), size = bits & 0x7fffffffu, is_small = size < (113u << 23);
    float steps = mps_as_float(is_small ? size : 0) * 16777216.0f;
    uint32_t whole = (uint32_t)(int32_t)steps;
    whole += steps - (float)(int32_t)whole > ((float)(int32_t)draw + 0.5f) * 0x1p-16f;
    uint32_t half = (size - (112u << 23) + (draw & 0x1fffu)) >> 13;
    half = is_small ? whole : half;
    uint32_t found = half | (bits >> 16 & 0x8000u);
    return (uint16_t)(size >= MPS_NOT_FINITE || half >= 0x7c00u ? mps_store_f16(x) : found);
}

MPS_INLINE int mps_is_finite_half(uint16_t half, int kind) {
    uint16_t all = kind == MPS_BFLOAT16 ? 0x7f80u : 0x7c00u;
    return (half & all) != all;
}

MPS_INLINE float mps_load_half(uint16_t half, int kind) {
    return kind == MPS_BFLOAT16 ? mps_load_bf16(half) : mps_load_f16(half);
}

MPS_INLINE uint16_t mps_store_half(float value, int kind) {
    return kind == MPS_BFLOAT16 ? mps_store_bf16(value) : mps_store_f16(value);
}

/* -- ranges: cut at multiples of a block ------------------------------------------------------------------------- */

#define MPS_FOR_TILES(at, n)                                                                                           \
    for (size_t at = begin, n = end - at < MPS_STATE_BLOCK ? end - at : MPS_STATE_BLOCK; at < end;                     \
         at += MPS_STATE_BLOCK, n = end - at < MPS_STATE_BLOCK ? end - at : MPS_STATE_BLOCK)

MPS_INLINE void mps_encode8_of(const mps_state_job *job, size_t begin, size_t end, int is_signed) {
    uint16_t room[3 * MPS_DRAW_RUN] __attribute__((aligned(64)));
    float share[MPS_STATE_BLOCK] __attribute__((aligned(64)));
    MPS_FOR_TILES(at, n) {
        const float *x = job->wide + at;
        float *scale = job->scales + at / MPS_STATE_BLOCK;
        if (job->is_drawn) {
            const uint16_t *u = mps_draws(room, job, at, n);
            MPS_SIMD for (size_t j = 0; j < n; j++) share[j] = ((float)(int32_t)u[j] + 0.5f) * 0x1p-16f;
            mps_encode_block(job->codes + at, scale, x, share, n, is_signed);
        } else {
            mps_encode_block(job->codes + at, scale, x, NULL, n, is_signed);
        }
    }
}

MPS_CLONES static void mps_encode8_signed(const mps_state_job *job, size_t begin, size_t end) {
    mps_encode8_of(job, begin, end, 1);
}

MPS_CLONES static void mps_encode8_unsigned(const mps_state_job *job, size_t begin, size_t end) {
    mps_encode8_of(job, begin, end, 0);
}

MPS_CLONES static void mps_decode8_range(const mps_state_job *job, size_t begin, size_t end) {
    MPS_FOR_TILES(at, n) {
        float s = job->scales[at / MPS_STATE_BLOCK];
        if (job->is_signed) mps_decode_block(job->wide + at, job->codes + at, s, n, 1);
        else mps_decode_block(job->wide + at, job->codes + at, s, n, 0);
    }
}

MPS_CLONES static void mps_round_range(const mps_state_job *job, size_t begin, size_t end) {
    uint16_t room[3 * MPS_DRAW_RUN] __attribute__((aligned(64)));
    MPS_FOR_TILES(at, n) {
        const uint16_t *u = mps_draws(room, job, at, n);
        const float *x = job->wide + at;
        uint16_t *out = job->high + at;
        if (job->kind == MPS_BFLOAT16) {
            MPS_SIMD for (size_t j = 0; j < n; j++) out[j] = mps_round_bf16(x[j], u[j]);
        } else {
            MPS_SIMD for (size_t j = 0; j < n; j++) out[j] = mps_round_f16(x[j], u[j]);
        }
    }
}

MPS_INLINE void mps_split_of(const mps_state_job *job, size_t begin, size_t end, int kind) {
    const float *x = job->wide;
    MPS_SIMD for (size_t j = begin; j < end; j++) {
        uint16_t high = mps_store_half(x[j], kind), low = mps_store_half(x[j] - mps_load_half(high, kind), kind);
        job->high[j] = high;
        job->low[j] = mps_is_finite_half(high, kind) ? low : 0;
    }
}

MPS_INLINE void mps_join_of(const mps_state_job *job, size_t begin, size_t end, int kind) {
    MPS_SIMD for (size_t j = begin; j < end; j++)
        job->wide[j] = mps_load_half(job->high[j], kind) + mps_load_half(job->low[j], kind);
}

MPS_CLONES static void mps_pair_range(const mps_state_job *job, size_t begin, size_t end) {
    if (job->what == MPS_SPLIT) {
        if (job->kind == MPS_BFLOAT16) mps_split_of(job, begin, end, MPS_BFLOAT16);
        else mps_split_of(job, begin, end, MPS_FLOAT16);
    } else {
        if (job->kind == MPS_BFLOAT16) mps_join_of(job, begin, end, MPS_BFLOAT16);
        else mps_join_of(job, begin, end, MPS_FLOAT16);
    }
}

MPS_CLONES static void mps_plain_range(const mps_state_job *job, size_t begin, size_t end) {
    if (job->what == MPS_ENCODE16) mps_write_tile(job->high, job->kind, begin, job->wide + begin, end - begin, 1.0f);
    else mps_read_tile(job->wide + begin, job->high, job->kind, begin, end - begin);
}

static void mps_state_range(const mps_state_job *job, size_t begin, size_t end) {
    switch (job->what) {
    case MPS_ENCODE8: (job->is_signed ? mps_encode8_signed : mps_encode8_unsigned)(job, begin, end); break;
    case MPS_DECODE8: mps_decode8_range(job, begin, end); break;
    case MPS_ROUND: mps_round_range(job, begin, end); break;
    case MPS_SPLIT:
    case MPS_JOIN: mps_pair_range(job, begin, end); break;
    default: mps_plain_range(job, begin, end);
    }
}

static void mps_run_state(const mps_state_job *job, int threads) {
    int used = mps_useful_threads(job->count, threads);
    if (used == 1) {
        mps_state_range(job, 0, job->count);
        return;
    }
    MPS_ON_THREADS(used, k, {
        mps_range r = mps_cut(job->count, MPS_GRAIN, used, k);
        mps_state_range(job, r.begin, r.end);
    });
}

#endif
