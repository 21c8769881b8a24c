/* Long integers of 32-bit limbs in 64-bit words, as `native.exact_sum` has them: any sum of doubles, exactly. */
#ifndef MPISPEED_LIMBS_H
#define MPISPEED_LIMBS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define MPS_SUM_NUMBERS 66      /* limb k counts units of 2^(32 k - 1088) */
#define MPS_SUM_LIMBS 68        /* with the counts of infinities and of NaN */
#define MPS_SUM_UNIT (-1088)
#define MPS_SUM_LEAST 14        /* the last bit of every double: 2^-1074 */

/* Adds a double of any sign; fewer than 2^29 between two carries. */
static inline void mps_limbs_add(int64_t *limbs, double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint64_t exponent = bits >> 52 & 0x7ffu, mantissa = bits & 0xfffffffffffffu;
    int64_t sign = bits >> 63 ? -1 : 1;
    if (exponent == 0x7ffu) {
        limbs[MPS_SUM_NUMBERS + (mantissa != 0)] += 1;
        return;
    }
    if (exponent) mantissa |= 1ull << 52;
    unsigned shift = (exponent ? (unsigned)exponent - 1 : 0) + MPS_SUM_LEAST, offset = shift & 31u;
    int64_t *limb = limbs + (shift >> 5);
    uint64_t low = (mantissa & 0xffffffffu) << offset, high = (mantissa >> 32) << offset;
    limb[0] += sign * (int64_t)(low & 0xffffffffu);
    limb[1] += sign * (int64_t)((low >> 32) + (high & 0xffffffffu));
    if (high >> 32) limb[2] += sign * (int64_t)(high >> 32);
}

/* Makes all limbs but the last at least 0 and below 2^32. The shift of a negative number rounds down. */
static inline void mps_limbs_carry(int64_t *limbs) {
    for (int k = 0; k < MPS_SUM_NUMBERS - 1; k++) {
        limbs[k + 1] += limbs[k] >> 32;
        limbs[k] &= 0xffffffff;
    }
}

static inline uint64_t mps_limbs_bit(const uint32_t *words, int at) {
    return words[at >> 5] >> (at & 31) & 1u;
}

/* The nearest double, ties to even, of a sum that is not below zero. */
static double mps_limbs_value(const int64_t *limbs) {
    int64_t own[MPS_SUM_NUMBERS];
    uint32_t words[MPS_SUM_NUMBERS + 4] = {0};
    if (limbs[MPS_SUM_NUMBERS + 1]) return NAN;
    if (limbs[MPS_SUM_NUMBERS]) return INFINITY;
    memcpy(own, limbs, sizeof own);
    mps_limbs_carry(own);
    for (int k = 0; k < MPS_SUM_NUMBERS - 1; k++) words[k] = (uint32_t)own[k];
    words[MPS_SUM_NUMBERS - 1] = (uint32_t)own[MPS_SUM_NUMBERS - 1];
    words[MPS_SUM_NUMBERS] = (uint32_t)((uint64_t)own[MPS_SUM_NUMBERS - 1] >> 32);
    int last = MPS_SUM_NUMBERS;
    while (last >= 0 && !words[last]) last--;
    if (last < 0) return 0.0;
    int top = 32 * last + 31 - __builtin_clz(words[last]);
    int shift = top - 52 > MPS_SUM_LEAST ? top - 52 : MPS_SUM_LEAST, at = shift >> 5, offset = shift & 31;
    /* 53 bits from `shift` on are in three words. */
    uint64_t kept = (uint64_t)words[at] >> offset | (uint64_t)words[at + 1] << (32 - offset);
    if (offset) kept |= (uint64_t)words[at + 2] << (64 - offset);
    kept &= 0x1fffffffffffffull;
    if (mps_limbs_bit(words, shift - 1)) {
        int is_more = 0;
        for (int k = 0; k < (shift - 1) >> 5 && !is_more; k++) is_more = words[k] != 0;
        uint32_t below = words[(shift - 1) >> 5] & ((1u << ((shift - 1) & 31)) - 1u);
        if (is_more || below || (kept & 1u)) kept++;
    }
    return ldexp((double)kept, shift + MPS_SUM_UNIT);
}

#endif
