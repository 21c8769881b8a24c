// Signs packed eight to a byte, most significant bit first, with the error kept for the next time.
//
// Mix and sum bring values into the kept error and add up its squares: over tiles of 256 elements in 16 lanes of fp64,
// as the host loop, and over tiles without any rounding. So scales, bits and errors are those of the host (other than
// the payload of a NaN), however many blocks there are.
#include "mpispeed_squares.cuh"

using namespace mpispeed;

constexpr int kMostSigns = 256;

template <class T>
__device__ __forceinline__ void save_four(const float (&v)[4], T* to, u32 left, bool is_wide) {
    Four<T> four;
#pragma unroll
    for (int j = 0; j < 4; j++) store(v[j], &four.item[j]);
    if (is_wide) {
        store_whole(four, reinterpret_cast<Four<T>*>(to));
    } else {
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            if (j < left) to[j] = four.item[j];
    }
}

// Walks over tiles: `Add` gives the values that are added to the errors of four rows, four neighbours of each.
template <class Add>
__device__ __forceinline__ void walk(float* error, u64* limbs, u64 count, const Add& add) {
    const u32 lane = threadIdx.x & 31, quarter = (lane & 3) * 4;
    const u64 tiles = (count + kTile - 1) / kTile;
    const u64 stride = static_cast<u64>(gridDim.x) * (kThreads / 32) * kTilesOfWarp;
    const u64 first = (static_cast<u64>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5)) * kTilesOfWarp;
    const bool is_aligned_all = is_aligned(error) && add.is_aligned_all();
    u64 limb = 0;
    for (u64 tile = first; tile < tiles; tile += stride) {
        const u64 at = (tile + (lane >> 2)) * kTile;
        const u32 n = at >= count ? 0 : count - at < kTile ? static_cast<u32>(count - at) : kTile;
        const bool is_wide = n == kTile && is_aligned_all;
        TileSquares squares;
#pragma unroll 1
        for (u32 row = 0; row < kTile && row < n; row += 4 * kRow) {
            float e[4][4], y[4][4];
            u32 left[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u32 offset = row + k * kRow + quarter;
                left[k] = offset < n ? n - offset : 0;
                load_four(e[k], error + at + offset, left[k], is_wide);
            }
            add.values(y, at + row, quarter, left, is_wide);
#pragma unroll
            for (int k = 0; k < 4; k++) {
#pragma unroll
                for (u32 j = 0; j < 4; j++) y[k][j] = j < left[k] ? __fadd_rn(y[k][j], e[k][j]) : 0.0f;
                squares.add(y[k]);
                save_four(y[k], error + at + row + k * kRow + quarter, left[k], is_wide);
            }
        }
        const double sum = squares.sum();
#pragma unroll
        for (u32 k = 0; k < kTilesOfWarp; k++) add_exactly(limb, __shfl_sync(kAllLanes, sum, 4 * k), lane);
    }
    flush(limb, limbs);
}

// ---- value and error together -------------------------------------------------------------------------------
struct MixTerms {
    u64 count;
    float keep, take;
};

struct Absent {};
__device__ __forceinline__ bool is_aligned(const Absent*) { return true; }

template <class T, class Grad>
struct Mix {
    const T* x;
    const Grad* grad;
    float keep, take;

    __device__ __forceinline__ bool is_aligned_all() const { return is_aligned(x) && is_aligned(grad); }
    __device__ __forceinline__ void values(float (&y)[4][4], u64 at, u32 quarter, const u32 (&left)[4],
                                           bool is_wide) const {
#pragma unroll
        for (int k = 0; k < 4; k++) load_four(y[k], x + at + k * kRow + quarter, left[k], is_wide);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int j = 0; j < 4; j++) y[k][j] = __fmul_rn(keep, y[k][j]);
        add_grad(y, grad, at, quarter, left, is_wide);
    }
    template <class G>
    __device__ __forceinline__ void add_grad(float (&y)[4][4], const G* from, u64 at, u32 quarter,
                                             const u32 (&left)[4], bool is_wide) const {
        float g[4][4];
#pragma unroll
        for (int k = 0; k < 4; k++) load_four(g[k], from + at + k * kRow + quarter, left[k], is_wide);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int j = 0; j < 4; j++) y[k][j] = __fadd_rn(y[k][j], __fmul_rn(take, g[k][j]));
    }
    __device__ __forceinline__ void add_grad(float (&)[4][4], const Absent*, u64, u32, const u32 (&)[4], bool) const {}
};

#define MIX_KERNEL(name, T, Grad)                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads) name(float* error, const T* x, const Grad* grad,    \
                                                                u64* limbs, const MixTerms terms) {            \
        walk(error, limbs, terms.count, Mix<T, Grad>{x, grad, terms.keep, terms.take});                        \
    }                                                                                                          \
    MPISPEED_KERNEL_SYNC(name)
