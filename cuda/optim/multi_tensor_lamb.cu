// LAMB over many flat tensors. A step is three launches: the moments with, of each chunk, the sums of squares of the
// parameter and of the direction; the trust ratio of each tensor; the update with a 16-bit copy if wanted.
//
// Elements are computed as by the host loop. Sums are fp64 in an order that the shapes alone decide; it is not that of
// the host, so a ratio may differ from the host's in its last bits.
#include "multi_tensor.cuh"

using namespace mpispeed;

// Decoupled decay is part of the direction, so that the trust ratio sees it.
__device__ __forceinline__ float lamb_direction(float p, float m, float v, const RuleTerms& t) {
    const float d = t.is_eps_inside ? __fsqrt_rn(__fadd_rn(v, t.eps)) : __fadd_rn(__fsqrt_rn(v), t.eps);
    const float q = __fdiv_rn(m, d);
    return t.decay_mode == kDecayDecoupled ? __fadd_rn(q, __fmul_rn(t.decay, p)) : q;
}

template <class P, class S, class G>
struct LambMoments {
    struct Piece {
        Four<P> p;
        Four<S> m, v;
        Four<G> g;
    };
    const P* param;
    S *exp_avg, *exp_avg_sq;
    const G* grad;
    u32 count;
    float scale;
    const RuleTerms& terms;
    double weights, directions;

    template <bool kIsWhole>
    __device__ __forceinline__ void take(Piece& x, u32 quad) const {
        x.p = load<kIsWhole>(param, quad, count);
        x.m = load<kIsWhole>(exp_avg, quad, count);
        x.v = load<kIsWhole>(exp_avg_sq, quad, count);
        x.g = load<kIsWhole>(grad, quad, count);
    }

    template <bool kIsWhole>
    __device__ __forceinline__ void finish(Piece& x, u32 quad) {
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const float p = to_float(x.p.item[k]);
            const float g = used_gradient(p, to_float(x.g.item[k]), scale, terms);
            const float m = moment(terms.beta1, to_float(x.m.item[k]), __fmul_rn(terms.rest1, g));
            const float v = moment(terms.beta2, to_float(x.v.item[k]), __fmul_rn(__fmul_rn(terms.rest2, g), g));
            store(m, &x.m.item[k]);
            store(v, &x.v.item[k]);
            // The direction is that of the moments as stored, which the last launch finds.
            const double q = lamb_direction(p, to_float(x.m.item[k]), to_float(x.v.item[k]), terms), wide = p;
            if (kIsWhole || 4 * quad + k < count) {
                weights += wide * wide;
                directions += q * q;
            }
        }
        put<kIsWhole>(x.m, exp_avg, quad, count);
        put<kIsWhole>(x.v, exp_avg_sq, quad, count);
    }
};

template <class P, class S, class G>
__device__ __forceinline__ void lamb_moments_chunk(const TensorRow* rows, const Chunk* chunks, const float* scale,
                                             double* partials, const RuleTerms& terms) {
    __shared__ double shared[32];
    const Chunk chunk = chunks[blockIdx.x];
    const TensorRow row = rows[chunk.row];
    const u64 begin = static_cast<u64>(chunk.index) * kChunk;
    LambMoments<P, S, G> pass{offset_by<P>(static_cast<const void*>(row.param), begin),
                              offset_by<S>(row.state_a, begin),
                              offset_by<S>(row.state_b, begin),
                              offset_by<G>(row.grad, begin),
                              chunk_length(row.count, begin),
                              combined_scale(terms, scale),
                              terms,
                              0.0,
                              0.0};
    const bool is_wide = is_aligned(pass.param) && is_aligned(pass.exp_avg) && is_aligned(pass.exp_avg_sq) &&
                         is_aligned(pass.grad);
    walk<2>(pass, pass.count, is_wide);
    const double weights = block_sum(pass.weights, shared), directions = block_sum(pass.directions, shared);
    if (threadIdx.x == 0) {
        partials[2 * static_cast<u64>(blockIdx.x)] = weights;
        partials[2 * static_cast<u64>(blockIdx.x) + 1] = directions;
    }
}

// Block b has row b: its |p| / |q| within the limits, 1 where one of them is 0; a NaN stays.
extern "C" __global__ void __launch_bounds__(kBlock) lamb_ratios(const TensorRow* rows, const double* partials,
                                                                 double* ratios, const RuleTerms terms) {
    __shared__ double shared[32];
    const TensorRow row = rows[blockIdx.x];
    const u64 chunks = (row.count + kChunk - 1) / kChunk;
    double weights = 0.0, directions = 0.0;
    for (u64 at = threadIdx.x; at < chunks; at += kBlock) {
        weights += partials[2 * (row.first_chunk + at)];
        directions += partials[2 * (row.first_chunk + at) + 1];
    }
    weights = block_sum(weights, shared);
    directions = block_sum(directions, shared);
    if (threadIdx.x != 0) return;
    double ratio = 1.0;
    if (weights != 0.0 && directions != 0.0) {
        ratio = __ddiv_rn(__dsqrt_rn(weights), __dsqrt_rn(directions));
        ratio = ratio > terms.most ? terms.most : ratio;
        ratio = ratio < terms.least ? terms.least : ratio;
    }
    ratios[row.place] = ratio;
}
MPISPEED_KERNEL_SYNC(lamb_ratios)

