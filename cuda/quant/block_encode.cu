// Floats, or sums of coded buffers, to block codes; if wanted, with an error that is kept in 8 bits.
//
// A team of threads works on one block of codes: a warp, or a thread block. It holds the block in registers if that
// fits; otherwise it reads it again for each look: the largest magnitude, the codes, the codes of the error. Codes,
// scales and errors have the bits of the host loop (other than the payload of a NaN).
#include "mpispeed_codes.cuh"

using namespace mpispeed;

struct EncodeGrid {
    u64 blocks;       // of all pieces
    u64 piece;        // elements
    u64 each;         // blocks of a piece
    u64 nibble_bytes; // of a piece
    u32 block;        // elements
    u32 team;         // threads: 32, or those of a thread block
    float keep, take; // error = keep * error + take * (what rounding takes away)
};

// Where one block of codes lies.
struct BlockPlace {
    u64 index, at, byte4;
    u32 n;
};

__device__ __forceinline__ BlockPlace place_of(const EncodeGrid& grid, u64 index) {
    const Split where = split(index, grid.each);
    const u64 inside = where.rest * grid.block, left = grid.piece - inside;
    return {index, where.quotient * grid.piece + inside, where.quotient * grid.nibble_bytes + inside / 2,
            left < grid.block ? static_cast<u32>(left) : grid.block};
}

// What one thread has of a block: packets `step` elements apart, from `first` on. Beyond the end it reads codes of 0;
// times a scale that is not finite they are NaN, but then so is all that is there.
struct Share {
    u32 first, step, n;
};

struct LargestBits {
    __device__ __forceinline__ u32 operator()(u32 a, u32 b) const { return a > b ? a : b; }
};

__device__ __forceinline__ u32 size_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

template <int kItems>
__device__ __forceinline__ u32 peak_of(const float (&v)[kItems], u32 peak) {
#pragma unroll
    for (int i = 0; i < kItems; i++) peak = LargestBits()(peak, size_bits(v[i]));
    return peak;
}
template <int kPackets>
__device__ __forceinline__ u32 peak_of(const Vec<float, 4> (&packets)[kPackets], u32 peak) {
#pragma unroll
    for (int k = 0; k < kPackets; k++) peak = peak_of(packets[k].item, peak);
    return peak;
}
// 16-bit floats two by two, without widening them.
template <class T, int kPackets>
__device__ __forceinline__ u32 peak_of(const Vec<T, 8> (&packets)[kPackets], u32 peak) {
    u32 high = 0;
#pragma unroll
    for (int k = 0; k < kPackets; k++) {
        u32 pair[4];
        memcpy(pair, &packets[k], sizeof pair);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            peak = LargestBits()(peak, pair[j] & 0x7fffu);
            high = LargestBits()(high, pair[j] & 0x7fff0000u);
        }
    }
    return LargestBits()(peak, high >> 16);
}

template <class T>
__device__ __forceinline__ u32 bits_from(u32 peak) {
    if (sizeof(T) == 4) return peak;
    const unsigned short half = static_cast<unsigned short>(peak);
    T number;
    memcpy(&number, &half, sizeof(T) < 2 ? sizeof(T) : 2);
    return size_bits(to_float(number));
}

// ---- sources of values --------------------------------------------------------------------------------------
// `Held` is what a thread keeps of a block between its looks at it; 16-bit floats stay in their format.
template <class T>
struct Floats {
    static constexpr int kPacket = kWide<T>;
    template <int kItems>
    struct Held {
        Vec<T, kPacket> packet[kItems / kPacket];
        __device__ __forceinline__ float at(int i) const { return to_float(packet[i / kPacket].item[i % kPacket]); }
        __device__ __forceinline__ u32 peak(u32 before) const { return peak_of(packet, before); }
    };
    // The peak of magnitudes, which have the order of their bits, in fp32.
    static __device__ __forceinline__ u32 fp32_bits(u32 peak) { return bits_from<T>(peak); }

    static constexpr int kItems = 16;

    const T* x;

