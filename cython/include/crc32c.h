/* CRC-32C (Castagnoli): hardware instruction where the processor has it, tables elsewhere. */
#ifndef MPISPEED_CRC32C_H
#define MPISPEED_CRC32C_H

#include "clones.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
#define MPS_HAS_CRC_CODE 1
#endif

#define MPS_CRC_POLY 0x82f63b78u    /* bits reversed: bit 31 is x^0 */
#define MPS_CRC_LANE 1024           /* bytes per lane of the interleaved hardware loop */

static uint32_t mps_crc_table[8][256];
static uint32_t mps_crc_skip[4][256];   /* multiplies by x^(8 MPS_CRC_LANE), byte by byte */
static uint32_t mps_crc_powers[64];     /* x^(8 2^k) */

/* a b modulo the polynomial, both with their bits reversed. */
static uint32_t mps_crc_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = b & 1u ? (b >> 1) ^ MPS_CRC_POLY : b >> 1;
    }
    return product;
}

/* x^(8 bytes): what appending that many zero bytes multiplies a CRC by. */
static uint32_t mps_crc_shift(uint64_t bytes) {
    uint32_t factor = 0x80000000u;
    for (int k = 0; bytes; k++, bytes >>= 1)
        if (bytes & 1u) factor = mps_crc_multiply(factor, mps_crc_powers[k]);
    return factor;
}

static void mps_crc_setup(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1u ? (crc >> 1) ^ MPS_CRC_POLY : crc >> 1;
        mps_crc_table[0][i] = crc;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++) {
            uint32_t crc = mps_crc_table[t - 1][i];
            mps_crc_table[t][i] = (crc >> 8) ^ mps_crc_table[0][crc & 0xffu];
        }
    mps_crc_powers[0] = 0x80000000u >> 8;
    for (int k = 1; k < 64; k++) mps_crc_powers[k] = mps_crc_multiply(mps_crc_powers[k - 1], mps_crc_powers[k - 1]);
    uint32_t factor = mps_crc_shift(MPS_CRC_LANE);
    for (int t = 0; t < 4; t++)
        for (uint32_t i = 0; i < 256; i++) mps_crc_skip[t][i] = mps_crc_multiply(factor, i << (8 * t));
}

static uint32_t mps_crc_by_tables(uint32_t crc, const unsigned char *data, size_t n) {
    for (; n >= 8; data += 8, n -= 8) {
        uint32_t low = crc ^ ((uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24);
        crc = mps_crc_table[7][low & 0xffu] ^ mps_crc_table[6][(low >> 8) & 0xffu] ^ mps_crc_table[5][(low >> 16) & 0xffu] ^
              mps_crc_table[4][low >> 24] ^ mps_crc_table[3][data[4]] ^ mps_crc_table[2][data[5]] ^
              mps_crc_table[1][data[6]] ^ mps_crc_table[0][data[7]];
    }
    for (; n; data++, n--) crc = (crc >> 8) ^ mps_crc_table[0][(crc ^ *data) & 0xffu];
    return crc;
}

#ifdef MPS_HAS_CRC_CODE
MPS_INLINE uint64_t mps_crc_word(const unsigned char *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

static inline uint32_t mps_crc_over_lane(uint32_t crc) {
    return mps_crc_skip[0][crc & 0xffu] ^ mps_crc_skip[1][(crc >> 8) & 0xffu] ^ mps_crc_skip[2][(crc >> 16) & 0xffu] ^
           mps_crc_skip[3][crc >> 24];
}

/* The instruction has a latency of three cycles and a throughput of one: three lanes keep it busy. */
__attribute__((target("sse4.2"))) static uint32_t mps_crc_by_instruction(uint32_t crc, const unsigned char *data, size_t n) {
    for (; n >= 3 * MPS_CRC_LANE; data += 3 * MPS_CRC_LANE, n -= 3 * MPS_CRC_LANE) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < MPS_CRC_LANE; i += 8) {
            a = _mm_crc32_u64(a, mps_crc_word(data + i));
            b = _mm_crc32_u64(b, mps_crc_word(data + i + MPS_CRC_LANE));
            c = _mm_crc32_u64(c, mps_crc_word(data + i + 2 * MPS_CRC_LANE));
        }
        crc = mps_crc_over_lane((uint32_t)a) ^ (uint32_t)b;
        crc = mps_crc_over_lane(crc) ^ (uint32_t)c;
    }
    for (; n >= 8; data += 8, n -= 8) crc = (uint32_t)_mm_crc32_u64(crc, mps_crc_word(data));
    for (; n; data++, n--) crc = _mm_crc32_u8(crc, *data);
    return crc;
}
#endif

static int mps_crc_has_instruction(void) {
#ifdef MPS_HAS_CRC_CODE
    return __builtin_cpu_supports("sse4.2") != 0;
#else
    return 0;
#endif
}

static uint32_t mps_crc32c(uint32_t value, const void *data, size_t n, int use_tables) {
    uint32_t crc = ~value;
#ifdef MPS_HAS_CRC_CODE
    if (!use_tables && mps_crc_has_instruction()) return ~mps_crc_by_instruction(crc, (const unsigned char *)data, n);
#endif
    (void)use_tables;
    return ~mps_crc_by_tables(crc, (const unsigned char *)data, n);
}

/* CRC of A followed by B from the CRCs of both: linear over GF(2), because set-up and final inversion cancel. */
static uint32_t mps_crc32c_combine(uint32_t crc1, uint32_t crc2, uint64_t length2) {
    return mps_crc_multiply(mps_crc_shift(length2), crc1) ^ crc2;
}

#endif
