// Sums of squares that no cut and no number of blocks changes: over tiles of 256 elements in 16 lanes of fp64, as the
// host loop has them, and over tiles without any rounding.
#pragma once

#include "mpispeed_cuda.cuh"

namespace mpispeed {

constexpr u32 kTile = 256, kRow = 16, kTilesOfWarp = 8, kThreads = 256;

// A long integer in units of 2^-352, 32 bits in each lane of a warp; carries wait in the upper halves. Squares of fp32
// numbers are multiples of 2^-298, a tile's sum is below 2^264: that is lanes 0 to 19. Lane 30 counts infinities, lane
// 31 NaNs.
__device__ __forceinline__ void add_exactly(u64& limb, double x, u32 lane) {
    const u64 bits = static_cast<u64>(__double_as_longlong(x));
    const u32 exponent = static_cast<u32>(bits >> 52) & 0x7ff;  // a NaN may have a sign
    const u64 mantissa = bits & 0xfffffffffffffull;
    if (exponent == 0x7ff) {
        limb += lane == (mantissa ? 31u : 30u);
        return;
    }
    if (exponent == 0) return;  // zero: no sum is smaller than a normal double
    const u32 shift = exponent - 723, offset = shift & 31;
    const u64 whole = mantissa | 1ull << 52, low = whole << offset;
    const u32 at = lane - (shift >> 5);
    const u64 high = offset ? whole >> (64 - offset) : 0;
    limb += at == 0 ? low & 0xffffffffull : at == 1 ? low >> 32 : at == 2 ? high : 0;
}

// The squares of a tile: four threads have it, each four neighbours of every row of 16. The order is the host's.
struct TileSquares {
    double lane[4] = {0.0, 0.0, 0.0, 0.0};

    __device__ __forceinline__ void add(const float (&y)[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const double wide = y[j];
            lane[j] = __dadd_rn(lane[j], __dmul_rn(wide, wide));
        }
    }
    __device__ __forceinline__ double sum() {
#pragma unroll
        for (int by = 2; by; by >>= 1)
#pragma unroll
            for (int j = 0; j < 4; j++) lane[j] = __dadd_rn(lane[j], __shfl_xor_sync(kAllLanes, lane[j], by));
        return __dadd_rn(__dadd_rn(lane[0], lane[2]), __dadd_rn(lane[1], lane[3]));
    }
};

// Adds what all threads of the block have found to the sum in memory.
__device__ __forceinline__ void flush(u64 limb, u64* limbs) {
    __shared__ u64 shared[kThreads];
    shared[threadIdx.x] = limb;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    u64 total = 0;
    for (u32 i = threadIdx.x; i < kThreads; i += 32) total += shared[i];
    if (total) atomicAdd(limbs + threadIdx.x, total);
}

template <class T>
__device__ __forceinline__ void load_four(float (&v)[4], const T* from, u32 left, bool is_wide) {
    if (is_wide) {
        const Four<T> four = *reinterpret_cast<const Four<T>*>(from);
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = to_float(four.item[j]);
    } else {
#pragma unroll
        for (u32 j = 0; j < 4; j++) v[j] = j < left ? to_float(from[j]) : 0.0f;
    }
}
}  // namespace mpispeed
