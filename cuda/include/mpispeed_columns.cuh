// Walking down the columns of a matrix: what is done to each element, and sums over rows, in one pass.
//
// A block of (x, y) threads owns x vectors of columns and steps over rows, y at a time. Sums go into one row
// of partial sums per block, in a fixed order; `column_sum` adds those up. So the result does not depend on
// which block was faster.
#pragma once
#include "mpispeed_cuda.cuh"

namespace mpispeed {

// Neighbours as floats: one access of the memory, or several of 16 bytes.
template <class T, int N>
__device__ __forceinline__ void load_floats(const T* at, float* out) {
    constexpr int kPart = N < kWide<T> ? N : kWide<T>;
#pragma unroll
    for (int part = 0; part < N / kPart; part++) {
        const Vec<T, kPart> x = reinterpret_cast<const Vec<T, kPart>*>(at)[part];
#pragma unroll
        for (int j = 0; j < kPart; j++) out[part * kPart + j] = to_float(x.item[j]);
    }
}
template <class T, int N>
__device__ __forceinline__ void store_floats(const float* x, T* at) {
    constexpr int kPart = N < kWide<T> ? N : kWide<T>;
#pragma unroll
    for (int part = 0; part < N / kPart; part++) {
        Vec<T, kPart> out;
#pragma unroll
        for (int j = 0; j < kPart; j++) store(x[part * kPart + j], &out.item[j]);
        reinterpret_cast<Vec<T, kPart>*>(at)[part] = out;
    }
}

__device__ __forceinline__ float word_part(u32 word, int, const float*) { return __uint_as_float(word); }
__device__ __forceinline__ float word_part(u32 word, int high, const bf16*) {
    return __uint_as_float(high ? word & 0xffff0000u : word << 16);
}
__device__ __forceinline__ float word_part(u32 word, int high, const fp16*) {
    const unsigned short bits = static_cast<unsigned short>(high ? word >> 16 : word);
    fp16 x;
    memcpy(&x, &bits, 2);
    return to_float(x);
}

// N neighbours that stay in registers as they stand in memory: in whole words, which the compiler would
// otherwise take apart to keep.
template <class T, int N>
struct Packed {
    static constexpr int kInWord = 4 / sizeof(T);
    Vec<u32, 4> part[N / kWide<T>];
    __device__ __forceinline__ float at(int j) const {
        return word_part(part[j / kWide<T>].item[j % kWide<T> / kInWord], j % kInWord,
                         static_cast<const T*>(nullptr));
    }
    __device__ __forceinline__ void load(const T* from) {
#pragma unroll
        for (int k = 0; k < N / kWide<T>; k++) part[k] = reinterpret_cast<const Vec<u32, 4>*>(from)[k];
    }
    // Rounds to T.
    __device__ __forceinline__ void pack(const float* x) {
#pragma unroll
        for (int k = 0; k < N / kWide<T>; k++) {
            Vec<T, kWide<T>> rounded;
#pragma unroll
            for (int j = 0; j < kWide<T>; j++) store(x[k * kWide<T> + j], &rounded.item[j]);
            memcpy(&part[k], &rounded, 16);
        }
    }
    __device__ __forceinline__ void save(T* to) const {
#pragma unroll
        for (int k = 0; k < N / kWide<T>; k++) reinterpret_cast<Vec<u32, 4>*>(to)[k] = part[k];
    }
};
template <class T>
struct Packed<T, 1> {
    T item;
    __device__ __forceinline__ float at(int) const { return to_float(item); }
    __device__ __forceinline__ void load(const T* from) { item = *from; }
    __device__ __forceinline__ void pack(const float* x) { store(x[0], &item); }
    __device__ __forceinline__ void save(T* to) const { *to = item; }
};

// Calls body.load(row) and body.finish(loaded, row) for each row of this thread; kAhead rows are loaded at
// once.
template <int kAhead, class Body>
__device__ __forceinline__ void walk_rows(u64 rows, Body& body) {
    const u64 stride = static_cast<u64>(gridDim.y) * blockDim.y;
    u64 row = static_cast<u64>(blockIdx.y) * blockDim.y + threadIdx.y;
    typename Body::Loaded loaded[kAhead];
    for (; row < rows; row += kAhead * stride) {
#pragma unroll
        for (int k = 0; k < kAhead; k++)
            if (row + k * stride < rows) loaded[k] = body.load(row + k * stride);
#pragma unroll
        for (int k = 0; k < kAhead; k++)
            if (row + k * stride < rows) body.finish(loaded[k], row + k * stride);
    }
}

// The sums of N columns of each thread, added over the threads of y, into this block's row of `partial`,
// which has `cols` columns. All threads call it. `shared` has room for one float for each sum of the block.
template <int N>
__device__ __forceinline__ void store_partial(const float* sums, float* partial, u64 cols, float* shared) {
    const u32 width = blockDim.x * N, me = threadIdx.y * blockDim.x + threadIdx.x;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) shared[threadIdx.y * width + threadIdx.x * N + j] = sums[j];
    __syncthreads();
    for (u32 col = me; col < width; col += blockDim.x * blockDim.y) {
        const u64 at = static_cast<u64>(blockIdx.x) * width + col;
        if (at >= cols) break;
        float sum = 0;
        for (u32 y = 0; y < blockDim.y; y++) sum += shared[y * width + col];
        partial[static_cast<u64>(blockIdx.y) * cols + at] = sum;
    }
}

}  // namespace mpispeed
