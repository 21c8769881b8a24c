// Sums of block codes to floats: dequantize, dequantize and add, dequantize and sum. A warp works on 512 neighbours of
// one piece; each element is read once from every addend and written once. The bits are those of the host loop (other
// than the payload of a NaN): addends in order, in fp32, times the factor, rounded once.
#include "mpispeed_codes.cuh"

using namespace mpispeed;

struct DecodeGrid {
    u64 units;         // runs of 512 elements of all pieces
    u64 piece;         // elements
    u64 each;          // runs of a piece
    u64 piece_scales;  // scales of a piece
    u64 nibble_bytes;  // of a piece
    u32 block;         // elements
    float factor;
};

constexpr int kItems = 16, kRun = 32 * kItems;

// Where the codes of a run begin, and which scales it has.
struct Run {
    u64 codes, first_scale;
    u32 inside, n;  // place in the block of the first element, and number of elements
};

// Adds all addends, in order, to what the lane has; codes of kAtOnce addends are on their way at once. With kIsSingle
// the run lies in one block; otherwise blocks are whole rows of a warp, and a row begins at most one block after the
// one before it.
template <int kBits, int kPacket, int kAtOnce, bool kIsSingle>
__device__ __forceinline__ void add_parts(float (&v)[kItems], const CodedParts& parts, const Run& run, u32 block) {
    constexpr int kPackets = kItems / kPacket, kRow = 32 * kPacket;
    const u32 count = static_cast<u32>(parts.count), lane = (threadIdx.x & 31) * kPacket;
#pragma unroll 1
    for (u32 first = 0; first < count; first += kAtOnce) {
        u64 word[kAtOnce][kPackets];
        float scale[kAtOnce];
#pragma unroll
        for (int p = 0; p < kAtOnce; p++) {
            if (first + p >= count) break;
            const unsigned char* codes = parts.codes[first + p] + run.codes;
            const bool is_wide = is_word_aligned<kCodeBytes<kBits, kPacket>>(codes) && run.n % kPacket == 0;
            scale[p] = parts.scales[first + p][run.first_scale];
#pragma unroll
            for (int k = 0; k < kPackets; k++)
                word[p][k] = load_codes<kBits, kPacket>(codes, k * kRow + lane, run.n, is_wide);
        }
#pragma unroll
        for (int p = 0; p < kAtOnce; p++) {
            if (first + p >= count) break;
            const float* scales = parts.scales[first + p] + run.first_scale;
            u32 rest = run.inside;
#pragma unroll
            for (int k = 0; k < kPackets; k++) {
                if (!kIsSingle && rest >= block) {
                    rest -= block;
                    scales++;
                    if (k * kRow < run.n) scale[p] = *scales;
                }
                rest += kRow;
#pragma unroll
                for (int j = 0; j < kPacket; j++) {
                    float& sum = v[k * kPacket + j];
                    sum = __fadd_rn(sum, __fmul_rn(level_of<kBits>(word[p][k], j), scale[p]));
                }
            }
        }
    }
}

template <class T, int kBits, bool kIsAdded>
__device__ __forceinline__ void decode(T* out, const DecodeGrid& grid, const CodedParts& parts) {
    constexpr int kPacket = kWide<T>, kPackets = kItems / kPacket, kRow = 32 * kPacket;
    using Packet = Vec<T, kPacket>;
    const u64 unit = static_cast<u64>(blockIdx.x) * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (unit >= grid.units) return;
    const Split where = split(unit, grid.each);
    const u64 begin = where.rest * kRun, left = grid.piece - begin;
    const u32 n = left < kRun ? static_cast<u32>(left) : kRun;
    const Split block = split(begin, grid.block);
    const u64 byte8 = where.quotient * grid.piece + begin, byte4 = where.quotient * grid.nibble_bytes + begin / 2;
    const Run run = {kBits == 8 ? byte8 : byte4, where.quotient * grid.piece_scales + block.quotient,
                     static_cast<u32>(block.rest), n};
    const u32 lane = (threadIdx.x & 31) * kPacket;
    T* to = out + where.quotient * grid.piece + begin;

    const bool is_wide_out = is_aligned_for<kPacket>(to) && n % kPacket == 0;
    float v[kItems];
#pragma unroll
    for (int i = 0; i < kItems; i++) v[i] = -0.0f;  // plus any number it is that number
    if (kIsAdded) {
#pragma unroll
        for (int k = 0; k < kPackets; k++) {
            const u32 offset = k * kRow + lane;
            Packet packet = {};
            if (is_wide_out) {
                if (offset < n) packet = *reinterpret_cast<const Packet*>(to + offset);
            } else {
#pragma unroll
                for (int j = 0; j < kPacket; j++)
                    if (offset + j < n) packet.item[j] = to[offset + j];
            }
#pragma unroll
            for (int j = 0; j < kPacket; j++) v[k * kPacket + j] = to_float(packet.item[j]);
        }
    }

    if (run.inside + n <= grid.block) {
        add_parts<kBits, kPacket, kIsAdded ? 1 : 4, true>(v, parts, run, grid.block);  // mostly one is added
    } else {
        add_parts<kBits, kPacket, 1, false>(v, parts, run, grid.block);
    }

#pragma unroll
    for (int k = 0; k < kPackets; k++) {
        const u32 offset = k * kRow + lane;
        Packet packet;
#pragma unroll
        for (int j = 0; j < kPacket; j++) store(__fmul_rn(v[k * kPacket + j], grid.factor), &packet.item[j]);
        if (is_wide_out) {
            if (offset < n) store_whole(packet, reinterpret_cast<Packet*>(to + offset));
        } else {
#pragma unroll
            for (int j = 0; j < kPacket; j++)
                if (offset + j < n) to[offset + j] = packet.item[j];
        }
    }
}

#define DECODE_KERNELS(bits, tag, T)                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 4) block_dequantize##bits##_##tag(                             \
        T* out, const __grid_constant__ DecodeGrid grid, const __grid_constant__ CodedParts parts) {              \
        decode<T, bits, false>(out, grid, parts);                                                                 \
    }                                                                                                             \
    MPISPEED_KERNEL(block_dequantize##bits##_##tag)                                                               \
    extern "C" __global__ void __launch_bounds__(256, 4) block_dequantize##bits##_add_##tag(                         \
        T* out, const __grid_constant__ DecodeGrid grid, const __grid_constant__ CodedParts parts) {              \
        decode<T, bits, true>(out, grid, parts);                                                                  \
    }                                                                                                             \
    MPISPEED_KERNEL(block_dequantize##bits##_add_##tag)

DECODE_KERNELS(8, f32, float)
DECODE_KERNELS(8, bf16, bf16)
DECODE_KERNELS(8, fp16, fp16)
DECODE_KERNELS(4, f32, float)
DECODE_KERNELS(4, bf16, bf16)
DECODE_KERNELS(4, fp16, fp16)
