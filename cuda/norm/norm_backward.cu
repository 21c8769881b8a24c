// Gradients of layer norm and RMS norm. With g = weight * dy and n = (x - mean) * rstd:
//   dx = rstd * (g - mean(g) - n * mean(g * n)) + add,   dweight = sum over rows of dy * n,   dbias = of dy
// RMS norm has no mean(g). `add` is the gradient that goes around the norm, if there is one.
//
// The `kept` kernel walks over rows, holds each in registers, reads the next one ahead, and sums up the
// columns on the way; columns 8 or 16 of a thread. The `any` kernel gives dx for every row, `columns` the
// sums.
#include "mpispeed_columns.cuh"

using namespace mpispeed;

struct GradTerms {
    unsigned long long rows, cols;
    int is_wide;  // the `any` kernels may go by 16 bytes
    int unused;
};

__device__ __forceinline__ float normed(float x, float mean, float rstd) {
    return __fmul_rn(__fsub_rn(x, mean), rstd);
}

template <class T, int N>
struct GradRow {
    Packed<T, N> x, dy;
    float mean, rstd;
};

template <class T>
struct NormInputs {
    const T *dy, *add, *x, *weight;
    const float *mean, *rstd;
};

template <class T, bool kIsCentered, int N>
__device__ __forceinline__ void load_row(GradRow<T, N>& out, const NormInputs<T>& in, u64 row, u64 cols,
                                         u64 col) {
    const u64 from = row * cols + col;
    out.x.load(in.x + from);
    out.dy.load(in.dy + from);
    out.mean = kIsCentered ? in.mean[row] : 0;
    out.rstd = in.rstd[row];
}

// Sums of the columns of a block that owns whole rows, added over y, into its row of `partial`.
template <int N>
__device__ __forceinline__ void store_partial_rows(const float* sums, float* partial, u64 cols,
                                                   float* shared) {
    float* to = partial + blockIdx.x * cols;
    if (blockDim.y == 1) {
        const u64 col = static_cast<u64>(threadIdx.x) * N;
        if (col < cols) store_floats<float, N>(sums, to + col);
        return;
    }
    const u32 width = blockDim.x * N;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) shared[threadIdx.y * width + threadIdx.x * N + j] = sums[j];
    __syncthreads();
    for (u32 col = threadIdx.y * blockDim.x + threadIdx.x; col < cols; col += blockDim.x * blockDim.y) {
        float sum = 0;
        for (u32 y = 0; y < blockDim.y; y++) sum += shared[y * width + col];
        to[col] = sum;
    }
}

struct Pair {
    float first, second;
};

// The sums over the threads of x, for each y by itself. One barrier: `shared` is another one in the next
// call.
__device__ __forceinline__ Pair pair_sum(Pair p, Pair* shared) {
    p.first = warp_reduce(p.first, Sum());
    p.second = warp_reduce(p.second, Sum());
    const u32 warps = blockDim.x / 32;
    if (warps == 1) return p;
    if ((threadIdx.x & 31) == 0) shared[threadIdx.y * warps + threadIdx.x / 32] = p;
    __syncthreads();
    Pair sum = {0, 0};
    for (u32 k = 0; k < warps; k++) {
        sum.first += shared[threadIdx.y * warps + k].first;
        sum.second += shared[threadIdx.y * warps + k].second;
    }
    return sum;
}

