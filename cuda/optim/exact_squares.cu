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

// ---- from the sum of all ranks to the factor of an update --------------------------------------------------------
constexpr u32 kNumbers = 66;      // native/exact_sum.py has the same numbers
constexpr int kFirstUnit = -1088;
constexpr u64 kLow = 0xffffffffull;

struct ClipTerms {
    double scale, limit;
};

__device__ __forceinline__ double power_of_two(int exponent) {
    return __longlong_as_double(static_cast<long long>(exponent + 1023) << 52);
}

__device__ __forceinline__ double infinity_of_double() { return __longlong_as_double(0x7ffll << 52); }
__device__ __forceinline__ double nan_of_double() { return __longlong_as_double(0xfffll << 51); }

// The double nearest to the sum, to even in the middle. One thread.
__device__ double nearest(const u64* limbs) {
    u32 words[kNumbers + 2];
    u64 carried = 0;
    for (u32 i = 0; i < kNumbers; i++) {
        carried += limbs[i];
        words[i] = static_cast<u32>(carried & kLow);
        carried >>= 32;
    }
    words[kNumbers] = static_cast<u32>(carried & kLow);
    words[kNumbers + 1] = static_cast<u32>(carried >> 32);
    int at = kNumbers + 1;
    while (at > 0 && words[at] == 0) at--;
    if (words[at] == 0) return 0.0;
    const u64 first = words[at], second = at > 0 ? words[at - 1] : 0, third = at > 1 ? words[at - 2] : 0;
    bool is_more = false;  // something is below these
    for (int i = 0; i < at - 2; i++) is_more = is_more || words[i] != 0;
    // The highest 64 bits of the three words, the first of which is set; what is left counts as one bit.
    const u32 empty = __clz(static_cast<int>(words[at]));
    const u64 high = first << 32 | second;
    const u64 value = empty ? high << empty | third >> (32 - empty) : high;
    if (empty ? (third << empty & kLow) != 0 : third != 0) is_more = true;
    // 53 bits are kept. Sums are of doubles, so near 0, where a double has fewer, the others are 0.
    const u64 below = value & 0x7ffull;
    u64 kept = value >> 11;
    if (below > 0x400ull || (below == 0x400ull && (is_more || (kept & 1)))) kept++;
    const int exponent = kFirstUnit + 32 * at - 32 - static_cast<int>(empty) + 11, half = exponent >> 1;
    // In two factors: the power may be below the normal doubles where the product is not.
    return __dmul_rn(__dmul_rn(static_cast<double>(kept), power_of_two(half)), power_of_two(exponent - half));
}

// The norm and the factor of an update, as native/device_clip.py says.
extern "C" __global__ void __launch_bounds__(32) norm_and_factor(const u64* limbs, double* norm, float* factor,
                                                                 const ClipTerms terms) {
    if (threadIdx.x != 0) return;
    const bool has_nan = limbs[kNumbers + 1] != 0, has_infinity = limbs[kNumbers] != 0;
    const double total = has_nan ? nan_of_double() : has_infinity ? infinity_of_double() : nearest(limbs);
    if (!(total - total == 0.0)) {
        *norm = total;
        *factor = static_cast<float>(nan_of_double());
        return;
    }
    const double root = __ddiv_rn(__dsqrt_rn(total), terms.scale);
    double clipped = 1.0;
    if (terms.limit > 0.0) {
        const double quotient = __ddiv_rn(terms.limit, __dadd_rn(root, 1e-6));
        clipped = quotient < 1.0 ? quotient : 1.0;
    }
    *norm = root;
    *factor = static_cast<float>(__ddiv_rn(clipped, terms.scale));
}
MPISPEED_KERNEL(norm_and_factor)
