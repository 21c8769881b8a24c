// Layer norm and RMS norm, forward and backward. Statistics and sums in fp32; y, dx and the sum of x and a residual
// are rounded once. The variance is a second pass over the kept row, not a difference of sums.
//
// The `kept` kernels hold a row in registers: one read and one write of each element. They want rows of whole,
// aligned 16 bytes. The `any` kernels take every row and read it from memory (or its caches) up to three times.
#include "mpispeed_columns.cuh"

using namespace mpispeed;

constexpr int kVectors = 4;  // of 16 bytes in a thread of the forward kernel that keeps rows

struct NormTerms {
    unsigned long long rows, cols;
    float eps;
    int is_wide;  // the `any` kernels may go by 16 bytes
};

// The sum over the threads of a row: a warp, or the block if it has one row.
__device__ __forceinline__ float row_sum(float x, float* shared) {
    return blockDim.x == 32 ? warp_reduce(x, Sum()) : block_sum(x, shared);
}

// ---- forward ------------------------------------------------------------------------------------------------
// Reads x, and adds the residual if there is one: the sum is stored, and what follows works on the stored value.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_sum(const T* x, const T* residual, T* sum) {
    Vec<T, N> out = *reinterpret_cast<const Vec<T, N>*>(x);
    if (residual) {
        const Vec<T, N> more = *reinterpret_cast<const Vec<T, N>*>(residual);
#pragma unroll
        for (int j = 0; j < N; j++) store(__fadd_rn(to_float(out.item[j]), to_float(more.item[j])), &out.item[j]);
        *reinterpret_cast<Vec<T, N>*>(sum) = out;
    }
    return out;
}

template <class T, int N>
__device__ __forceinline__ void store_normed(const Vec<T, N>& x, float mean, float rstd, const T* weight,
                                             const T* bias, u64 col, T* y) {
    float out[N], w[N], b[N];
#pragma unroll
    for (int j = 0; j < N; j++) out[j] = __fmul_rn(__fsub_rn(to_float(x.item[j]), mean), rstd);
    if (weight) {
        load_floats<T, N>(weight + col, w);
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = __fmul_rn(out[j], w[j]);
    }
    if (bias) {
        load_floats<T, N>(bias + col, b);
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = __fadd_rn(out[j], b[j]);
    }
    store_floats<T, N>(out, y + col);
}

// Blocks of (x, y) threads with a row of each y; y is 1 if x is not 32.
template <class T, bool kIsCentered>
__device__ __forceinline__ void norm_kept(T* y, T* sum, float* means, float* rstds, const T* x, const T* residual,
                                          const T* weight, const T* bias, const NormTerms& t) {
    constexpr int V = kWide<T>;
    __shared__ float shared[32];
    const u64 row = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= t.rows) return;  // whole warps, of blocks without barriers
    const u32 vectors = static_cast<u32>(t.cols / V);
    const u64 start = row * t.cols;
    Vec<T, V> kept[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
        const u32 at = threadIdx.x + k * blockDim.x;
        if (at < vectors) {
            const u64 from = start + static_cast<u64>(at) * V;
            kept[k] = load_sum<T, V>(x + from, residual ? residual + from : nullptr, sum + from);
        }
    }
    float mean = 0, squares = 0;
    if (kIsCentered) {
#pragma unroll
        for (int k = 0; k < kVectors; k++)
            if (threadIdx.x + k * blockDim.x < vectors)
#pragma unroll
                for (int j = 0; j < V; j++) mean += to_float(kept[k].item[j]);
        mean = row_sum(mean, shared) / t.cols;
    }
#pragma unroll
    for (int k = 0; k < kVectors; k++)
        if (threadIdx.x + k * blockDim.x < vectors)
