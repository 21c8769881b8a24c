// States of optimizers at rest: 8-bit codes with a scale for each 256 elements, random rounding to 16 bits, and pairs of
// 16-bit floats; the bytes are those of the host loops in state_loops.h, but for the payload of a NaN.
#include "mpispeed_cuda.cuh"

using namespace mpispeed;

constexpr u32 kBlock = 256, kRun = 128, kHeld = 8;  // of a scale, of sixteen counters, of a thread
constexpr u32 kCountsAsZero = 0x0c800000u, kSmallestScale = 0x1a800000u;  // 2^-102, with a sign; 2^-74
constexpr u32 kNotFinite = 0x7f800000u;

struct DrawTerms {
    u64 count, seed, step, start;
};

// ---- random bits --------------------------------------------------------------------------------------------
// The sixteen bits of eight elements of one run: place % 16 + 16 k for k = 0 ... 7.
struct Draws {
    Bits4 bits;
    __device__ __forceinline__ Draws(const DrawTerms& terms, u64 run, u32 place)
        : bits(philox(terms.seed, run * 16 + place, terms.step)) {}
    __device__ __forceinline__ u32 at(u32 k) const { return bits.item[k / 2] >> 16 * (k % 2) & 0xffffu; }
};

// Of one element alone, where a range does not begin at a run.
__device__ __forceinline__ u32 draw_of(const DrawTerms& terms, u64 element) {
    const u32 place = static_cast<u32>(element % kRun);
    const Bits4 bits = philox(terms.seed, element / kRun * 16 + place % 16, terms.step);
    u32 word = bits.item[0];  // not an index at run time, which would take memory
#pragma unroll
    for (u32 k = 1; k < 4; k++) word = place / 32 == k ? bits.item[k] : word;
    return word >> 16 * (place / 16 % 2) & 0xffffu;
}

__device__ __forceinline__ float share_of(u32 draw) {
    return __fmul_rn(__fadd_rn(static_cast<float>(draw), 0.5f), 0x1p-16f);
}

// ---- 8 bits -------------------------------------------------------------------------------------------------
template <bool kIsSigned>
__device__ __forceinline__ float level_at(int code) {
    constexpr float top = kIsSigned ? 127.0f : 255.0f, unit = 1.0f / (top * top);
    const float wide = static_cast<float>(code), root = __fmul_rn(__fmul_rn(wide, wide), unit);
    return __fmul_rn(root, root);
}

struct Larger {
    __device__ __forceinline__ u32 operator()(u32 a, u32 b) const { return a > b ? a : b; }
};

template <bool kIsSigned>
__device__ __forceinline__ u32 code_of(float x, float scale, float factor, float share) {
    constexpr int last = kIsSigned ? 126 : 254;
    const u32 bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    const float y = __uint_as_float(kIsSigned && size < kCountsAsZero ? 0 : size);
    int code = static_cast<int>(__fmul_rn(__fsqrt_rn(__fsqrt_rn(y)), factor));
    code = code > last ? last : code;
    const float low = __fmul_rn(level_at<kIsSigned>(code), scale);
    const float high = __fmul_rn(level_at<kIsSigned>(code + 1), scale);
    code += __fsub_rn(y, low) > __fmul_rn(__fsub_rn(high, low), share);
    if (kIsSigned) return static_cast<u32>(bits >> 31 ? -code : code) & 0xffu;
    return size && !code ? 1 : code;
}

