/* Some of the tokens of each sample, chosen by a key: those whose numbers, made of the key, are the least.
 *
 * The numbers are those of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). */
#ifndef MPISPEED_CHOICE_LOOPS_H
#define MPISPEED_CHOICE_LOOPS_H

#include "clones.h"

#include <stdlib.h>

#define MPS_CHOICE_BITS 12u /* the first bits of a number say in which bucket it is */
#define MPS_GOLDEN 0x9E3779B97F4A7C15ull

MPS_INLINE uint64_t mps_mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

MPS_CLONES static void mps_numbers(uint64_t *number, uint64_t key, size_t tokens) {
    MPS_SIMD for (size_t t = 0; t < tokens; t++) number[t] = mps_mixed(key + (t + 1) * MPS_GOLDEN);
}

static int mps_by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The places of the `count` least numbers, ascending; of equal ones the first. */
static void mps_least(int32_t *out, const uint64_t *number, uint64_t *bucket, size_t tokens, size_t count) {
    size_t counts[1u << MPS_CHOICE_BITS] = {0}, before = 0, at = 0, found = 0;
    for (size_t t = 0; t < tokens; t++) counts[number[t] >> (64 - MPS_CHOICE_BITS)]++;
    while (before + counts[at] < count) before += counts[at++];
    for (size_t t = 0; t < tokens; t++)
        if (number[t] >> (64 - MPS_CHOICE_BITS) == at) bucket[found++] = number[t];
    qsort(bucket, found, sizeof *bucket, mps_by_value);
    uint64_t last = bucket[count - before - 1];
    size_t equal = count - before;
    for (size_t i = 0; i < found && bucket[i] < last; i++) equal--;
    for (size_t t = 0; t < tokens; t++) {
        if (number[t] > last || (number[t] == last && !equal)) continue;
        if (number[t] == last) equal--;
        *out++ = (int32_t)t;
    }
}

/* Row b of out [batch, count] has places of [0, tokens) for the key of sample first + b; 0: no memory. */
static int mps_choose(int32_t *out, uint64_t key, uint64_t first, size_t batch, size_t tokens, size_t count) {
    if (!batch || !count) return 1;
    uint64_t *number = (uint64_t *)malloc(2 * tokens * sizeof *number);
    if (!number) return 0;
    for (size_t b = 0; b < batch; b++) {
        mps_numbers(number, mps_mixed(key + (first + b + 1) * MPS_GOLDEN), tokens);
        mps_least(out + b * count, number, number + tokens, tokens, count);
    }
    free(number);
    return 1;
}

#endif
