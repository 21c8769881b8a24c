// GELU of x + bias and its gradient, with the sum over rows that the bias gets. Without a bias a matrix is
// any cut of the elements into rows.
//
// Tanh form: 0.5 z (1 + tanh u) is z / (1 + exp(-2 u)), u = sqrt(2 / pi) (z + 0.044715 z^3); nothing cancels
// in it.
#include "mpispeed_columns.cuh"

using namespace mpispeed;

struct GeluTerms {
    unsigned long long rows, cols;
    int is_wide;
    int unused;
};

constexpr float kTwoU = 1.5957691216057308f;     // 2 sqrt(2 / pi)
constexpr float kTwoU3 = 0.07135481627159628f;   // times 0.044715
constexpr float kSlope3 = 0.21406444881478885f;  // times 3
constexpr float kMinusLog2E = -1.4426950408889634f;
constexpr float kHalfRoot = 0.7071067811865476f;  // sqrt(1 / 2)
constexpr float kNormal = 0.3989422804014327f;    // sqrt(1 / (2 pi))

struct Tanh {
    static __device__ __forceinline__ float share(float z) {
        const float u = z * (kTwoU + kTwoU3 * (z * z));
        return __fdividef(1.0f, 1.0f + exp2f(kMinusLog2E * u));
    }
    static __device__ __forceinline__ float value(float z) { return z * share(z); }
    static __device__ __forceinline__ float slope(float z) {
        const float s = share(z), du = z * (kTwoU + kSlope3 * (z * z));
        // Where s is 0 or 1 nothing is left; du may be infinite there.
        const float rest = s * (1.0f - s);
        return rest == 0 ? s : s + du * rest;
    }
};

struct Exact {
    static __device__ __forceinline__ float value(float z) { return 0.5f * z * (1.0f + erff(z * kHalfRoot)); }
    static __device__ __forceinline__ float slope(float z) {
        return 0.5f * (1.0f + erff(z * kHalfRoot)) + z * kNormal * exp2f(0.5f * kMinusLog2E * z * z);
    }
};

template <class T, int V, class Form>
struct GeluForward {
    using Loaded = Packed<T, V>;
    T* y;
    const T* x;
    u64 cols, col;
    float bias[V];

    __device__ __forceinline__ Loaded load(u64 row) const {
        Loaded out;
        out.load(x + row * cols + col);
        return out;
    }
    __device__ __forceinline__ void finish(const Loaded& got, u64 row) const {
        float out[V];
#pragma unroll
        for (int j = 0; j < V; j++) out[j] = Form::value(__fadd_rn(got.at(j), bias[j]));
        store_floats<T, V>(out, y + row * cols + col);
    }
};

template <class T, int V, class Form>
struct GeluBackward {
    struct Loaded {
        Packed<T, V> x, dy;
    };
    T* dx;
    const T *dy, *x;
    u64 cols, col;
    float bias[V], sums[V];

    __device__ __forceinline__ Loaded load(u64 row) const {
        const u64 from = row * cols + col;
        Loaded out;
        out.x.load(x + from);
        out.dy.load(dy + from);
        return out;
    }
    __device__ __forceinline__ void finish(const Loaded& got, u64 row) {
        float out[V];
#pragma unroll
        for (int j = 0; j < V; j++) {
            out[j] = got.dy.at(j) * Form::slope(__fadd_rn(got.x.at(j), bias[j]));
            sums[j] += out[j];
        }
        store_floats<T, V>(out, dx + row * cols + col);
    }
};

template <class T, int V>
__device__ __forceinline__ void load_bias(const T* bias, u64 col, u64 cols, float* out) {
#pragma unroll
    for (int j = 0; j < V; j++) out[j] = 0;
    if (bias && col < cols) load_floats<T, V>(bias + col, out);
}

template <class T, int V, class Form>
__device__ __forceinline__ void gelu(T* y, const T* x, const T* bias, const GeluTerms& t) {
    GeluForward<T, V, Form> body = {
        y, x, t.cols, (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * V, {}};
    load_bias<T, V>(bias, body.col, t.cols, body.bias);
    if (body.col < t.cols) walk_rows<4>(t.rows, body);
}

template <class T, int V, class Form>
__device__ __forceinline__ void gelu_grad(T* dx, float* dbias, const T* dy, const T* x, const T* bias,
                                          const GeluTerms& t) {
    MPISPEED_DYNAMIC_SHARED(float, room);
    const u64 col = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * V;
    GeluBackward<T, V, Form> body = {dx, dy, x, t.cols, col, {}, {}};
    load_bias<T, V>(bias, col, t.cols, body.bias);
    if (col < t.cols) walk_rows<2>(t.rows, body);
    if (dbias) store_partial<V>(body.sums, dbias, t.cols, room);
}

#define GELU(name, tag, T, Form)                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                    \
        name##_##tag(T* y, const T* x, const T* bias, const GeluTerms t) {                                  \
        if (t.is_wide)                                                                                      \
            gelu<T, kWide<T>, Form>(y, x, bias, t);                                                         \
        else                                                                                                \
            gelu<T, 1, Form>(y, x, bias, t);                                                                \
    }                                                                                                       \
    MPISPEED_KERNEL(name##_##tag)                                                                           \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                    \
        name##_grad_##tag(T* dx, float* dbias, const T* dy, const T* x, const T* bias, const GeluTerms t) { \
        if (t.is_wide)                                                                                      \
            gelu_grad<T, kWide<T>, Form>(dx, dbias, dy, x, bias, t);                                        \
        else                                                                                                \
            gelu_grad<T, 1, Form>(dx, dbias, dy, x, bias, t);                                               \
    }                                                                                                       \
    MPISPEED_KERNEL_SYNC(name##_grad_##tag)

GELU(gelu_tanh, f32, float, Tanh)
GELU(gelu_tanh, bf16, bf16, Tanh)
GELU(gelu_tanh, fp16, fp16, Tanh)
GELU(gelu_exact, f32, float, Exact)
GELU(gelu_exact, bf16, bf16, Exact)
GELU(gelu_exact, fp16, fp16, Exact)
