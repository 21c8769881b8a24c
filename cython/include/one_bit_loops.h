/* One bit per element: the sign of a value, with one scale for many of them and the error kept for the next time.
 *
 * Bits are packed most significant first; 1 means not negative, so that zeros and -0 count as positive, NaN does not.
 * A value is first compensated in place of the kept error, then coded from there. Squares are summed in blocks of
 * MPS_CODE_TILE elements from the start of a range, in the lanes of exact.h: neither threads nor vector width change
 * a bit. */
#ifndef MPISPEED_ONE_BIT_LOOPS_H
#define MPISPEED_ONE_BIT_LOOPS_H

#include "exact.h"
#include "ranges.h"
#include "tiles.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define MPS_CODE_TILE 256
#define MPS_CACHED (1u << 18) /* elements: a thread that writes as many fp32 or more does so past its cache */

typedef uint32_t mps_word8 __attribute__((vector_size(32)));
typedef float mps_float8 __attribute__((vector_size(32)));

static uint32_t mps_sign_bits[256][8] __attribute__((aligned(32))); /* of the elements of a byte: bits of -0 or 0 */

static void mps_one_bit_init(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int j = 0; j < 8; j++) mps_sign_bits[byte][j] = byte >> (7 - j) & 1 ? 0 : 0x80000000u;
}

/* The eight elements of a byte, each plus or minus the float with these bits; added to what is there, or in its place. */
MPS_INLINE void mps_eight(float *to, uint8_t byte, uint32_t bits, int is_added) {
    mps_word8 signs, word = {bits, bits, bits, bits, bits, bits, bits, bits};
    mps_float8 value, before;
    memcpy(&signs, mps_sign_bits[byte], sizeof signs);
    signs ^= word;
    memcpy(&value, &signs, sizeof value);
    if (is_added) {
        memcpy(&before, to, sizeof before);
        value = before + value;
    }
    memcpy(to, &value, sizeof value);
}

/* The same to 16-byte aligned memory past the cache, which is then not read first. */
MPS_INLINE void mps_eight_past_cache(float *to, uint8_t byte, uint32_t bits) {
#ifdef __SSE2__
    const __m128i *signs = (const __m128i *)mps_sign_bits[byte];
    __m128i word = _mm_set1_epi32((int)bits);
    _mm_stream_si128((__m128i *)to, _mm_xor_si128(_mm_load_si128(signs), word));
    _mm_stream_si128((__m128i *)to + 1, _mm_xor_si128(_mm_load_si128(signs + 1), word));
#else
    mps_eight(to, byte, bits, 0);
#endif
}

MPS_INLINE double mps_tile_squares(const float *y, size_t n) {
    mps_double8 low = {0}, high = {0};
    double lane[MPS_LANES];
    size_t i = 0;
    for (; i + MPS_LANES <= n; i += MPS_LANES) {
        const float *w = y + i;
        mps_double8 a = {w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]};
        mps_double8 b = {w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15]};
        low += a * a;
        high += b * b;
    }
    memcpy(lane, &low, sizeof low);
    memcpy(lane + 8, &high, sizeof high);
    for (int j = 0; i < n; i++, j++) lane[j] += (double)y[i] * (double)y[i];
    return mps_join_lanes(lane);
}

/* -- value and error together ------------------------------------------------------------------------------------ */

typedef struct {
    const void *x, *grad; /* grad may be NULL */
    int x_kind, grad_kind;
    float keep, take; /* error += keep * x + take * grad */
} mps_mix;