// A warp has a block; with draws a half of it has a run, element place + 16 k in lane `place`.
template <bool kIsSigned, bool kIsDrawn>
__device__ __forceinline__ void encode8(unsigned char* codes, float* scales, const float* x, const DrawTerms& terms) {
    const u64 block = static_cast<u64>(blockIdx.x) * (blockDim.x >> 5) + (threadIdx.x >> 5), first = block * kBlock;
    const u32 lane = threadIdx.x & 31, place = lane & 15, half = lane >> 4;
    const u32 n = first >= terms.count ? 0 : terms.count - first < kBlock ? terms.count - first : kBlock;
    float v[kHeld];
    u32 peak = 0;
#pragma unroll
    for (u32 k = 0; k < kHeld; k++) {
        const u32 i = kIsDrawn ? half * kRun + place + 16 * k : lane + 32 * k;
        v[k] = i < n ? x[first + i] : 0.0f;
        const u32 bits = __float_as_uint(v[k]);
        u32 size = bits & 0x7fffffffu;
        if (kIsSigned) size = size < kCountsAsZero ? 0 : size;
        else size = size ? bits : 0;
        peak = size > peak ? size : peak;
    }
    peak = warp_reduce(peak, Larger());
    const float scale = __uint_as_float(
        peak >= kNotFinite ? 0x7fc00000u : peak == 0 ? 0 : peak < kSmallestScale ? kSmallestScale : peak);
    const float factor = __fdiv_rn(kIsSigned ? 127.0f : 255.0f, __fsqrt_rn(__fsqrt_rn(scale)));
    if (lane == 0 && n) scales[block] = scale;
    const bool is_known = scale > 0.0f;
    const u64 number = terms.start + first;
    const bool is_aligned_run = number % kRun == 0;
    const Draws draws(terms, number / kRun + half, place);
#pragma unroll
    for (u32 k = 0; k < kHeld; k++) {
        const u32 i = kIsDrawn ? half * kRun + place + 16 * k : lane + 32 * k;
        float share = 0.5f;
        if (kIsDrawn) share = share_of(is_aligned_run ? draws.at(k) : draw_of(terms, number + i));
        const u32 code = is_known ? code_of<kIsSigned>(v[k], scale, factor, share) : 0;
        if (i < n) codes[first + i] = static_cast<unsigned char>(code);
    }
}

template <bool kIsSigned>
__device__ __forceinline__ void decode8(float* out, const unsigned char* codes, const float* scales, u64 count) {
    const u64 first = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * kHeld;
    if (first >= count) return;
    const u32 n = count - first < kHeld ? static_cast<u32>(count - first) : kHeld;
    const float scale = scales[first / kBlock];
    const bool is_wide = n == kHeld && is_aligned_for<kHeld>(codes + first) && is_aligned(out + first);
    Vec<unsigned char, kHeld> code = {};
    Vec<float, kHeld> v;
    if (is_wide) {
        code = *reinterpret_cast<const Vec<unsigned char, kHeld>*>(codes + first);
    } else {
#pragma unroll
        for (u32 k = 0; k < kHeld; k++)
            if (k < n) code.item[k] = codes[first + k];
    }
#pragma unroll
    for (u32 k = 0; k < kHeld; k++) {
        const int c = kIsSigned ? static_cast<signed char>(code.item[k]) : static_cast<int>(code.item[k]);
        const float value = __fmul_rn(level_at<kIsSigned>(c), scale);
        v.item[k] = c < 0 ? -value : value;
    }
    if (is_wide) {
#pragma unroll
        for (u32 k = 0; k < kHeld; k += 4) {
            Four<float> four = {{v.item[k], v.item[k + 1], v.item[k + 2], v.item[k + 3]}};
            store_whole(four, reinterpret_cast<Four<float>*>(out + first + k));
        }
    } else {
#pragma unroll
        for (u32 k = 0; k < kHeld; k++)
            if (k < n) out[first + k] = v.item[k];
    }
}

// ---- 16 bits ------------------------------------------------------------------------------------------------
template <class T>
__device__ __forceinline__ T nearest(float x) {
    T half;
    store(x, &half);
    return half;
}

// One of the two neighbours; beyond the largest number, and of what is no number, the nearest.
template <class T>
__device__ __forceinline__ T rounded(float x, u32 draw);
template <>
__device__ __forceinline__ bf16 rounded<bf16>(float x, u32 draw) {
    const u32 bits = __float_as_uint(x), found = (bits + draw) >> 16;
    if ((found & 0x7fffu) >= 0x7f80u || (bits & 0x7fffffffu) >= kNotFinite) return nearest<bf16>(x);
    return same_bits<bf16>(static_cast<unsigned short>(found));
}
template <>
__device__ __forceinline__ fp16 rounded<fp16>(float x, u32 draw) {
    const u32 bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    u32 half = (size - (112u << 23) + (draw & 0x1fffu)) >> 13;
    if (size < 113u << 23) {  // steps of 2^-24
        const float steps = __fmul_rn(__uint_as_float(size), 16777216.0f);
        half = static_cast<u32>(static_cast<int>(steps));
        half += __fsub_rn(steps, static_cast<float>(static_cast<int>(half))) > share_of(draw);
    }
    if (size >= kNotFinite || half >= 0x7c00u) return nearest<fp16>(x);
    return same_bits<fp16>(static_cast<unsigned short>(half | (bits >> 16 & 0x8000u)));
}

