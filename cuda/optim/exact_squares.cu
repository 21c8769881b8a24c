// Sum of squares of a flat tensor, exact over tiles, in one read: the limbs of mpispeed_squares.cuh are added to.
#include "mpispeed_squares.cuh"

using namespace mpispeed;

// Eight tiles of a warp at a time; four rows of a tile, of four neighbours each, are in flight.
template <class T>
__device__ __forceinline__ void add_squares(const T* x, u64* limbs, u64 elements) {
    const u32 lane = threadIdx.x & 31, quarter = (lane & 3) * 4;
    const u64 tiles = (elements + kTile - 1) / kTile;
    const u64 stride = static_cast<u64>(gridDim.x) * (kThreads / 32) * kTilesOfWarp;
    const u64 first = (static_cast<u64>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5)) * kTilesOfWarp;
    const bool is_aligned_all = is_aligned(x);
    u64 limb = 0;
    for (u64 tile = first; tile < tiles; tile += stride) {
        const u64 at = (tile + (lane >> 2)) * kTile;
        const u32 n = at >= elements ? 0 : elements - at < kTile ? static_cast<u32>(elements - at) : kTile;
        const bool is_wide = n == kTile && is_aligned_all;
        TileSquares squares;
#pragma unroll 1
        for (u32 row = 0; row < kTile && row < n; row += 8 * kRow) {
            float y[8][4];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const u32 offset = row + k * kRow + quarter;
                load_four(y[k], x + at + offset, offset < n ? n - offset : 0, is_wide);
            }
#pragma unroll
            for (int k = 0; k < 8; k++) squares.add(y[k]);
        }
        const double sum = squares.sum();
#pragma unroll
        for (u32 k = 0; k < kTilesOfWarp; k++) add_exactly(limb, __shfl_sync(kAllLanes, sum, 4 * k), lane);
    }
    flush(limb, limbs);
}

#define EXACT_SQUARES(tag, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        exact_squares_##tag(const T* x, u64* limbs, u64 elements) {                              \
        add_squares(x, limbs, elements);                                                         \
    }                                                                                            \
    MPISPEED_KERNEL_SYNC(exact_squares_##tag)

EXACT_SQUARES(f32, float)
EXACT_SQUARES(bf16, bf16)
EXACT_SQUARES(fp16, fp16)
