// residual + dropout(x + bias), and its gradient with the sum over rows that the bias gets. The mask is
// repeated from the seed, never stored; element i of the matrix has random word i, however it is cut into
// rows.
#include "mpispeed_columns.cuh"
#include "mpispeed_dropout.cuh"

using namespace mpispeed;

struct DropTerms {
    unsigned long long rows, cols;
    unsigned long long first;  // element that the pointers stand on
    Dropout dropout;
    int is_wide;
    int unused;
};

template <class T, int V>
struct DropForward {
    struct Loaded {
        Packed<T, V> x, residual;
    };
    T* y;
    const T *x, *residual;
    const DropTerms& t;
    u64 col;
    float bias[V];

    __device__ __forceinline__ Loaded load(u64 row) const {
        const u64 from = row * t.cols + col;
        Loaded out;
        out.x.load(x + from);
        out.residual.load(residual + from);
        return out;
    }
    __device__ __forceinline__ void finish(const Loaded& got, u64 row) const {
        const u64 element = row * t.cols + col;
        float out[V];
#pragma unroll
        for (int j = 0; j < V; j++) out[j] = __fadd_rn(got.x.at(j), bias[j]);
        drop<V>(t.dropout, t.first + element, out);
#pragma unroll
        for (int j = 0; j < V; j++) out[j] = __fadd_rn(got.residual.at(j), out[j]);
        store_floats<T, V>(out, y + element);
    }
};

template <class T, int V>
struct DropBackward {
    using Loaded = Packed<T, V>;
    T* dx;
    const T* dy;
    const DropTerms& t;
    u64 col;
    float sums[V];

    __device__ __forceinline__ Loaded load(u64 row) const {
        Loaded out;
        out.load(dy + row * t.cols + col);
        return out;
    }
    __device__ __forceinline__ void finish(const Loaded& got, u64 row) {
        const u64 element = row * t.cols + col;
        float out[V];
#pragma unroll
        for (int j = 0; j < V; j++) out[j] = got.at(j);
        drop<V>(t.dropout, t.first + element, out);
#pragma unroll
        for (int j = 0; j < V; j++) sums[j] += out[j];
        if (dx) store_floats<T, V>(out, dx + element);
    }
};

template <class T, int V>
__device__ __forceinline__ void drop_forward(T* y, const T* x, const T* bias, const T* residual,
                                             const DropTerms& t) {
    const u64 col = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * V;
    if (col >= t.cols) return;
    DropForward<T, V> body = {y, x, residual, t, col, {}};
#pragma unroll
    for (int j = 0; j < V; j++) body.bias[j] = 0;
    if (bias) load_floats<T, V>(bias + col, body.bias);
    walk_rows<2>(t.rows, body);
}

template <class T, int V>
__device__ __forceinline__ void drop_backward(T* dx, float* dbias, const T* dy, const DropTerms& t) {
    MPISPEED_DYNAMIC_SHARED(float, room);
    const u64 col = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * V;
    DropBackward<T, V> body = {dx, dy, t, col, {}};
    if (col < t.cols) walk_rows<2>(t.rows, body);
    if (dbias) store_partial<V>(body.sums, dbias, t.cols, room);
}

#define DROP(tag, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                     \
        bias_dropout_residual_##tag(T* y, const T* x, const T* bias, const T* residual, const DropTerms t) { \
        if (t.is_wide)                                                                                       \
            drop_forward<T, kWide<T>>(y, x, bias, residual, t);                                              \
        else                                                                                                 \
            drop_forward<T, 1>(y, x, bias, residual, t);                                                     \
    }                                                                                                        \
    MPISPEED_KERNEL(bias_dropout_residual_##tag)                                                             \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                     \
        bias_dropout_residual_grad_##tag(T* dx, float* dbias, const T* dy, const DropTerms t) {              \
        if (t.is_wide)                                                                                       \
            drop_backward<T, kWide<T>>(dx, dbias, dy, t);                                                    \
        else                                                                                                 \
            drop_backward<T, 1>(dx, dbias, dy, t);                                                           \
    }                                                                                                        \
    MPISPEED_KERNEL_SYNC(bias_dropout_residual_grad_##tag)

DROP(f32, float)
DROP(bf16, bf16)
DROP(fp16, fp16)
