/* Sums of non-negative doubles without rounding error, and the order in which lanes of a block are joined. */
#ifndef MPISPEED_EXACT_H
#define MPISPEED_EXACT_H

#include <math.h>

#include "clones.h"

#define MPS_LANES 16
#define MPS_LIMBS 68        /* of 32 bits: all of fp64 from 2^-1074 to beyond 2^1024 */
#define MPS_PARTIALS 68

/* A sum of non-negative doubles as one long integer in units of 2^-1074; carries wait in the upper halves. */
typedef struct {
    uint64_t limbs[MPS_LIMBS];
    uint32_t pending;       /* additions since the carries were resolved */
    double special;         /* 0, or the infinity or NaN that was met */
} mps_exact;

static inline void mps_exact_carry(mps_exact *total) {
    uint64_t carry = 0;
    for (int k = 0; k < MPS_LIMBS; k++) {
        carry += total->limbs[k];
        total->limbs[k] = carry & 0xffffffffu;
        carry >>= 32;
    }
    total->pending = 0;
}

static inline void mps_exact_add(mps_exact *total, double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint64_t exponent = bits >> 52 & 0x7ffu, mantissa = bits & 0xfffffffffffffu;
    if (exponent == 0x7ffu) {
        total->special += x;
        return;
    }
    if (exponent) mantissa |= 1ull << 52;
    unsigned shift = exponent ? (unsigned)exponent - 1 : 0, offset = shift & 31u;
    uint64_t *limb = total->limbs + (shift >> 5);
    uint64_t low = mantissa << offset;
    limb[0] += low & 0xffffffffu;
    limb[1] += low >> 32;
    limb[2] += offset ? mantissa >> (64 - offset) : 0;
    if (++total->pending == 0x40000000u) mps_exact_carry(total);
}

static inline void mps_exact_join(mps_exact *total, mps_exact *other) {
    mps_exact_carry(total);
    mps_exact_carry(other);
    for (int k = 0; k < MPS_LIMBS; k++) total->limbs[k] += other->limbs[k];
    mps_exact_carry(total);
    total->special += other->special;
}

/* Doubles of decreasing size with the same exact sum, about one for 53 bits that are in use; returns their number. */
static inline int mps_exact_partials(mps_exact *total, double *values) {
    int count = 0;
    double head = 0.0;
    mps_exact_carry(total);
    for (int k = MPS_LIMBS - 1; k >= 0 && total->special == 0.0; k--) {
        if (!total->limbs[k]) continue;
        double next = ldexp((double)total->limbs[k], 32 * k - 1074);
        double sum = head + next;
        double lost = next - (sum - head);  /* exact: what is in head is a multiple of a unit above next */
        if (!isfinite(sum)) total->special = INFINITY;
        if (lost != 0.0) values[count++] = sum;
        head = lost != 0.0 ? lost : sum;
    }
    if (head != 0.0) values[count++] = head;
    if (total->special != 0.0) {
        values[0] = total->special;
        return 1;
    }
    return count;
}

MPS_INLINE double mps_join_lanes(const double *lane) {
    double eight[8], four[4];
    for (int j = 0; j < 8; j++) eight[j] = lane[j] + lane[j + 8];
    for (int j = 0; j < 4; j++) four[j] = eight[j] + eight[j + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

typedef double mps_double8 __attribute__((vector_size(64)));

#endif