    template <int kCount>
    __device__ __forceinline__ void read(Held<kCount>& held, const BlockPlace& place, const Share& share) const {
        const T* from = x + place.at;
        if (is_aligned_for<kPacket>(from) && share.n % kPacket == 0) {
#pragma unroll
            for (int k = 0; k < kCount / kPacket; k++) {
                const u32 offset = share.first + k * share.step;
                held.packet[k] = {};
                if (offset < share.n) held.packet[k] = *reinterpret_cast<const Vec<T, kPacket>*>(from + offset);
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const u32 offset = share.first + i / kPacket * share.step + i % kPacket;
            if (i % kPacket == 0) held.packet[i / kPacket] = {};
            if (offset < share.n) held.packet[i / kPacket].item[i % kPacket] = from[offset];
        }
    }
};

template <int kBits>
struct Sums {
    static constexpr int kPacket = 8, kItems = 16, kAtOnce = kBits == 8 ? 2 : 4;
    template <int kCount>
    struct Held {
        float value[kCount];
        __device__ __forceinline__ float at(int i) const { return value[i]; }
        __device__ __forceinline__ u32 peak(u32 before) const { return peak_of(value, before); }
    };
    static __device__ __forceinline__ u32 fp32_bits(u32 peak) { return peak; }

    const CodedParts& parts;

    // Codes of several addends are on their way at once.
    template <int kCount>
    __device__ __forceinline__ void read(Held<kCount>& held, const BlockPlace& place, const Share& share) const {
        constexpr int kPackets = kCount / kPacket;
        const u32 count = static_cast<u32>(parts.count);
#pragma unroll
        for (int i = 0; i < kCount; i++) held.value[i] = -0.0f;  // plus any number it is that number
#pragma unroll 1
        for (u32 first = 0; first < count; first += kAtOnce) {
            u64 word[kAtOnce][kPackets];
            float scale[kAtOnce];
#pragma unroll
            for (int p = 0; p < kAtOnce; p++) {
                if (first + p >= count) break;
                const unsigned char* codes = parts.codes[first + p] + (kBits == 8 ? place.at : place.byte4);
                const bool is_wide = is_word_aligned<kCodeBytes<kBits, kPacket>>(codes) && share.n % kPacket == 0;
                scale[p] = parts.scales[first + p][place.index];
#pragma unroll
                for (int k = 0; k < kPackets; k++)
                    word[p][k] = load_codes<kBits, kPacket>(codes, share.first + k * share.step, share.n, is_wide);
            }
#pragma unroll
            for (int p = 0; p < kAtOnce; p++) {
                if (first + p >= count) break;
#pragma unroll
                for (int i = 0; i < kCount; i++) {
                    const float level = level_of<kBits>(word[p][i / kPacket], i % kPacket);
                    held.value[i] = __fadd_rn(held.value[i], __fmul_rn(level, scale[p]));
                }
            }
        }
    }
};

// ---- one block ----------------------------------------------------------------------------------------------
__device__ __forceinline__ u32 team_peak(u32 peak, u32 team) {
    __shared__ u32 shared[32];
    if (team == 32) return warp_reduce(peak, LargestBits());
    return block_reduce(peak, 0u, shared, LargestBits());
}

template <int kBits, int kPacket>
__device__ __forceinline__ void write_packet(const float* rounded, unsigned char* codes, u32 offset, u32 n,
                                             bool is_wide) {
    const u64 word = pack_codes<kBits, kPacket>(rounded);
    unsigned char* at = codes + static_cast<size_t>(offset) * kBits / 8;
    if (!is_wide) {
        store_bytes<kBits, kPacket>(word, at, left_of<kPacket>(offset, n));
    } else if (offset < n) {
        store_word<kCodeBytes<kBits, kPacket>>(word, at);
    }
}

template <int kBits, int kPacket, int kItems>
__device__ __forceinline__ void write_codes(const float (&rounded)[kItems], unsigned char* codes, const Share& share) {
    const bool is_wide = is_word_aligned<kCodeBytes<kBits, kPacket>>(codes) && share.n % kPacket == 0;
#pragma unroll
    for (int k = 0; k < kItems / kPacket; k++)
        write_packet<kBits, kPacket>(rounded + k * kPacket, codes, share.first + k * share.step, share.n, is_wide);
}

struct KeptError {
    unsigned char* codes;
    float* scales;
};

template <int kPacket, int kItems>
__device__ __forceinline__ void read_error(float (&e)[kItems], const KeptError& error, const BlockPlace& place,
                                           const Share& share) {
    const unsigned char* codes = error.codes + place.at;
    const bool is_wide = is_word_aligned<kPacket>(codes) && share.n % kPacket == 0;
    const float scale = error.scales[place.index];
    u64 word[kItems / kPacket];
#pragma unroll
    for (int k = 0; k < kItems / kPacket; k++)
        word[k] = load_codes<8, kPacket>(codes, share.first + k * share.step, share.n, is_wide);
#pragma unroll
    for (int i = 0; i < kItems; i++) e[i] = __fmul_rn(level_of<8>(word[i / kPacket], i % kPacket), scale);
}

struct Target {
    unsigned char* codes;
    float* scales;
};

__device__ __forceinline__ u32 lane_of(u32 team) { return team == 32 ? threadIdx.x & 31 : threadIdx.x; }

__device__ __forceinline__ u64 index_of(u32 team) {
    if (team != 32) return blockIdx.x;
    return static_cast<u64>(blockIdx.x) * (blockDim.x >> 5) + (threadIdx.x >> 5);
}

template <int kBits, class Source>
__device__ __forceinline__ void encode(const Source& source, const Target& target, const EncodeGrid& grid) {
    constexpr int kItems = Source::kItems, kPacket = Source::kPacket;
    const u64 index = index_of(grid.team);
    if (index >= grid.blocks) return;  // a whole warp, where no barriers follow
    const BlockPlace place = place_of(grid, index);
    const u32 lane = lane_of(grid.team), step = grid.team * kPacket, span = grid.team * kItems;
    typename Source::template Held<kItems> held;
    u32 peak = 0;
#pragma unroll 1
    for (u32 at = 0; at < place.n; at += span) {
        source.read(held, place, {at + lane * kPacket, step, place.n});
        peak = held.peak(peak);
    }
    const float scale = scale_of<kBits>(Source::fp32_bits(team_peak(peak, grid.team)));
    if (lane == 0) target.scales[index] = scale;
    const Divisor divisor(scale);
    unsigned char* codes = target.codes + (kBits == 8 ? place.at : place.byte4);
    const bool is_wide = is_word_aligned<kCodeBytes<kBits, kPacket>>(codes) && place.n % kPacket == 0;
#pragma unroll 1
    for (u32 at = 0; at < place.n; at += span) {
        const Share share = {at + lane * kPacket, step, place.n};
        if (place.n > span) source.read(held, place, share);
#pragma unroll
        for (int k = 0; k < kItems / kPacket; k++) {
            float v[kPacket], rounded[kPacket];
#pragma unroll
            for (int j = 0; j < kPacket; j++) v[j] = held.at(k * kPacket + j);
            divisor.round_all(rounded, v);
            write_packet<kBits, kPacket>(rounded, codes, share.first + k * step, place.n, is_wide);
        }
    }
}

// The new error of one share from its values (with the old error in them), and from the old error.
template <int kItems>
__device__ __forceinline__ void renew_error(float (&e)[kItems], const float (&v)[kItems],
                                            const float (&rounded)[kItems], float scale, const EncodeGrid& grid) {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
        const float lost = __fsub_rn(v[i], __fmul_rn(__fsub_rn(rounded[i], kRounder), scale));
        const float mean = __fadd_rn(__fmul_rn(grid.keep, e[i]), __fmul_rn(grid.take, lost));
        e[i] = scale == scale ? mean : 0.0f;
    }
}

