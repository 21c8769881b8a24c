/* bf16 and IEEE half as 16-bit integers, to and from float, in plain integer code.
 *
 * No F16C and no _Float16: those would need another source per target, and the loops must give the
 * same bits in all. Rounding is to nearest even; every NaN stays a NaN and comes out quiet. */
#ifndef MPISPEED_HALVES_H
#define MPISPEED_HALVES_H

#include "clones.h"

MPS_INLINE float mps_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

MPS_INLINE uint32_t mps_as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

MPS_INLINE float mps_load_f32(float value) { return value; }
MPS_INLINE float mps_store_f32(float value) { return value; }

MPS_INLINE float mps_load_bf16(uint16_t half) { return mps_as_float((uint32_t)half << 16); }

MPS_INLINE uint16_t mps_store_bf16(float value) {
    uint32_t bits = mps_as_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/* Subnormal halves are rebuilt by a subtraction of normal floats, so that flush-to-zero modes do not matter. */
MPS_INLINE float mps_load_f16(uint16_t half) {
    uint32_t sign = ((uint32_t)half & 0x8000u) << 16;
    uint32_t body = ((uint32_t)half & 0x7fffu) << 13;
    uint32_t normal = body + (112u << 23);
    uint32_t special = body | 0x7f800000u;
    uint32_t small = mps_as_bits(mps_as_float(body + (113u << 23)) - mps_as_float(113u << 23));
    uint32_t bits = body >= (31u << 23) ? special : normal;
    bits = body < (1u << 23) ? small : bits;
    return mps_as_float(bits | sign);
}

/* Below 2^-14 the unit of a subnormal half is 2^-24, the unit of floats in [0.5, 1): adding 0.5 rounds there. */
MPS_INLINE uint16_t mps_store_f16(float value) {
    uint32_t bits = mps_as_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t body = bits & 0x7fffffffu;
    uint32_t normal = (body - (112u << 23) + 0xfffu + ((body >> 13) & 1u)) >> 13;
    uint32_t small = mps_as_bits(mps_as_float(body) + 0.5f) - 0x3f000000u;
    uint32_t special = body > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = body < (113u << 23) ? small : normal;
    half = body >= (143u << 23) ? special : half;
    return (uint16_t)(half | sign);
}

#endif
