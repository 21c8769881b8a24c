// Layer norm and RMS norm, forward and backward. Statistics and sums in fp32; y, dx and the sum of x and a
// residual are rounded once. The variance is a second pass over the kept row, not a difference of sums.
//
// The `kept` kernels hold a row in registers: one read and one write of each element. They want rows of
// whole, aligned 16 bytes. The `any` kernels take every row and read it from memory (or its caches) up to
// three times.
#include "mpispeed_columns.cuh"
#include "mpispeed_dropout.cuh"

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

// ---- forward ----------------------------------------------------------------------------------------------
// What is normed: x, or the sum of x and a residual, or of dropout(x + bias) and a residual. A sum is stored,
// and what follows works on the stored value. Loads stand apart from that, so that several are on their way
// at once.
template <class T, int N>
struct Raw {
    Packed<T, N> x, more;
};

template <class T>
struct Plain {
    const T *x, *residual;
    T* sum;

    __device__ __forceinline__ bool is_sum() const { return residual; }
    template <int N>
    __device__ __forceinline__ Raw<T, N> load(u64 from) const {
        Raw<T, N> raw;
        raw.x.load(x + from);
        if (residual) raw.more.load(residual + from);
        return raw;
    }
    template <int N>
    __device__ __forceinline__ Packed<T, N> finish(const Raw<T, N>& raw, u64 from, u64) const {
        if (!residual) return raw.x;
        float out[N];
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = __fadd_rn(raw.x.at(j), raw.more.at(j));
        Packed<T, N> total;
        total.pack(out);
        total.save(sum + from);
        return total;
    }
};

template <class T>
struct Dropped {
    const T *x, *bias, *residual;
    T* sum;
    const Dropout& dropout;

    __device__ __forceinline__ bool is_sum() const { return true; }
    template <int N>
    __device__ __forceinline__ Raw<T, N> load(u64 from) const {
        Raw<T, N> raw;
        raw.x.load(x + from);
        raw.more.load(residual + from);
        return raw;
    }
    template <int N>
    __device__ __forceinline__ Packed<T, N> finish(const Raw<T, N>& raw, u64 from, u64 col) const {
        float out[N], b[N];
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = raw.x.at(j);
        if (bias) {
            load_floats<T, N>(bias + col, b);
#pragma unroll
            for (int j = 0; j < N; j++) out[j] = __fadd_rn(out[j], b[j]);
        }
        drop<N>(dropout, from, out);
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = __fadd_rn(raw.more.at(j), out[j]);
        Packed<T, N> total;
        total.pack(out);
        total.save(sum + from);
        return total;
    }
};

template <class T, int N>
__device__ __forceinline__ void store_normed(const Packed<T, N>& x, float mean, float rstd, const T* weight,
                                             const T* bias, u64 col, T* y) {
    float out[N], w[N], b[N];
#pragma unroll
    for (int j = 0; j < N; j++) out[j] = __fmul_rn(__fsub_rn(x.at(j), mean), rstd);
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
template <class T, bool kIsCentered, class Source>
__device__ __forceinline__ void norm_kept(T* y, float* means, float* rstds, const Source& source,
                                          const T* weight, const T* bias, const NormTerms& t) {
    constexpr int V = kWide<T>;
    __shared__ float shared[32];
    const u64 row = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= t.rows) return;  // whole warps, of blocks without barriers
    const u32 vectors = static_cast<u32>(t.cols / V);
    const u64 start = row * t.cols;
    Raw<T, V> raw[kVectors];
    Packed<T, V> kept[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
        const u32 at = threadIdx.x + k * blockDim.x;
        if (at < vectors) raw[k] = source.template load<V>(start + static_cast<u64>(at) * V);
    }
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
        const u32 at = threadIdx.x + k * blockDim.x;
        const u64 col = static_cast<u64>(at) * V;
        if (at < vectors) kept[k] = source.template finish<V>(raw[k], start + col, col);
    }
    float mean = 0, squares = 0;
    if (kIsCentered) {
#pragma unroll
        for (int k = 0; k < kVectors; k++)
            if (threadIdx.x + k * blockDim.x < vectors)
#pragma unroll
                for (int j = 0; j < V; j++) mean += kept[k].at(j);
        mean = row_sum(mean, shared) / t.cols;
    }
#pragma unroll
    for (int k = 0; k < kVectors; k++)
        if (threadIdx.x + k * blockDim.x < vectors)