template <int kBits, class Source>
__device__ __forceinline__ void encode_with_error(const Source& source, const Target& target, const KeptError& error,
                                                  const EncodeGrid& grid) {
    constexpr int kItems = 8, kPacket = Source::kPacket;
    const u64 index = index_of(grid.team);
    if (index >= grid.blocks) return;
    const BlockPlace place = place_of(grid, index);
    const u32 lane = lane_of(grid.team), step = grid.team * kPacket, span = grid.team * kItems;
    const bool is_held = place.n <= span;
    float v[kItems], e[kItems], rounded[kItems];
    const auto read = [&](const Share& share) {
        typename Source::template Held<kItems> held;
        source.read(held, place, share);
        read_error<kPacket>(e, error, place, share);
#pragma unroll
        for (int i = 0; i < kItems; i++) v[i] = __fadd_rn(held.at(i), e[i]);
    };
    u32 peak = 0;
#pragma unroll 1
    for (u32 at = 0; at < place.n; at += span) {
        read({at + lane * kPacket, step, place.n});
        peak = peak_of(v, peak);
    }
    const float scale = scale_of<kBits>(team_peak(peak, grid.team));
    const Divisor divisor(scale);
    u32 error_peak = 0;
    unsigned char* codes = target.codes + (kBits == 8 ? place.at : place.byte4);
#pragma unroll 1
    for (u32 at = 0; at < place.n; at += span) {
        const Share share = {at + lane * kPacket, step, place.n};
        if (!is_held) read(share);
        divisor.round_all(rounded, v);
        write_codes<kBits, kPacket>(rounded, codes, share);
        renew_error(e, v, rounded, scale, grid);
        error_peak = peak_of(e, error_peak);
    }
    const float error_scale = scale_of<8>(team_peak(error_peak, grid.team));
    const Divisor error_divisor(error_scale);
    // Not written before all of the team have read the old one: the sum of peaks was in between.
#pragma unroll 1
    for (u32 at = 0; at < place.n; at += span) {
        const Share share = {at + lane * kPacket, step, place.n};
        if (!is_held) {
            read(share);
            divisor.round_all(rounded, v);
            renew_error(e, v, rounded, scale, grid);
        }
        error_divisor.round_all(rounded, e);
        write_codes<8, kPacket>(rounded, error.codes + place.at, share);
    }
    if (!is_held) team_peak(0, grid.team);  // a barrier: others still read the old scale
    if (lane == 0) {
        target.scales[index] = scale;
        error.scales[index] = error_scale == error_scale ? error_scale : 0.0f;
    }
}

