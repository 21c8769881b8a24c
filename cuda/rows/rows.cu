// Rows of a mixture of experts: tokens to the rows of their choices and back, and the gradient of the weights. A row is
// read and written in packets of 16 bytes where all of them are aligned, and by element otherwise, with the same bits.
// An index that is not that of a row stands for a dropped choice: no memory of others is touched.
#include "mpispeed_cuda.cuh"

using namespace mpispeed;

struct RowGrid {
    u64 tokens, choices;  // of a token
    u64 count;            // of rows
    u64 width;            // elements of a row
};

template <class T>
using Packet = Vec<T, kWide<T>>;

template <class T>
__device__ __forceinline__ bool is_wide(const RowGrid& grid, const T* one, const T* other) {
    return grid.width % kWide<T> == 0 && is_aligned_for<kWide<T>>(one) && is_aligned_for<kWide<T>>(other);
}

// Elements `first` and after it of a row; behind its end there are zeros.
template <class T>
__device__ __forceinline__ Packet<T> load(const T* row, u64 first, const RowGrid& grid, bool wide) {
    Packet<T> held;
    if (wide) {
        held = *reinterpret_cast<const Packet<T>*>(row + first);
    } else {
#pragma unroll
        for (int i = 0; i < kWide<T>; i++) held.item[i] = first + i < grid.width ? row[first + i] : T{};
    }
    return held;
}
template <class T>
__device__ __forceinline__ void save(const Packet<T>& held, T* row, u64 first, const RowGrid& grid, bool wide) {
    if (wide) {
        store_whole(held, reinterpret_cast<Packet<T>*>(row + first));
    } else {
#pragma unroll
        for (int i = 0; i < kWide<T>; i++) {
            if (first + i < grid.width) row[first + i] = held.item[i];
        }
    }
}

// out[t] = sum over j of weights[t, j] * rows[index[t, j]], choice after choice from the first that is there, in fp32.
template <class T>
__device__ __forceinline__ void combine(T* out, const T* rows, const long long* index, const float* weights,
                                        const RowGrid& grid) {
    const u64 token = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (token >= grid.tokens) return;
    const bool wide = is_wide(grid, static_cast<const T*>(out), rows);
    index += token * grid.choices;
    if (weights) weights += token * grid.choices;
    for (u64 first = threadIdx.x * kWide<T>; first < grid.width; first += blockDim.x * kWide<T>) {
        float total[kWide<T>] = {};
        bool is_begun = false;
#pragma unroll 4
        for (u64 j = 0; j < grid.choices; j++) {
            const u64 place = static_cast<u64>(index[j]);
            if (place >= grid.count) continue;
            const Packet<T> held = load(rows + place * grid.width, first, grid, wide);
            const float weight = weights ? weights[j] : 1.0f;
#pragma unroll
            for (int i = 0; i < kWide<T>; i++) {
                const float term = __fmul_rn(to_float(held.item[i]), weight);
                total[i] = is_begun ? __fadd_rn(total[i], term) : term;
            }
            is_begun = true;
        }
        Packet<T> sums;
#pragma unroll
        for (int i = 0; i < kWide<T>; i++) store(total[i], &sums.item[i]);
        save(sums, out + token * grid.width, first, grid, wide);
    }
}

// Each row from the token of the choice that it belongs to, times that choice's weight; zeros without one.
template <class T>
__device__ __forceinline__ void spread(T* out, const T* x, const long long* sources, const float* weights,
                                       const RowGrid& grid) {
    const u64 row = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= grid.count) return;
    const bool wide = is_wide(grid, static_cast<const T*>(out), x);
    const long long choice = sources[row];
    const T* from = choice < 0 ? nullptr : x + static_cast<u64>(choice) / grid.choices * grid.width;
    const bool scales = weights && from;
    const float weight = scales ? weights[choice] : 1.0f;
    for (u64 first = threadIdx.x * kWide<T>; first < grid.width; first += blockDim.x * kWide<T>) {
        Packet<T> held;
#pragma unroll
        for (int i = 0; i < kWide<T>; i++) held.item[i] = T{};
        if (from) held = load(from, first, grid, wide);
        if (scales) {
#pragma unroll
            for (int i = 0; i < kWide<T>; i++) store(__fmul_rn(to_float(held.item[i]), weight), &held.item[i]);
        }
        save(held, out + row * grid.width, first, grid, wide);
    }
}

// out[t, j] = the product of x[t] and rows[index[t, j]]; a warp for each choice, lanes over packets.
template <class T>
__device__ __forceinline__ void dot(float* out, const T* x, const T* rows, const long long* index,
                                    const RowGrid& grid) {
    const u64 choice = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y, choices = grid.tokens * grid.choices;
    const bool wide = is_wide(grid, x, rows);
    const u64 place = choice < choices ? static_cast<u64>(index[choice]) : grid.count;
    float sum = 0.0f;
    if (place < grid.count) {
        x += choice / grid.choices * grid.width;
        rows += place * grid.width;
        for (u64 first = threadIdx.x * kWide<T>; first < grid.width; first += blockDim.x * kWide<T>) {
            const Packet<T> one = load(x, first, grid, wide), other = load(rows, first, grid, wide);
#pragma unroll
            for (int i = 0; i < kWide<T>; i++) sum = __fmaf_rn(to_float(one.item[i]), to_float(other.item[i]), sum);
        }
    }
    sum = warp_reduce(sum, Sum());
    if (threadIdx.x == 0 && choice < choices) out[choice] = sum;
}

#define ROW_KERNELS(tag, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) row_combine_##tag(                                          \
        T* out, const T* rows, const long long* index, const float* weights, const RowGrid grid) {                \
        combine(out, rows, index, weights, grid);                                                                 \
    }                                                                                                             \
    MPISPEED_KERNEL(row_combine_##tag)                                                                            \
    extern "C" __global__ void __launch_bounds__(256) row_spread_##tag(                                           \
        T* out, const T* x, const long long* sources, const float* weights, const RowGrid grid) {                 \
        spread(out, x, sources, weights, grid);                                                                   \
    }                                                                                                             \
    MPISPEED_KERNEL(row_spread_##tag)                                                                             \
    extern "C" __global__ void __launch_bounds__(256) row_dot_##tag(                                              \
        float* out, const T* x, const T* rows, const long long* index, const RowGrid grid) {                      \
        dot(out, x, rows, index, grid);                                                                           \
    }                                                                                                             \
    MPISPEED_KERNEL_SYNC(row_dot_##tag)

ROW_KERNELS(f32, float)
ROW_KERNELS(bf16, bf16)
ROW_KERNELS(fp16, fp16)

// The choice that each row belongs to; rows without one keep the -1 they come with.
extern "C" __global__ void __launch_bounds__(256)
    row_sources(long long* sources, const long long* index, const RowGrid grid) {
    const u64 choice = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (choice >= grid.tokens * grid.choices) return;
    const u64 place = static_cast<u64>(index[choice]);
    if (place < grid.count) sources[place] = static_cast<long long>(choice);
}
MPISPEED_KERNEL(row_sources)