MPS_CLONES static void mps_mix_range(float *error, const mps_mix *mix, size_t begin, size_t end, mps_exact *total) {
    float x[MPS_CODE_TILE], grad[MPS_CODE_TILE];
    float keep = mix->keep, take = mix->take;
    for (size_t at = begin; at < end; at += MPS_CODE_TILE) {
        size_t n = end - at < MPS_CODE_TILE ? end - at : MPS_CODE_TILE;
        float *e = error + at;
        const float *v = x, *g = grad;
        for (size_t j = 0; j < n; j += 16) MPS_PREFETCH_WRITE(e + MPS_AHEAD + j);
        if (mix->x_kind == MPS_FLOAT32)
            for (size_t j = 0; j < n; j += 16) MPS_PREFETCH_READ((const float *)mix->x + at + MPS_AHEAD + j);
        if (mix->x_kind == MPS_FLOAT32) v = (const float *)mix->x + at;
        else mps_read_tile(x, mix->x, mix->x_kind, at, n);
        if (mix->grad == NULL) {
            MPS_SIMD for (size_t j = 0; j < n; j++) e[j] = keep * v[j] + e[j];
        } else {
            if (mix->grad_kind == MPS_FLOAT32) g = (const float *)mix->grad + at;
            else mps_read_tile(grad, mix->grad, mix->grad_kind, at, n);
            MPS_SIMD for (size_t j = 0; j < n; j++) e[j] = keep * v[j] + take * g[j] + e[j];
        }
        mps_exact_add(total, mps_tile_squares(e, n));
    }
}

/* -- the sum of coded parts on a server -------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *const *bits;
    const float *weights; /* scale of each part over the number of parts */
    int count;
} mps_parts;

MPS_INLINE void mps_sum_tile1(float *sum, const uint8_t *bits, uint32_t weight, size_t bytes, int is_added) {
    if (is_added) for (size_t i = 0; i < bytes; i++) mps_eight(sum + 8 * i, bits[i], weight, 1);
    else for (size_t i = 0; i < bytes; i++) mps_eight(sum + 8 * i, bits[i], weight, 0);
}

/* Two parts in one pass, in their order. */
MPS_INLINE void mps_sum_tile2(float *sum, const uint8_t **bits, const uint32_t *weights, size_t bytes, int is_added) {
    const uint8_t *a = bits[0], *b = bits[1];
    uint32_t u = weights[0], w = weights[1];
    if (is_added) for (size_t i = 0; i < bytes; i++) {
        mps_eight(sum + 8 * i, a[i], u, 1);
        mps_eight(sum + 8 * i, b[i], w, 1);
    } else for (size_t i = 0; i < bytes; i++) {
        mps_eight(sum + 8 * i, a[i], u, 0);
        mps_eight(sum + 8 * i, b[i], w, 1);
    }
}

MPS_CLONES static void mps_sum_range(float *error, const mps_parts *parts, size_t begin, size_t end, mps_exact *total) {
    for (size_t at = begin; at < end; at += MPS_CODE_TILE) {
        size_t n = end - at < MPS_CODE_TILE ? end - at : MPS_CODE_TILE;
        float *e = error + at, sum[MPS_CODE_TILE];
        for (int k = 0; k < parts->count; k += 2) {
            int second = k + 1 < parts->count ? k + 1 : k;
            const uint8_t *bits[2] = {parts->bits[k] + at / 8, parts->bits[second] + at / 8};
            uint32_t weights[2] = {mps_as_bits(parts->weights[k]), mps_as_bits(parts->weights[second])};
            if (second == k) mps_sum_tile1(sum, bits[0], weights[0], n / 8, k > 0);
            else mps_sum_tile2(sum, bits, weights, n / 8, k > 0);
        }
        MPS_SIMD for (size_t j = 0; j < n; j++) e[j] = sum[j] + e[j];
        mps_exact_add(total, mps_tile_squares(e, n));
    }
}

/* -- signs to bits and back -------------------------------------------------------------------------------------- */

