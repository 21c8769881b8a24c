// Block codes: integers of 8 or 4 bits with one fp32 scale per block, as the host loops write them.
//
// A thread works on packets: kPacket neighbours, whose codes are one word. All arithmetic is that of the host loop.
#pragma once
#include "mpispeed_cuda.cuh"

namespace mpispeed {

// a / b and a % b; mostly both fit 32 bits, where a division costs a fifth.
struct Split {
    u64 quotient, rest;
};
__device__ __forceinline__ Split split(u64 a, u64 b) {
    if (((a | b) >> 32) == 0) {
        const u32 quotient = static_cast<u32>(a) / static_cast<u32>(b);
        return {quotient, static_cast<u32>(a) - quotient * static_cast<u32>(b)};
    }
    const u64 quotient = a / b;
    return {quotient, a - quotient * b};
}

// Addends of a sum, by address; passed by value, so that no table has to be copied to the device.
constexpr int kMostParts = 128;
struct CodedParts {
    const unsigned char* codes[kMostParts];
    const float* scales[kMostParts];
    u64 count;
};

// ---- the codes of a packet as one word --------------------------------------------------------------------
template <int kBits, int kPacket>
constexpr int kCodeBytes = kPacket * kBits / 8;

template <int kBytes>
__device__ __forceinline__ bool is_word_aligned(const unsigned char* at) {
    return reinterpret_cast<size_t>(at) % kBytes == 0;
}

template <int kBytes>
__device__ __forceinline__ u64 load_word(const unsigned char* at) {
    if (kBytes == 8) return *reinterpret_cast<const u64*>(at);
    if (kBytes == 4) return *reinterpret_cast<const u32*>(at);
    return *reinterpret_cast<const unsigned short*>(at);
}
template <int kBytes>
__device__ __forceinline__ void store_word(u64 word, unsigned char* at) {
    if (kBytes == 8) *reinterpret_cast<u64*>(at) = word;
    if (kBytes == 4) *reinterpret_cast<u32*>(at) = static_cast<u32>(word);
    if (kBytes == 2) *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(word);
}

// The same byte by byte, of which `count` elements are there.
template <int kBits, int kPacket>
__device__ __forceinline__ u64 load_bytes(const unsigned char* at, u32 count) {
    u64 word = 0;
    const u32 bytes = kBits == 8 ? count : (count + 1) / 2;
#pragma unroll
    for (u32 j = 0; j < kCodeBytes<kBits, kPacket>; j++)
        if (j < bytes) word |= static_cast<u64>(at[j]) << (8 * j);
    return word;
}
template <int kBits, int kPacket>
__device__ __forceinline__ void store_bytes(u64 word, unsigned char* at, u32 count) {
    const u32 bytes = kBits == 8 ? count : (count + 1) / 2;
#pragma unroll
    for (u32 j = 0; j < kCodeBytes<kBits, kPacket>; j++)
        if (j < bytes) at[j] = static_cast<unsigned char>(word >> (8 * j));
}

// How many of a packet's elements lie before the end.
template <int kPacket>
__device__ __forceinline__ u32 left_of(u32 offset, u32 n) {
    return offset >= n ? 0 : n - offset < kPacket ? n - offset : kPacket;
}

// Codes at `offset` of a block whose codes begin at `codes`; zeros where there is nothing. `is_wide`: whole packets,
// aligned ones.
template <int kBits, int kPacket>
__device__ __forceinline__ u64 load_codes(const unsigned char* codes, u32 offset, u32 n, bool is_wide) {
    const unsigned char* at = codes + static_cast<size_t>(offset) * kBits / 8;
    if (!is_wide) return load_bytes<kBits, kPacket>(at, left_of<kPacket>(offset, n));
    u64 word = 0;
    if (offset < n) word = load_word<kCodeBytes<kBits, kPacket>>(at);
    return word;
}

// ---- codes and numbers ------------------------------------------------------------------------------------
// The code's bits go into the mantissa of a power of two, which is then taken away: half the price of a conversion.
// For 4 bits there is a power whose mantissa has the code where it lies in the word, for five codes of eight: the
// others are shifted together.
template <int kBits>
__device__ __forceinline__ float level_of(u64 word, int j) {
    if (kBits == 8) {
        const u32 four = static_cast<u32>(word >> (j / 4 * 32)) ^ 0x80808080u;
        return __fsub_rn(__uint_as_float(__byte_perm(four, 0x4b000000u, 0x7650u | (j & 3))), 8388608.0f + 128.0f);
    }
    const u32 all = static_cast<u32>(word) ^ 0x88888888u;
    const u32 bit = 4 * (j < 5 ? j : j - 4), words = j < 5 ? all : all >> 16;
    const u32 magic = 0x4b000000u - (bit << 23);  // 2^(23 - bit)
    return __fsub_rn(__uint_as_float((words & 15u << bit) | magic), __uint_as_float(magic) + 8.0f);
}

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

// From numbers to which kRounder was added: the low bits are the code.
template <int kBits, int kPacket>
__device__ __forceinline__ u64 pack_codes(const float* rounded) {
    u32 half[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < kPacket; j += 4) {
        const u32 a = __float_as_uint(rounded[j]), b = __float_as_uint(rounded[j + 1]);
        const u32 c = __float_as_uint(rounded[j + 2]), d = __float_as_uint(rounded[j + 3]);
        if (kBits == 8) {
            half[j / 4] = __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
        } else {
            // Sums of whole words: with 8 added to each code nothing is borrowed from the next one.
            half[j / 4] = a + (b << 4) + (c << 8) + (d << 12) + (0x8888u - 0x1111u * 0x4b400000u);
        }
    }
    if (kBits == 4) {
        half[0] = (half[0] + (half[1] << 16)) ^ (kPacket == 8 ? 0x88888888u : 0x8888u);
        half[1] = 0;
    }
    return static_cast<u64>(half[1]) << 32 | half[0];
}

// Scales are normal floats, or 0 for zeros, or NaN for a block that is not finite. `peak`: bits of the largest
// magnitude.
template <int kBits>
__device__ __forceinline__ float scale_of(u32 peak) {
    const float smallest = __uint_as_float(0x00800000u);
    const float largest = __uint_as_float(kBits == 8 ? 0x7c010203u : 0x7e124924u);
    const float scale = __fdiv_rn(__uint_as_float(peak), kBits == 8 ? 127.0f : 7.0f);
    if (peak <= 0x00400000u) return 0.0f;
    if (peak >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    return scale < smallest ? smallest : scale > largest ? largest : scale;
}

// Quotients by the scale of a block, rounded to integers as an IEEE division and an addition would have them, in three
// instructions instead of about twenty: v * (r + rest), with r the rounded reciprocal, rest what it lacks, and one
// rounding, in which only quotients within 1.5 * 2^-47 of the middle between two floats can go wrong. With integers in
// mind that matters where such a middle is beside a half; tests try all of those that there are (test_quant.py).
struct Divisor {
    float reciprocal, rest;
    float lift;  // 1; 2^-64 under scales so large that `rest` would underflow; 0 where codes are 0: no scale, or NaN

    __device__ __forceinline__ explicit Divisor(float scale) {
        lift = scale > 0.0f ? scale > 0x1p100f ? 0x1p-64f : 1.0f : 0.0f;
        scale = __fmul_rn(scale, lift);
        reciprocal = __frcp_rn(scale);
        rest = __fmul_rn(__fmaf_rn(-reciprocal, scale, 1.0f), reciprocal);
    }
    // The integers with kRounder added.
    template <int kCount>
    __device__ __forceinline__ void round_all(float (&rounded)[kCount], const float (&v)[kCount]) const {
        if (lift == 1.0f) {
#pragma unroll
            for (int i = 0; i < kCount; i++) rounded[i] = round(v[i]);
        } else {
#pragma unroll
            for (int i = 0; i < kCount; i++) rounded[i] = lift == 0.0f ? kRounder : round(__fmul_rn(v[i], lift));
        }
    }

  private:
    __device__ __forceinline__ float round(float v) const {
        return __fadd_rn(__fmaf_rn(v, reciprocal, __fmul_rn(v, rest)), kRounder);
    }
};

}  // namespace mpispeed
