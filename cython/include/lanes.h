/* Sixteen fp32 lanes, and the functions of a layer in plain fp32 arithmetic.
 *
 * A sum runs in sixteen lanes that are joined in a fixed order, and exponentials are polynomials, so the bits are the
 * same at every vector width. */
#ifndef MPISPEED_LANES_H
#define MPISPEED_LANES_H

#include <math.h>

#include "halves.h"

#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wpsabi" /* all that takes or gives lanes is inlined */
#endif

#define MPS_WIDE 16u /* lanes */

typedef float mps_float16 __attribute__((vector_size(64)));
typedef uint16_t mps_half16 __attribute__((vector_size(32)));
typedef uint32_t mps_word16 __attribute__((vector_size(64)));

MPS_INLINE mps_float16 mps_lanes_of_f32(const float *x) {
    mps_float16 lanes;
    memcpy(&lanes, x, sizeof lanes);
    return lanes;
}

MPS_INLINE mps_float16 mps_lanes_of_bf16(const uint16_t *x) {
    mps_half16 halves;
    mps_float16 lanes;
    memcpy(&halves, x, sizeof halves);
    mps_word16 words = __builtin_convertvector(halves, mps_word16) << 16;
    memcpy(&lanes, &words, sizeof lanes);
    return lanes;
}

MPS_INLINE mps_float16 mps_lanes_of_f16(const uint16_t *x) {
    float wide[MPS_WIDE];
    MPS_SIMD for (size_t i = 0; i < MPS_WIDE; i++) wide[i] = mps_load_f16(x[i]);
    return mps_lanes_of_f32(wide);
}

MPS_INLINE float mps_join(mps_float16 lanes) {
    float sixteen[MPS_WIDE], eight[8], four[4];
    memcpy(sixteen, &lanes, sizeof sixteen);
    for (int j = 0; j < 8; j++) eight[j] = sixteen[j] + sixteen[j + 8];
    for (int j = 0; j < 4; j++) four[j] = eight[j] + eight[j + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* e^x, within 2 units in the last place; 0 below -87.3, and 1.7e38 for all above 88. Source: Moshier, Cephes. */
MPS_INLINE float mps_exp(float x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    float limited = x < -87.3f ? -87.3f : x;
    limited = limited > 88.0f ? 88.0f : limited;
    float shifted = limited * 1.44269504088896341f + magic, whole = shifted - magic;
    float r = (limited - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    float power = mps_as_float((mps_as_bits(shifted) - mps_as_bits(magic) + 127u) << 23);
    return x < -87.3f ? 0.0f : p * power;
}

MPS_INLINE float mps_same(float x) { return x; }
MPS_INLINE float mps_relu(float x) { return x < 0.0f ? 0.0f : x; }
MPS_INLINE float mps_silu(float x) { return x / (1.0f + mps_exp(-x)); }

/* The tanh form: 0.5 (1 + tanh(u)) is the logistic function of 2 u. */
MPS_INLINE float mps_gelu_tanh(float x) {
    return x / (1.0f + mps_exp(-(x * (1.5957691216057308f + 0.07135481627159628f * (x * x)))));
}

/* The exact form; erf within 1.5e-7. Source: Abramowitz, Stegun, 7.1.26. */
MPS_INLINE float mps_gelu_erf(float x) {
    float a = (x < 0.0f ? -x : x) * 0.70710678118654752f;
    float t = 1.0f / (1.0f + 0.3275911f * a);
    float p = 1.061405429f;
    p = p * t + -1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t + -0.284496736f;
    p = p * t + 0.254829592f;
    float rest = (p * t) * mps_exp(-(a * a));
    return (0.5f * x) * (x < 0.0f ? rest : 2.0f - rest);
}

#endif