// Blocks of (x, y) threads: x is a row, y counts rows at a time. All threads take the same number of steps.
template <class T, bool kIsCentered, int N>
__device__ __forceinline__ void norm_grad_kept(T* dx, float* dweight, float* dbias, const NormInputs<T>& in,
                                               const GradTerms& t) {
    // What would not fit into registers: the next row, or the weight while sums are made.
    constexpr bool kIsAhead = N * sizeof(T) <= 32, kIsTight = N == 16;
    __shared__ Pair shared[2][16];  // 512 threads have 16 warps
    MPISPEED_DYNAMIC_SHARED(float, room);
    const u64 col = static_cast<u64>(threadIdx.x) * N, stride = static_cast<u64>(gridDim.x) * blockDim.y;
    const bool has_columns = col < t.cols;
    const float scale = 1.0f / t.cols;
    float sums_w[N], sums_b[N];
#pragma unroll
    for (int j = 0; j < N; j++) sums_w[j] = sums_b[j] = 0;
    Packed<T, N> weight;
    if (!kIsTight && has_columns && in.weight) weight.load(in.weight + col);
    GradRow<T, N> now, next;
    Packed<T, N> add;
    u64 row = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (kIsAhead && has_columns && row < t.rows) load_row<T, kIsCentered, N>(now, in, row, t.cols, col);
    u32 turn = 0;
    for (u64 first = static_cast<u64>(blockIdx.x) * blockDim.y; first < t.rows;
         first += stride, row += stride) {
        const bool is_mine = has_columns && row < t.rows;
        if (!kIsAhead && is_mine) load_row<T, kIsCentered, N>(now, in, row, t.cols, col);
        if (kIsAhead && has_columns && row + stride < t.rows)
            load_row<T, kIsCentered, N>(next, in, row + stride, t.cols, col);
        if (in.add && is_mine) add.load(in.add + row * t.cols + col);
        Pair means = {0, 0};
        if (kIsTight && is_mine && in.weight) weight.load(in.weight + col);
        if (is_mine) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float dy = now.dy.at(j), n = normed(now.x.at(j), now.mean, now.rstd);
                const float g = in.weight ? __fmul_rn(dy, weight.at(j)) : dy;
                sums_w[j] += dy * n;
                sums_b[j] += dy;
                means.first += g;
                means.second += g * n;
            }
        }
        means = pair_sum(means, shared[turn]);
        turn ^= 1;
        if (kIsTight && is_mine && in.weight) weight.load(in.weight + col);
        if (is_mine) {
            const float first_mean = kIsCentered ? means.first * scale : 0,
                        second_mean = means.second * scale;
            float out[N];
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float n = normed(now.x.at(j), now.mean, now.rstd);
                const float g = in.weight ? __fmul_rn(now.dy.at(j), weight.at(j)) : now.dy.at(j);
                out[j] = now.rstd * (g - first_mean - n * second_mean);
                if (in.add) out[j] += add.at(j);
            }
            store_floats<T, N>(out, dx + row * t.cols + col);
        }
        if (kIsAhead) now = next;
    }
    if (dweight) store_partial_rows<N>(sums_w, dweight, t.cols, room);
    if (dbias) store_partial_rows<N>(sums_b, dbias, t.cols, room);
}

// ---- rows of any length -----------------------------------------------------------------------------------
template <class T, bool kIsCentered, int V>
__device__ __forceinline__ void norm_grad_any(T* dx, const NormInputs<T>& in, const GradTerms& t) {
    __shared__ float shared[32];
    const u64 row = blockIdx.x, start = row * t.cols, step = static_cast<u64>(blockDim.x) * V;
    const u64 begin = static_cast<u64>(threadIdx.x) * V;
    const float mean = kIsCentered ? in.mean[row] : 0, rstd = in.rstd[row], scale = 1.0f / t.cols;
    float first = 0, second = 0;
    for (u64 col = begin; col < t.cols; col += step) {
        float x[V], g[V], w[V];
        load_floats<T, V>(in.x + start + col, x);
        load_floats<T, V>(in.dy + start + col, g);
        if (in.weight) load_floats<T, V>(in.weight + col, w);
#pragma unroll
        for (int j = 0; j < V; j++) {
            if (in.weight) g[j] = __fmul_rn(g[j], w[j]);
            first += g[j];
            second += g[j] * normed(x[j], mean, rstd);
        }
    }
    first = kIsCentered ? block_sum(first, shared) * scale : 0;
    second = block_sum(second, shared) * scale;
    for (u64 col = begin; col < t.cols; col += step) {
        float x[V], g[V], w[V], add[V];
        load_floats<T, V>(in.x + start + col, x);
        load_floats<T, V>(in.dy + start + col, g);
        if (in.weight) load_floats<T, V>(in.weight + col, w);
        if (in.add) load_floats<T, V>(in.add + start + col, add);
#pragma unroll
        for (int j = 0; j < V; j++) {
            if (in.weight) g[j] = __fmul_rn(g[j], w[j]);
            g[j] = rstd * (g[j] - first - normed(x[j], mean, rstd) * second);
            if (in.add) g[j] += add[j];
        }
        store_floats<T, V>(g, dx + start + col);
    }
}