#pragma unroll
            for (int j = 0; j < V; j++) {
                const float d = kept[k].at(j) - mean;
                squares += d * d;
            }
    const float rstd = rsqrtf(row_sum(squares, shared) / t.cols + t.eps);
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
        const u32 at = threadIdx.x + k * blockDim.x;
        if (at < vectors)
            store_normed<T, V>(kept[k], mean, rstd, weight, bias, static_cast<u64>(at) * V, y + start);
    }
    if (threadIdx.x == 0) {
        if (kIsCentered) means[row] = mean;
        rstds[row] = rstd;
    }
}

// A row per block; each thread comes back to what it has read, and to the sums that it has stored.
template <class T, bool kIsCentered, int V, class Source>
__device__ __forceinline__ void norm_any(T* y, float* means, float* rstds, const Source& source,
                                         const T* weight, const T* bias, const NormTerms& t) {
    __shared__ float shared[32];
    const u64 row = blockIdx.x, start = row * t.cols, step = static_cast<u64>(blockDim.x) * V;
    const u64 first = static_cast<u64>(threadIdx.x) * V;
    const T* from = (source.is_sum() ? source.sum : source.x) + start;
    float mean = 0, squares = 0;
    if (kIsCentered || source.is_sum()) {
        for (u64 col = first; col < t.cols; col += step) {
            const u64 at = start + col;
            const Packed<T, V> v = source.template finish<V>(source.template load<V>(at), at, col);
#pragma unroll
            for (int j = 0; j < V; j++) mean += v.at(j);
        }
        mean = kIsCentered ? row_sum(mean, shared) / t.cols : 0;
    }
    for (u64 col = first; col < t.cols; col += step) {
        Packed<T, V> v;
        v.load(from + col);
#pragma unroll
        for (int j = 0; j < V; j++) {
            const float d = v.at(j) - mean;
            squares += d * d;
        }
    }
    const float rstd = rsqrtf(row_sum(squares, shared) / t.cols + t.eps);
    for (u64 col = first; col < t.cols; col += step) {
        Packed<T, V> v;
        v.load(from + col);
        store_normed<T, V>(v, mean, rstd, weight, bias, col, y + start);
    }
    if (threadIdx.x == 0) {
        if (kIsCentered) means[row] = mean;
        rstds[row] = rstd;
    }
}

template <class T, bool kIsCentered, class Source>
__device__ __forceinline__ void norm_either(T* y, float* mean, float* rstd, const Source& source,
                                            const T* weight, const T* bias, const NormTerms& t) {
    if (t.is_wide)
        norm_any<T, kIsCentered, kWide<T>>(y, mean, rstd, source, weight, bias, t);
    else
        norm_any<T, kIsCentered, 1>(y, mean, rstd, source, weight, bias, t);
}

#define NORM_FORWARD(name, T, kIsCentered, way)                                                      \
    extern "C" __global__ void __launch_bounds__(1024)                                               \
        name(T* y, T* sum, float* mean, float* rstd, const T* x, const T* residual, const T* weight, \
             const T* bias, const NormTerms t) {                                                     \
        way<T, kIsCentered>(y, mean, rstd, Plain<T>{x, residual, sum}, weight, bias, t);             \
    }                                                                                                \
    MPISPEED_KERNEL_SYNC(name)

#define DROP_NORM_FORWARD(name, T, way)                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                               \
        name(T* y, T* sum, float* mean, float* rstd, const T* x, const T* x_bias, const T* residual, \
             const T* weight, const T* bias, const NormTerms t, const Dropout dropout) {             \
        way<T, true>(y, mean, rstd, Dropped<T>{x, x_bias, residual, sum, dropout}, weight, bias, t); \
    }                                                                                                \
    MPISPEED_KERNEL_SYNC(name)

#define NORMS(tag, T)                                           \
    NORM_FORWARD(layer_norm_kept_##tag, T, true, norm_kept)     \
    NORM_FORWARD(layer_norm_any_##tag, T, true, norm_either)    \
    NORM_FORWARD(rms_norm_kept_##tag, T, false, norm_kept)      \
    NORM_FORWARD(rms_norm_any_##tag, T, false, norm_either)     \
    DROP_NORM_FORWARD(drop_layer_norm_kept_##tag, T, norm_kept) \
    DROP_NORM_FORWARD(drop_layer_norm_any_##tag, T, norm_either)

NORMS(f32, float)
NORMS(bf16, bf16)
NORMS(fp16, fp16)