#define MIX_KERNELS(tag, T)                      \
    MIX_KERNEL(sign_mix_##tag, T, Absent)        \
    MIX_KERNEL(sign_mix_##tag##_f32, T, float)   \
    MIX_KERNEL(sign_mix_##tag##_bf16, T, bf16)   \
    MIX_KERNEL(sign_mix_##tag##_fp16, T, fp16)

MIX_KERNELS(f32, float)
MIX_KERNELS(bf16, bf16)
MIX_KERNELS(fp16, fp16)

// ---- the sum of coded parts on a server ---------------------------------------------------------------------
struct SignParts {
    const unsigned char* bits[kMostSigns];
    float weights[kMostSigns];
    u64 parts, count;
};

// Plus the number where the bit is set, and minus it elsewhere.
__device__ __forceinline__ float signed_as(u32 flag, float x) {
    return __uint_as_float(__float_as_uint(x) ^ (flag ? 0u : 0x80000000u));
}

struct SignSum {
    const SignParts& all;

    __device__ __forceinline__ bool is_aligned_all() const { return true; }
    __device__ __forceinline__ void values(float (&y)[4][4], u64 at, u32 quarter, const u32 (&left)[4], bool) const {
#pragma unroll 2
        for (u32 part = 0; part < static_cast<u32>(all.parts); part++) {
            const unsigned char* bits = all.bits[part] + (at + quarter) / 8;
            const float weight = all.weights[part];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 byte = 0;
                if (left[k]) byte = bits[k * (kRow / 8)];
                const u32 nibble = quarter & 4 ? byte : byte >> 4;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float value = signed_as(nibble & (8u >> j), weight);
                    y[k][j] = part ? __fadd_rn(y[k][j], value) : value;
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    sign_sum(float* error, u64* limbs, const __grid_constant__ SignParts parts) {
    walk(error, limbs, parts.count, SignSum{parts});
}
MPISPEED_KERNEL_SYNC(sign_sum)

// ---- signs to bits and back ---------------------------------------------------------------------------------
struct SignTerms {
    u64 count;
    float scale;
};

constexpr int kChunks = 4;  // of 128 elements: what a warp codes together

// A warp codes 512 elements to 16 words; eight neighbouring lanes share the word of a chunk.
extern "C" __global__ void __launch_bounds__(kThreads)
    sign_encode(unsigned char* bits, float* error, const SignTerms terms) {
    const u32 lane = threadIdx.x & 31;
    const u64 begin = (static_cast<u64>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5)) * (128 * kChunks);
    if (begin >= terms.count) return;
    const bool is_wide = begin + 128 * kChunks <= terms.count && is_aligned(error);
    float v[kChunks][4];
    u32 left[kChunks], own = 0;
#pragma unroll
    for (int k = 0; k < kChunks; k++) {
        const u64 at = begin + 128 * k + 4 * lane;
        left[k] = at >= terms.count ? 0 : terms.count - at < 4 ? static_cast<u32>(terms.count - at) : 4;
        load_four(v[k], error + at, left[k], is_wide);
    }
#pragma unroll
    for (int k = 0; k < kChunks; k++) {
        u32 word = 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const bool flag = v[k][j] >= 0.0f;
            if (flag && j < left[k]) word |= 8u >> j;
            v[k][j] = __fsub_rn(v[k][j], flag ? terms.scale : -terms.scale);
        }
        save_four(v[k], error + begin + 128 * k + 4 * lane, left[k], is_wide);
        word <<= 4 * ((lane & 7) ^ 1);  // the first of two neighbours has the upper half of their byte
#pragma unroll
        for (int by = 1; by < 8; by <<= 1) word |= __shfl_xor_sync(kAllLanes, word, by);
        if ((lane & 7) == k) own = word;
    }
    if ((lane & 7) >= kChunks) return;
    const u64 byte = begin / 8 + 16 * (lane & 7) + 4 * (lane >> 3), bytes = terms.count / 8;
    if (byte + 4 <= bytes && reinterpret_cast<size_t>(bits + byte) % 4 == 0) {
        *reinterpret_cast<u32*>(bits + byte) = own;
        return;
    }
    for (u32 j = 0; j < 4; j++)
        if (byte + j < bytes) bits[byte + j] = static_cast<unsigned char>(own >> (8 * j));
}
MPISPEED_KERNEL_SYNC(sign_encode)

template <class T>
__device__ __forceinline__ void decode(T* out, const unsigned char* bits, const SignTerms& terms) {
    constexpr int kPacket = kWide<T>, kLine = 32 * kPacket;
    const u64 begin = (static_cast<u64>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5)) * (kLine * kChunks);
    const u32 lane = (threadIdx.x & 31) * kPacket;
    const bool is_wide = is_aligned_for<kPacket>(out);
    u32 byte[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; k++) {
        const u64 at = begin + k * kLine + lane;
        byte[k] = 0;
        if (at < terms.count) byte[k] = bits[at / 8];
    }
#pragma unroll
    for (int k = 0; k < kChunks; k++) {
        const u64 at = begin + k * kLine + lane;
        if (kPacket == 4 && at & 4) byte[k] <<= 4;
        Vec<T, kPacket> packet;
#pragma unroll
        for (int j = 0; j < kPacket; j++) store(signed_as(byte[k] & (128u >> j), terms.scale), &packet.item[j]);
        if (is_wide && at + kPacket <= terms.count) {
            store_whole(packet, reinterpret_cast<Vec<T, kPacket>*>(out + at));
        } else {
#pragma unroll
            for (int j = 0; j < kPacket; j++)
                if (at + j < terms.count) out[at + j] = packet.item[j];
        }
    }
}

#define DECODE_KERNEL(tag, T)                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads)                                 \
        sign_decode_##tag(T* out, const unsigned char* bits, const SignTerms terms) {      \
        decode(out, bits, terms);                                                          \
    }                                                                                      \
    MPISPEED_KERNEL(sign_decode_##tag)

DECODE_KERNEL(f32, float)
DECODE_KERNEL(bf16, bf16)
DECODE_KERNEL(fp16, fp16)