// The sums over rows alone: of dy * n and of dy.
template <class T, bool kIsCentered, int V>
struct NormSums {
    struct Loaded {
        Packed<T, V> x, dy;
        float mean, rstd;
    };
    const NormInputs<T>& in;
    u64 cols, col;
    float weight[V], bias[V];

    __device__ __forceinline__ Loaded load(u64 row) const {
        const u64 from = row * cols + col;
        Loaded out;
        out.x.load(in.x + from);
        out.dy.load(in.dy + from);
        out.mean = kIsCentered ? in.mean[row] : 0;
        out.rstd = in.rstd[row];
        return out;
    }
    __device__ __forceinline__ void finish(const Loaded& got, u64) {
#pragma unroll
        for (int j = 0; j < V; j++) {
            const float dy = got.dy.at(j);
            weight[j] += dy * normed(got.x.at(j), got.mean, got.rstd);
            bias[j] += dy;
        }
    }
};

template <class T, bool kIsCentered, int V>
__device__ __forceinline__ void norm_sums(float* dweight, float* dbias, const NormInputs<T>& in,
                                          const GradTerms& t) {
    MPISPEED_DYNAMIC_SHARED(float, room);
    NormSums<T, kIsCentered, V> body = {
        in, t.cols, (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * V, {}, {}};
    if (body.col < t.cols) walk_rows<2>(t.rows, body);
    if (dweight) store_partial<V>(body.weight, dweight, t.cols, room);
    if (dbias) store_partial<V>(body.bias, dbias, t.cols, room);
}

#define NORM_KEPT(name, T, kIsCentered, N, threads, blocks)                                               \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                         \
        name(T* dx, float* dweight, float* dbias, const T* dy, const T* add, const T* x, const T* weight, \
             const float* mean, const float* rstd, const GradTerms t) {                                   \
        norm_grad_kept<T, kIsCentered, N>(dx, dweight, dbias, {dy, add, x, weight, mean, rstd}, t);       \
    }                                                                                                     \
    MPISPEED_KERNEL_SYNC(name)

#define NORM_BACKWARD(name, T, tag, kIsCentered)                                                           \
    NORM_KEPT(name##_backward_8_##tag, T, kIsCentered, 8, 256, sizeof(T) == 2 ? 3 : 2)                     \
    NORM_KEPT(name##_backward_16_##tag, T, kIsCentered, 16, 512, 1)                                        \
    extern "C" __global__ void __launch_bounds__(1024)                                                     \
        name##_backward_any_##tag(T* dx, const T* dy, const T* add, const T* x, const T* weight,           \
                                  const float* mean, const float* rstd, const GradTerms t) {               \
        if (t.is_wide)                                                                                     \
            norm_grad_any<T, kIsCentered, kWide<T>>(dx, {dy, add, x, weight, mean, rstd}, t);              \
        else                                                                                               \
            norm_grad_any<T, kIsCentered, 1>(dx, {dy, add, x, weight, mean, rstd}, t);                     \
    }                                                                                                      \
    MPISPEED_KERNEL_SYNC(name##_backward_any_##tag)                                                        \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                   \
        name##_columns_##tag(float* dweight, float* dbias, const T* dy, const T* x, const float* mean,     \
                             const float* rstd, const GradTerms t) {                                       \
        if (t.is_wide)                                                                                     \
            norm_sums<T, kIsCentered, kWide<T>>(dweight, dbias, {dy, nullptr, x, nullptr, mean, rstd}, t); \
        else                                                                                               \
            norm_sums<T, kIsCentered, 1>(dweight, dbias, {dy, nullptr, x, nullptr, mean, rstd}, t);        \
    }                                                                                                      \
    MPISPEED_KERNEL_SYNC(name##_columns_##tag)

NORM_BACKWARD(layer_norm, float, f32, true)
NORM_BACKWARD(layer_norm, bf16, bf16, true)
NORM_BACKWARD(layer_norm, fp16, fp16, true)
NORM_BACKWARD(rms_norm, float, f32, false)
NORM_BACKWARD(rms_norm, bf16, bf16, false)
NORM_BACKWARD(rms_norm, fp16, fp16, false)