#pragma unroll
            for (int j = 0; j < V; j++) {
                const float d = to_float(kept[k].item[j]) - mean;
                squares += d * d;
            }
    const float rstd = rsqrtf(row_sum(squares, shared) / t.cols + t.eps);
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
        const u32 at = threadIdx.x + k * blockDim.x;
        if (at < vectors) store_normed<T, V>(kept[k], mean, rstd, weight, bias, static_cast<u64>(at) * V, y + start);
    }
    if (threadIdx.x == 0) {
        if (kIsCentered) means[row] = mean;
        rstds[row] = rstd;
    }
}

// A row per block; each thread comes back to what it has read, and to the sums that it has stored.
template <class T, bool kIsCentered, int V>
__device__ __forceinline__ void norm_any(T* y, T* sum, float* means, float* rstds, const T* x, const T* residual,
                                         const T* weight, const T* bias, const NormTerms& t) {
    __shared__ float shared[32];
    const u64 row = blockIdx.x, start = row * t.cols, step = static_cast<u64>(blockDim.x) * V;
    const u64 first = static_cast<u64>(threadIdx.x) * V;
    const T* from = residual ? sum + start : x + start;
    float mean = 0, squares = 0;
    if (kIsCentered || residual) {
        for (u64 col = first; col < t.cols; col += step) {
            const Vec<T, V> v = load_sum<T, V>(x + start + col, residual ? residual + start + col : nullptr,
                                               sum + start + col);
#pragma unroll
            for (int j = 0; j < V; j++) mean += to_float(v.item[j]);
        }
        mean = kIsCentered ? row_sum(mean, shared) / t.cols : 0;
    }
    for (u64 col = first; col < t.cols; col += step) {
        const Vec<T, V> v = *reinterpret_cast<const Vec<T, V>*>(from + col);
#pragma unroll
        for (int j = 0; j < V; j++) {
            const float d = to_float(v.item[j]) - mean;
            squares += d * d;
        }
    }
    const float rstd = rsqrtf(row_sum(squares, shared) / t.cols + t.eps);
    for (u64 col = first; col < t.cols; col += step)
        store_normed<T, V>(*reinterpret_cast<const Vec<T, V>*>(from + col), mean, rstd, weight, bias, col, y + start);
    if (threadIdx.x == 0) {
        if (kIsCentered) means[row] = mean;
        rstds[row] = rstd;
    }
}

#define NORM_FORWARD(name, T, tag, kIsCentered)                                                                          \
    extern "C" __global__ void __launch_bounds__(1024)                                                              \
        name##_kept_##tag(T* y, T* sum, float* mean, float* rstd, const T* x, const T* residual, const T* weight,         \
                    const T* bias, const NormTerms t) {                                                             \
        norm_kept<T, kIsCentered>(y, sum, mean, rstd, x, residual, weight, bias, t);                                \
    }                                                                                                               \
    MPISPEED_KERNEL_SYNC(name##_kept_##tag)                                                                               \
    extern "C" __global__ void __launch_bounds__(1024)                                                              \
        name##_any_##tag(T* y, T* sum, float* mean, float* rstd, const T* x, const T* residual, const T* weight,          \
                   const T* bias, const NormTerms t) {                                                              \
        if (t.is_wide)                                                                                              \
            norm_any<T, kIsCentered, kWide<T>>(y, sum, mean, rstd, x, residual, weight, bias, t);                   \
        else                                                                                                        \
            norm_any<T, kIsCentered, 1>(y, sum, mean, rstd, x, residual, weight, bias, t);                          \
    }                                                                                                               \
    MPISPEED_KERNEL_SYNC(name##_any_##tag)

NORM_FORWARD(layer_norm, float, f32, true)
NORM_FORWARD(layer_norm, bf16, bf16, true)
NORM_FORWARD(layer_norm, fp16, fp16, true)
NORM_FORWARD(rms_norm, float, f32, false)
NORM_FORWARD(rms_norm, bf16, bf16, false)
NORM_FORWARD(rms_norm, fp16, fp16, false)
