// Adam and AdamW over many flat spans in one launch: masters and moments in fp32, gradients in fp32, bf16 or
// fp16, and, if wanted, the rounded masters into a 16-bit copy. One read and one write of each element.
//
// Grid: x blocks share a span, y counts spans. The arithmetic and its order are those of the host loop, so
// moving a range between host and device changes no bits (other than the payload of a NaN).
#include "mpispeed_cuda.cuh"

using namespace mpispeed;

// Rows of the table a launch gets; 48 bytes, pointers first.
struct AdamSpan {
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    const void* grad;
    void* out;  // null in the kernels without a copy
    unsigned long long count;
};

enum AdamDecay { kDecayNone = 0, kDecayDecoupled = 1, kDecayL2 = 2 };

struct AdamTerms {
    float beta1, rest1;  // rest = 1 - beta
    float beta2, rest2;
    float step_size;     // lr / (1 - beta1^t)
    float root_scale;    // 1 / sqrt(1 - beta2^t)
    float eps;
    float decay;         // decoupled: lr * weight_decay; L2: weight_decay
    float grad_scale;
    int decay_mode;
};

// Stands for "no copy".
struct Nothing {};
__device__ __forceinline__ void store(float, Nothing*) {}
__device__ __forceinline__ bool is_aligned(const Nothing*) { return true; }

__device__ __forceinline__ float adam_one(float p, float g, float* m, float* v, const AdamTerms& t) {
    g = __fmul_rn(g, t.grad_scale);
    if (t.decay_mode == kDecayL2) g = __fadd_rn(g, __fmul_rn(t.decay, p));
    const float m1 = __fadd_rn(__fmul_rn(t.beta1, *m), __fmul_rn(t.rest1, g));
    const float v1 = __fadd_rn(__fmul_rn(t.beta2, *v), __fmul_rn(__fmul_rn(t.rest2, g), g));
    const float d = __fadd_rn(__fmul_rn(__fsqrt_rn(v1), t.root_scale), t.eps);
    *m = m1;
    *v = v1;
    if (t.decay_mode == kDecayDecoupled) p = __fsub_rn(p, __fmul_rn(t.decay, p));
    return __fsub_rn(p, __fmul_rn(t.step_size, __fdiv_rn(m1, d)));
}

template <class Out>
__device__ __forceinline__ void store_four(const float* p, Out* out, size_t quad) {
    Four<Out> low;
#pragma unroll
    for (int k = 0; k < 4; k++) store(p[k], &low.item[k]);
    reinterpret_cast<Four<Out>*>(out)[quad] = low;
}
__device__ __forceinline__ void store_four(const float*, Nothing*, size_t) {}

template <class Grad, class Out>
__device__ __forceinline__ void adam_quad(const AdamSpan& span, const Grad* grad, Out* out, size_t quad,
                                          const AdamTerms& t) {
    Four<float> p = reinterpret_cast<const Four<float>*>(span.master)[quad];
    Four<float> m = reinterpret_cast<const Four<float>*>(span.exp_avg)[quad];
    Four<float> v = reinterpret_cast<const Four<float>*>(span.exp_avg_sq)[quad];
    const Four<Grad> g = reinterpret_cast<const Four<Grad>*>(grad)[quad];
#pragma unroll
    for (int k = 0; k < 4; k++) p.item[k] = adam_one(p.item[k], to_float(g.item[k]), &m.item[k], &v.item[k], t);
    reinterpret_cast<Four<float>*>(span.master)[quad] = p;
    reinterpret_cast<Four<float>*>(span.exp_avg)[quad] = m;
    reinterpret_cast<Four<float>*>(span.exp_avg_sq)[quad] = v;
    store_four(p.item, out, quad);
}

template <class Grad, class Out>
__device__ __forceinline__ void adam_span(const AdamSpan* spans, const AdamTerms& t) {
    const AdamSpan span = spans[blockIdx.y];
    const Grad* grad = static_cast<const Grad*>(span.grad);
    Out* out = static_cast<Out*>(span.out);
    const size_t first = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    // A cut of a flat buffer may begin anywhere; then all elements go the single way.
    const bool in_fours = is_aligned(span.master) && is_aligned(span.exp_avg) && is_aligned(span.exp_avg_sq) &&
                          is_aligned(grad) && is_aligned(out);
    const size_t quads = in_fours ? span.count / 4 : 0;
    for (size_t quad = first; quad < quads; quad += stride) adam_quad(span, grad, out, quad, t);
    for (size_t i = 4 * quads + first; i < span.count; i += stride) {
        const float p = adam_one(span.master[i], to_float(grad[i]), span.exp_avg + i, span.exp_avg_sq + i, t);
        span.master[i] = p;
        store(p, out + i);
    }
}

#define ADAM_KERNEL(name, Grad, Out)                                                                      \
    extern "C" __global__ void __launch_bounds__(256) name(const AdamSpan* spans, const AdamTerms terms) { \
        adam_span<Grad, Out>(spans, terms);                                                               \
    }                                                                                                     \
    MPISPEED_KERNEL(name)

ADAM_KERNEL(adam_f32, float, Nothing)
ADAM_KERNEL(adam_f32_bf16, float, bf16)
ADAM_KERNEL(adam_f32_fp16, float, fp16)
ADAM_KERNEL(adam_bf16, bf16, Nothing)
ADAM_KERNEL(adam_bf16_bf16, bf16, bf16)
ADAM_KERNEL(adam_bf16_fp16, bf16, fp16)
ADAM_KERNEL(adam_fp16, fp16, Nothing)
ADAM_KERNEL(adam_fp16_bf16, fp16, bf16)
ADAM_KERNEL(adam_fp16_fp16, fp16, fp16)