template <class P, class S, class Out>
struct LambApply {
    struct Piece {
        Four<P> p;
        Four<S> m, v;
    };
    P* param;
    const S *exp_avg, *exp_avg_sq;
    Out* out;
    u32 count;
    float step;
    const RuleTerms& terms;

    template <bool kIsWhole>
    __device__ __forceinline__ void take(Piece& x, u32 quad) const {
        x.p = load<kIsWhole>(param, quad, count);
        x.m = load<kIsWhole>(exp_avg, quad, count);
        x.v = load<kIsWhole>(exp_avg_sq, quad, count);
    }

    template <bool kIsWhole>
    __device__ __forceinline__ void finish(Piece& x, u32 quad) const {
        Four<Out> low;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float p = to_float(x.p.item[k]);
            const float q = lamb_direction(p, to_float(x.m.item[k]), to_float(x.v.item[k]), terms);
            const float updated = __fsub_rn(p, __fmul_rn(step, q));
            store(updated, &x.p.item[k]);
            store(updated, &low.item[k]);
        }
        put<kIsWhole>(x.p, param, quad, count);
        put<kIsWhole>(low, out, quad, count);
    }
};

template <class P, class S, class Out>
__device__ __forceinline__ void lamb_apply_chunk(const TensorRow* rows, const Chunk* chunks, const double* ratios,
                                           const RuleTerms& terms) {
    const Chunk chunk = chunks[blockIdx.x];
    const TensorRow row = rows[chunk.row];
    const u64 begin = static_cast<u64>(chunk.index) * kChunk;
    LambApply<P, S, Out> pass{offset_by<P>(row.param, begin),
                              offset_by<S>(static_cast<const void*>(row.state_a), begin),
                              offset_by<S>(static_cast<const void*>(row.state_b), begin),
                              offset_by<Out>(row.out, begin),
                              chunk_length(row.count, begin),
                              static_cast<float>(__dmul_rn(terms.full_step, ratios[row.place])),
                              terms};
    const bool is_wide = is_aligned(pass.param) && is_aligned(pass.exp_avg) && is_aligned(pass.exp_avg_sq) &&
                         is_aligned(pass.out);
    walk<2>(pass, pass.count, is_wide);
}

#define LAMB_MOMENTS(name, P, S, G)                                                                             \
    extern "C" __global__ void __launch_bounds__(kBlock)                                                        \
        name(const TensorRow* rows, const Chunk* chunks, const float* scale, double* partials,                  \
             const RuleTerms terms) {                                                                           \
        lamb_moments_chunk<P, S, G>(rows, chunks, scale, partials, terms);                                            \
    }                                                                                                           \
    MPISPEED_KERNEL_SYNC(name)

#define LAMB_APPLY(name, P, S, Out)                                                                             \
    extern "C" __global__ void __launch_bounds__(kBlock)                                                        \
        name(const TensorRow* rows, const Chunk* chunks, const double* ratios, const RuleTerms terms) {         \
        lamb_apply_chunk<P, S, Out>(rows, chunks, ratios, terms);                                                     \
    }                                                                                                           \
    MPISPEED_KERNEL(name)

LAMB_MOMENTS(lamb_moments_f32, float, float, float)
LAMB_MOMENTS(lamb_moments_bf16, float, float, bf16)
LAMB_MOMENTS(lamb_moments_fp16, float, float, fp16)
LAMB_MOMENTS(lamb_moments_bf16w_f32s_f32, bf16, float, float)
LAMB_MOMENTS(lamb_moments_bf16w_f32s_bf16, bf16, float, bf16)
LAMB_MOMENTS(lamb_moments_bf16w_bf16s_f32, bf16, bf16, float)
LAMB_MOMENTS(lamb_moments_bf16w_bf16s_bf16, bf16, bf16, bf16)
LAMB_MOMENTS(lamb_moments_fp16w_f32s_f32, fp16, float, float)
LAMB_MOMENTS(lamb_moments_fp16w_f32s_fp16, fp16, float, fp16)
LAMB_MOMENTS(lamb_moments_fp16w_fp16s_f32, fp16, fp16, float)
LAMB_MOMENTS(lamb_moments_fp16w_fp16s_fp16, fp16, fp16, fp16)

LAMB_APPLY(lamb_apply, float, float, Nothing)
LAMB_APPLY(lamb_apply_bf16, float, float, bf16)
LAMB_APPLY(lamb_apply_fp16, float, float, fp16)
LAMB_APPLY(lamb_apply_bf16w_f32s, bf16, float, Nothing)
LAMB_APPLY(lamb_apply_bf16w_bf16s, bf16, bf16, Nothing)
LAMB_APPLY(lamb_apply_fp16w_f32s, fp16, float, Nothing)
LAMB_APPLY(lamb_apply_fp16w_fp16s, fp16, fp16, Nothing)