// ---- kernels ------------------------------------------------------------------------------------------------
// Blocks of 512 threads at a time. Three leave a thread 40 registers: for sm_80 that is enough to code 16-bit floats in
// 8 bits, for sm_90 (with nvcc 13.0) a few would be spilled, and other codes spill for both.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define ENCODE_BLOCKS(bits, T) (sizeof(T) == 2 && bits == 8 ? 3 : 2)
#else
#define ENCODE_BLOCKS(bits, T) 2
#endif

#define ENCODE_KERNELS(bits, tag, T)                                                                             \
    extern "C" __global__ void __launch_bounds__(512, ENCODE_BLOCKS(bits, T))                                    \
        block_quantize##bits##_##tag(const T* x, unsigned char* codes, float* scales, unsigned char*, float*,    \
                                     const EncodeGrid grid) {                                                    \
        encode<bits>(Floats<T>{x}, {codes, scales}, grid);                                                       \
    }                                                                                                            \
    MPISPEED_KERNEL_SYNC(block_quantize##bits##_##tag)                                                           \
    extern "C" __global__ void __launch_bounds__(1024) block_quantize##bits##_error_##tag(                       \
        const T* x, unsigned char* codes, float* scales, unsigned char* error, float* error_scales,              \
        const EncodeGrid grid) {                                                                                 \
        encode_with_error<bits>(Floats<T>{x}, {codes, scales}, {error, error_scales}, grid);                     \
    }                                                                                                            \
    MPISPEED_KERNEL_SYNC(block_quantize##bits##_error_##tag)

ENCODE_KERNELS(8, f32, float)
ENCODE_KERNELS(8, bf16, bf16)
ENCODE_KERNELS(8, fp16, fp16)
ENCODE_KERNELS(4, f32, float)
ENCODE_KERNELS(4, bf16, bf16)
ENCODE_KERNELS(4, fp16, fp16)

// From sums of codes of `from` bits to codes of `bits` bits.
#define REQUANTIZE_KERNELS(from, bits)                                                                           \
    extern "C" __global__ void __launch_bounds__(from == 8 ? 448 : 512, 2) block_requantize##from##_##bits(      \
        unsigned char* codes, float* scales, unsigned char*, float*, const __grid_constant__ EncodeGrid grid,    \
        const __grid_constant__ CodedParts parts) {                                                              \
        encode<bits>(Sums<from>{parts}, {codes, scales}, grid);                                                  \
    }                                                                                                            \
    MPISPEED_KERNEL_SYNC(block_requantize##from##_##bits)                                                        \
    extern "C" __global__ void __launch_bounds__(from == 8 ? 960 : 1024) block_requantize##from##_##bits##_error(\
        unsigned char* codes, float* scales, unsigned char* error, float* error_scales,                          \
        const __grid_constant__ EncodeGrid grid, const __grid_constant__ CodedParts parts) {                     \
        encode_with_error<bits>(Sums<from>{parts}, {codes, scales}, {error, error_scales}, grid);                \
    }                                                                                                            \
    MPISPEED_KERNEL_SYNC(block_requantize##from##_##bits##_error)

REQUANTIZE_KERNELS(8, 8)
REQUANTIZE_KERNELS(8, 4)
REQUANTIZE_KERNELS(4, 8)
REQUANTIZE_KERNELS(4, 4)