// Sixteen lanes have a run, counted by the numbers of elements.
template <class T>
__device__ __forceinline__ void round_run(T* out, const float* x, const DrawTerms& terms) {
    const u64 run = terms.start / kRun + (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / 16;
    const u32 place = threadIdx.x & 15;
    const Draws draws(terms, run, place);
#pragma unroll
    for (u32 k = 0; k < kHeld; k++) {
        const u64 number = run * kRun + place + 16 * k, i = number - terms.start;
        if (number >= terms.start && i < terms.count) out[i] = rounded<T>(x[i], draws.at(k));
    }
}

template <class T>
constexpr u32 kExponent = 0;
template <>
constexpr u32 kExponent<bf16> = 0x7f80u;
template <>
constexpr u32 kExponent<fp16> = 0x7c00u;

template <class T>
__device__ __forceinline__ void split_pair(T* high, T* low, const float* x, u64 count) {
    const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
        const T near = nearest<T>(x[i]);
        high[i] = near;
        low[i] = nearest<T>((same_bits<unsigned short>(near) & kExponent<T>) != kExponent<T> ? __fsub_rn(x[i], to_float(near)) : 0.0f);
    }
}

template <class T>
__device__ __forceinline__ void join_pair(float* out, const T* high, const T* low, u64 count) {
    const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride)
        out[i] = __fadd_rn(to_float(high[i]), to_float(low[i]));
}

#define CODE_KERNELS(name, is_signed)                                                                          \
    extern "C" __global__ void __launch_bounds__(256) state_encode8_##name(                                    \
        unsigned char* codes, float* scales, const float* x, const DrawTerms terms) {                          \
        encode8<is_signed, false>(codes, scales, x, terms);                                                    \
    }                                                                                                          \
    MPISPEED_KERNEL_SYNC(state_encode8_##name)                                                                 \
    extern "C" __global__ void __launch_bounds__(256) state_encode8_##name##_drawn(                            \
        unsigned char* codes, float* scales, const float* x, const DrawTerms terms) {                          \
        encode8<is_signed, true>(codes, scales, x, terms);                                                     \
    }                                                                                                          \
    MPISPEED_KERNEL_SYNC(state_encode8_##name##_drawn)                                                         \
    extern "C" __global__ void __launch_bounds__(256) state_decode8_##name(                                    \
        float* out, const unsigned char* codes, const float* scales, u64 count) {                              \
        decode8<is_signed>(out, codes, scales, count);                                                         \
    }                                                                                                          \
    MPISPEED_KERNEL(state_decode8_##name)

CODE_KERNELS(signed, true)
CODE_KERNELS(unsigned, false)

#define HALF_KERNELS(tag, T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) state_round_##tag(T* out, const float* x,                \
                                                                        const DrawTerms terms) {               \
        round_run<T>(out, x, terms);                                                                           \
    }                                                                                                          \
    MPISPEED_KERNEL(state_round_##tag)                                                                         \
    extern "C" __global__ void __launch_bounds__(256) state_split_##tag(T* high, T* low, const float* x,       \
                                                                        u64 count) {                           \
        split_pair<T>(high, low, x, count);                                                                    \
    }                                                                                                          \
    MPISPEED_KERNEL(state_split_##tag)                                                                         \
    extern "C" __global__ void __launch_bounds__(256) state_join_##tag(float* out, const T* high, const T* low,\
                                                                       u64 count) {                            \
        join_pair<T>(out, high, low, count);                                                                   \
    }                                                                                                          \
    MPISPEED_KERNEL(state_join_##tag)

HALF_KERNELS(bf16, bf16)
HALF_KERNELS(fp16, fp16)
