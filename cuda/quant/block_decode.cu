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
    const u64 first_scale = where.quotient * grid.piece_scales + block.quotient;
    const u32 inside = static_cast<u32>(block.rest), lane = (threadIdx.x & 31) * kPacket;
    T* to = out + where.quotient * grid.piece + begin;
    const u64 byte8 = where.quotient * grid.piece + begin, byte4 = where.quotient * grid.nibble_bytes + begin / 2;

    const bool is_wide_out = is_aligned_for<kPacket>(to) && n % kPacket == 0;
    float v[kItems];
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

#pragma unroll 1
    for (u32 part = 0; part < static_cast<u32>(parts.count); part++) {
        const unsigned char* codes = parts.codes[part] + (kBits == 8 ? byte8 : byte4);
        const float* scales = parts.scales[part] + first_scale;
        const bool is_wide = is_word_aligned<kCodeBytes<kBits, kPacket>>(codes) && n % kPacket == 0;
        u64 word[kPackets];
#pragma unroll
        for (int k = 0; k < kPackets; k++) word[k] = load_codes<kBits, kPacket>(codes, k * kRow + lane, n, is_wide);
        // Blocks are whole rows of a warp; a row begins at most one block after the one before.
        u32 rest = inside;
        float scale = *scales;
#pragma unroll
        for (int k = 0; k < kPackets; k++) {
            if (rest >= grid.block) {
                rest -= grid.block;
                scales++;
                if (k * kRow < n) scale = *scales;
            }
            rest += kRow;
#pragma unroll
            for (int j = 0; j < kPacket; j++) {
                float& sum = v[k * kPacket + j];
                const float value = __fmul_rn(level_of<kBits>(word[k], j), scale);
                sum = kIsAdded || part ? __fadd_rn(sum, value) : value;
            }
        }
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
