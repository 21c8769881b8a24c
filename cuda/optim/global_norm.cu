// Sum of squares of many flat tensors and whether all elements are finite, in one read of each.
//
// A square of a finite fp32, bf16 or fp16 number is exact in fp64, and no sum of them overflows; so the sum is finite
// if and only if all elements are. Sums are taken in an order that the shapes alone decide.
#include "mpispeed_cuda.cuh"

using namespace mpispeed;

constexpr u32 kNormBlock = 256;    // threads; native/device_norm.py has the same numbers
constexpr u32 kNormChunk = 32768;  // elements of a chunk

struct NormRow {
    const void* at;
    u64 count;
};
struct NormChunk {
    u32 row, index;
};

template <class T>
__device__ __forceinline__ Vec<T, kWide<T>> load_group(const T* from, u32 group) {
    const uint4 word = __ldg(reinterpret_cast<const uint4*>(from) + group);
    return *reinterpret_cast<const Vec<T, kWide<T>>*>(&word);
}

// Thread t has groups t, t + kNormBlock, ... of 16 bytes, wherever the tensor starts.
template <class T>
__device__ __forceinline__ double square_sum_of(const T* from, u32 count) {
    constexpr u32 kWidth = kWide<T>, kUnroll = 4;
    const u32 whole = is_aligned_for<kWidth>(from) ? count / kWidth : 0, groups = (count + kWidth - 1) / kWidth;
    double sum = 0.0;
    for (u32 group = threadIdx.x; group < whole; group += kUnroll * kNormBlock) {
        Vec<T, kWidth> x[kUnroll];
#pragma unroll
        for (u32 k = 0; k < kUnroll; k++)
            if (group + k * kNormBlock < whole) x[k] = load_group<T>(from, group + k * kNormBlock);
#pragma unroll
        for (u32 k = 0; k < kUnroll; k++) {
            if (group + k * kNormBlock >= whole) continue;
#pragma unroll
            for (u32 j = 0; j < kWidth; j++) {
                const double wide = to_float(x[k].item[j]);
                sum += wide * wide;
            }
        }
    }
    for (u32 group = whole + (threadIdx.x - whole) % kNormBlock; group < groups; group += kNormBlock) {
#pragma unroll
        for (u32 j = 0; j < kWidth; j++) {
            if (kWidth * group + j >= count) continue;
            const double wide = to_float(from[kWidth * group + j]);
            sum += wide * wide;
        }
    }
    return sum;
}

template <class T>
__device__ __forceinline__ void square_sum(const NormRow* rows, const NormChunk* chunks, double* partials) {
    __shared__ double shared[32];
    const NormChunk chunk = chunks[blockIdx.x];
    const NormRow row = rows[chunk.row];
    const u64 begin = static_cast<u64>(chunk.index) * kNormChunk, left = row.count - begin;
    const u32 count = left < kNormChunk ? static_cast<u32>(left) : kNormChunk;
    const double sum = block_sum(square_sum_of(static_cast<const T*>(row.at) + begin, count), shared);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

#define SQUARE_SUM(name, T)                                                                        \
    extern "C" __global__ void __launch_bounds__(kNormBlock)                                       \
        name(const NormRow* rows, const NormChunk* chunks, double* partials) {                     \
        square_sum<T>(rows, chunks, partials);                                                     \
    }                                                                                              \
    MPISPEED_KERNEL_SYNC(name)

SQUARE_SUM(square_sum_f32, float)
SQUARE_SUM(square_sum_bf16, bf16)
SQUARE_SUM(square_sum_fp16, fp16)

// One block: the sum of the partial sums, and a byte that is 1 if it is finite.
extern "C" __global__ void __launch_bounds__(1024) square_sum_total(const double* partials, double* sum,
                                                                    unsigned char* is_finite, u64 count) {
    __shared__ double shared[32];
    double mine = 0.0;
    for (u64 at = threadIdx.x; at < count; at += blockDim.x) mine += partials[at];
    mine = block_sum(mine, shared);
    if (threadIdx.x != 0) return;
    *sum = mine;
    *is_finite = mine - mine == 0.0;
}
MPISPEED_KERNEL_SYNC(square_sum_total)