MPS_CLONES static void mps_encode_range(uint8_t *bits, float *error, float scale, size_t begin, size_t end) {
    uint8_t flags[MPS_CODE_TILE];
    for (size_t at = begin; at < end; at += MPS_CODE_TILE) {
        size_t n = end - at < MPS_CODE_TILE ? end - at : MPS_CODE_TILE;
        float *e = error + at;
        for (size_t j = 0; j < n; j += 16) MPS_PREFETCH_WRITE(e + MPS_AHEAD + j);
        MPS_SIMD for (size_t j = 0; j < n; j++) flags[j] = e[j] >= 0.0f;
        MPS_SIMD for (size_t j = 0; j < n; j++) e[j] = e[j] - (e[j] >= 0.0f ? scale : -scale);
        for (size_t byte = 0; byte < n / 8; byte++) {
            uint64_t eight; /* one flag in each byte; the product brings the first to the highest bit, and so on */
            memcpy(&eight, flags + 8 * byte, sizeof eight);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
            bits[at / 8 + byte] = (uint8_t)(eight * 0x8040201008040201ull >> 56);
#else
            bits[at / 8 + byte] = (uint8_t)(eight * 0x0102040810204080ull >> 56);
#endif
        }
    }
}

MPS_CLONES static void mps_decode_range(void *out, int kind, const uint8_t *bits, float scale, size_t begin, size_t end) {
    float tile[MPS_CODE_TILE];
    uint32_t word = mps_as_bits(scale);
    if (kind == MPS_FLOAT32 && end - begin >= MPS_CACHED && (uintptr_t)out % 16 == 0) {
        for (; begin + 8 <= end; begin += 8) mps_eight_past_cache((float *)out + begin, bits[begin / 8], word);
#ifdef __SSE2__
        _mm_sfence();
#endif
    }
    for (size_t at = begin; at < end; at += MPS_CODE_TILE) {
        size_t n = end - at < MPS_CODE_TILE ? end - at : MPS_CODE_TILE;
        const uint8_t *from = bits + at / 8;
        float *to = kind == MPS_FLOAT32 ? (float *)out + at : tile;
        for (size_t byte = 0; byte < n / 8; byte++) mps_eight(to + 8 * byte, from[byte], word, 0);
        if (n % 8) {
            float last[8];
            mps_eight(last, from[n / 8], word, 0);
            memcpy(to + n / 8 * 8, last, n % 8 * sizeof *last);
        }
        if (kind != MPS_FLOAT32) mps_write_tile(out, kind, at, tile, n, 1.0f);
    }
}

/* -- over threads ------------------------------------------------------------------------------------------------ */

enum { MPS_DO_MIX, MPS_DO_SUM, MPS_DO_ENCODE, MPS_DO_DECODE };

typedef struct {
    int what;
    float *error;
    mps_mix mix;
    mps_parts parts;
    uint8_t *bits;
    float scale;
    void *out;
    int out_kind;
} mps_coding;

static void mps_code_range(const mps_coding *job, size_t begin, size_t end, mps_exact *total) {
    switch (job->what) {
        case MPS_DO_MIX: mps_mix_range(job->error, &job->mix, begin, end, total); break;
        case MPS_DO_SUM: mps_sum_range(job->error, &job->parts, begin, end, total); break;
        case MPS_DO_ENCODE: mps_encode_range(job->bits, job->error, job->scale, begin, end); break;
        default: mps_decode_range(job->out, job->out_kind, job->bits, job->scale, begin, end);
    }
}

/* Does one pass over `n` elements; returns the number of doubles in `values` (room for MPS_PARTIALS), whose exact sum
 * is that of the squares. */
static int mps_code(const mps_coding *job, size_t n, int threads, double *values) {
    mps_exact total;
    memset(&total, 0, sizeof total);
    int used = mps_useful_threads(n, threads);
    if (used == 1) {
        mps_code_range(job, 0, n, &total);
        return mps_exact_partials(&total, values);
    }
    unsigned mode = mps_float_mode();
#pragma omp parallel for num_threads(used) schedule(static, 1)
    for (int k = 0; k < used; k++) {
        mps_range r = mps_cut(n, MPS_GRAIN, used, k);
        mps_exact own;
        memset(&own, 0, sizeof own);
        unsigned before = mps_float_mode();
        mps_set_float_mode(mode);
        mps_code_range(job, r.begin, r.end, &own);
        mps_set_float_mode(before);
#pragma omp critical(mps_code_join)
        mps_exact_join(&total, &own);
    }
    return mps_exact_partials(&total, values);
}

#endif
