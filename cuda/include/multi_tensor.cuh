// Passes over many flat tensors in one launch: a block takes one chunk of one tensor, from a table, so that thousands
// of small tensors and a single huge one keep the device equally busy.
//
// Thread t of a block has quads t, t + kBlock, ... of its chunk, four neighbours each, in ascending order. That does
// not depend on where a tensor starts: an unaligned one is read in single elements by the same threads, and sums have
// the same bits.
#pragma once
#include "mpispeed_cuda.cuh"

namespace mpispeed {

constexpr u32 kBlock = 256;    // threads; native/device_optim.py has the same numbers
constexpr u32 kChunk = 16384;  // elements of a chunk

// Rows of the table; 64 bytes, pointers first.
struct TensorRow {
    void* param;
    void* state_a;
    void* state_b;  // null where the rule has fewer
    const void* state_c;
    const void* grad;
    void* out;  // null in the kernels without a copy
    u64 count;
    u32 first_chunk;  // in the whole table of chunks
    u32 place;        // among the rows that the caller gave
};

struct Chunk {
    u32 row, index;
};

enum Decay { kDecayNone = 0, kDecayDecoupled = 1, kDecayL2 = 2 };

// Those of the host loops, rounded to fp32 by the caller; 72 bytes.
struct RuleTerms {
    float beta1, rest1;  // rest = 1 - beta
    float beta2, rest2;
    float step_size;   // factor of the direction
    float root_scale;  // Adam: 1 / sqrt(1 - beta2^t)
    float eps;
    float decay;  // decoupled: lr * weight_decay (LAMB: weight_decay); L2: weight_decay
    float grad_scale;
    int decay_mode;
    int is_eps_inside;  // LAMB: sqrt(v + eps)
    int unused;
    double full_step;    // LAMB: step_size before rounding
    double least, most;  // LAMB: limits of the trust ratio
};

// Stands for "no copy".
struct Nothing {};
__device__ __forceinline__ void store(float, Nothing*) {}

// An empty type has a size, and pointers to it are null.
template <class T>
__device__ __forceinline__ T* offset_by(void* pointer, u64 elements) {
    return pointer ? static_cast<T*>(pointer) + elements : nullptr;
}
template <class T>
__device__ __forceinline__ const T* offset_by(const void* pointer, u64 elements) {
    return pointer ? static_cast<const T*>(pointer) + elements : nullptr;
}

// ---- four neighbours: all of them at once, or those below `count` one by one ----------------------------------
template <int kBytes>
struct Word;
template <>
struct Word<16> {
    using Type = uint4;
};
template <>
struct Word<8> {
    using Type = uint2;
};
template <class T>
using WordOf = typename Word<sizeof(Four<T>)>::Type;

// A launch reads nothing twice, so nothing is worth keeping in a cache.
template <class T>
__device__ __forceinline__ Four<T> load_four(const T* from, u32 quad) {
    const WordOf<T> word = __ldcs(reinterpret_cast<const WordOf<T>*>(from) + quad);
    return *reinterpret_cast<const Four<T>*>(&word);
}
template <class T>
__device__ __forceinline__ void store_four(const Four<T>& x, T* to, u32 quad) {
    __stcs(reinterpret_cast<WordOf<T>*>(to) + quad, *reinterpret_cast<const WordOf<T>*>(&x));
}
template <class T>
__device__ __forceinline__ Four<T> load_some(const T* from, u32 quad, u32 count) {
    Four<T> x;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        if (4 * quad + k < count)
            x.item[k] = from[4 * quad + k];
        else
            store(0.0f, &x.item[k]);
    }
    return x;
}
template <bool kIsWhole, class T>
__device__ __forceinline__ Four<T> load(const T* from, u32 quad, u32 count) {
    if constexpr (kIsWhole)
        return load_four(from, quad);
    else
        return load_some(from, quad, count);
}

template <bool kIsWhole, class T>
__device__ __forceinline__ void put(const Four<T>& x, T* to, u32 quad, u32 count) {
    if constexpr (kIsWhole) {
        store_four(x, to, quad);
    } else {
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            if (4 * quad + k < count) to[4 * quad + k] = x.item[k];
    }
}
template <bool kIsWhole>
__device__ __forceinline__ void put(const Four<Nothing>&, Nothing*, u32, u32) {}

// Runs a pass over the quads of this thread. Loads of kUnroll quads are under way before the first is worked on.
template <u32 kUnroll, class Pass>
__device__ __forceinline__ void walk(Pass& pass, u32 count, bool is_aligned) {
    const u32 whole = is_aligned ? count / 4 : 0, quads = (count + 3) / 4;
    for (u32 quad = threadIdx.x; quad < whole; quad += kUnroll * kBlock) {
        typename Pass::Piece piece[kUnroll];
#pragma unroll
        for (u32 k = 0; k < kUnroll; k++)
            if (quad + k * kBlock < whole) pass.template take<true>(piece[k], quad + k * kBlock);
#pragma unroll
        for (u32 k = 0; k < kUnroll; k++)
            if (quad + k * kBlock < whole) pass.template finish<true>(piece[k], quad + k * kBlock);
    }
    for (u32 quad = whole + (threadIdx.x - whole) % kBlock; quad < quads; quad += kBlock) {
        typename Pass::Piece piece;
        pass.template take<false>(piece, quad);
        pass.template finish<false>(piece, quad);
    }
}

__device__ __forceinline__ u32 chunk_length(u64 count, u64 begin) {
    return count - begin < kChunk ? static_cast<u32>(count - begin) : kChunk;
}

// True if the factor that was computed on the device is NaN: gradients were not finite, and nothing is updated.
__device__ __forceinline__ bool is_skipped(const float* scale) { return scale && *scale != *scale; }

// The factor of the caller times one that was computed on the device, if there is one.
__device__ __forceinline__ float combined_scale(const RuleTerms& terms, const float* scale) {
    return scale ? __fmul_rn(terms.grad_scale, *scale) : terms.grad_scale;
}

__device__ __forceinline__ float used_gradient(float p, float g, float scale, const RuleTerms& t) {
    g = __fmul_rn(g, scale);
    return t.decay_mode == kDecayL2 ? __fadd_rn(g, __fmul_rn(t.decay, p)) : g;
}

__device__ __forceinline__ float decayed(float p, const RuleTerms& t) {
    return t.decay_mode == kDecayDecoupled ? __fsub_rn(p, __fmul_rn(t.decay, p)) : p;
}

__device__ __forceinline__ float moment(float beta, float old, float rest_g) {
    return __fadd_rn(__fmul_rn(beta, old), rest_g);
}

// ---- rules that work element by element -------------------------------------------------------------------------
// Rule::one(p, g, &a, &b, c, terms) gives the new parameter; g is scaled and has the L2 decay. A rule says here where
// it differs: what it does not read or write costs nothing.
struct RuleTraits {
    static constexpr bool kScalesGradient = true;  // false: something else is in its place
    static constexpr bool kReadsParam = true, kWritesParam = true, kWritesA = true, kWritesB = true;
};

template <class Rule, class P, class S, class G, class Out>
struct Update {
    struct Piece {
        Four<P> p;
        Four<S> a, b, c;
        Four<G> g;
    };
    P* param;
    S *state_a, *state_b;
    const S* state_c;
    const G* grad;
    Out* out;
    u32 count;
    float scale;
    const RuleTerms& terms;

    template <bool kIsWhole>
    __device__ __forceinline__ void take(Piece& x, u32 quad) const {
        if constexpr (Rule::kReadsParam) x.p = load<kIsWhole>(param, quad, count);
        x.a = load<kIsWhole>(state_a, quad, count);
        if constexpr (Rule::kStates > 1) x.b = load<kIsWhole>(state_b, quad, count);
        if constexpr (Rule::kStates > 2) x.c = load<kIsWhole>(state_c, quad, count);
        x.g = load<kIsWhole>(grad, quad, count);
    }

    template <bool kIsWhole>
    __device__ __forceinline__ void finish(Piece& x, u32 quad) const {
        Four<Out> low;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float p = 0.0f, a = to_float(x.a.item[k]), b = 0.0f, c = 0.0f, g = to_float(x.g.item[k]);
            if constexpr (Rule::kReadsParam) p = to_float(x.p.item[k]);
            if constexpr (Rule::kStates > 1) b = to_float(x.b.item[k]);
            if constexpr (Rule::kStates > 2) c = to_float(x.c.item[k]);
            if constexpr (Rule::kScalesGradient) g = used_gradient(p, g, scale, terms);
            const float updated = Rule::one(p, g, &a, &b, c, terms);
            store(updated, &x.p.item[k]);
            store(a, &x.a.item[k]);
            if constexpr (Rule::kStates > 1) store(b, &x.b.item[k]);
            store(updated, &low.item[k]);
        }
        if constexpr (Rule::kWritesParam) put<kIsWhole>(x.p, param, quad, count);
        if constexpr (Rule::kWritesA) put<kIsWhole>(x.a, state_a, quad, count);
        if constexpr (Rule::kStates > 1 && Rule::kWritesB) put<kIsWhole>(x.b, state_b, quad, count);
        put<kIsWhole>(low, out, quad, count);
    }
};

template <class Rule, class P, class S, class G, class Out>
__device__ __forceinline__ void update_chunk(const TensorRow* rows, const Chunk* chunks, const float* scale,
                                             const RuleTerms& terms) {
    if (is_skipped(scale)) return;
    const Chunk chunk = chunks[blockIdx.x];
    const TensorRow row = rows[chunk.row];
    const u64 begin = static_cast<u64>(chunk.index) * kChunk;
    Update<Rule, P, S, G, Out> pass{offset_by<P>(row.param, begin),
                                    offset_by<S>(row.state_a, begin),
                                    offset_by<S>(row.state_b, begin),
                                    offset_by<S>(row.state_c, begin),
                                    offset_by<G>(row.grad, begin),
                                    offset_by<Out>(row.out, begin),
                                    chunk_length(row.count, begin),
                                    combined_scale(terms, scale),
                                    terms};
    const bool is_wide = is_aligned(pass.param) && is_aligned(pass.state_a) && is_aligned(pass.state_b) &&
                         is_aligned(pass.state_c) && is_aligned(pass.grad) && is_aligned(pass.out);
    walk<2>(pass, pass.count, is_wide);
}

}  // namespace mpispeed

#define MULTI_TENSOR_KERNEL(name, Rule, P, S, G, Out)                                                                \
    extern "C" __global__ void __launch_bounds__(mpispeed::kBlock, 4)                                                   \
        name(const mpispeed::TensorRow* rows, const mpispeed::Chunk* chunks, const float* scale,                     \
             const mpispeed::RuleTerms terms) {                                                                      \
        mpispeed::update_chunk<Rule, P, S, G, Out>(rows, chunks, scale, terms);                                      \
    }                                                                                                                \
    MPISPEED_KERNEL(name)

// Masters and states in fp32 with every gradient and copy; 16-bit parameters (w) with states (s) in fp32 or their own
// dtype, and gradients in fp32 or their own dtype.
#define MULTI_TENSOR_KERNELS(stem, Rule)                                        \
    MULTI_TENSOR_KERNEL(stem##_f32, Rule, float, float, float, Nothing)         \
    MULTI_TENSOR_KERNEL(stem##_f32_bf16, Rule, float, float, float, bf16)       \
    MULTI_TENSOR_KERNEL(stem##_f32_fp16, Rule, float, float, float, fp16)       \
    MULTI_TENSOR_KERNEL(stem##_bf16, Rule, float, float, bf16, Nothing)         \
    MULTI_TENSOR_KERNEL(stem##_bf16_bf16, Rule, float, float, bf16, bf16)       \
    MULTI_TENSOR_KERNEL(stem##_bf16_fp16, Rule, float, float, bf16, fp16)       \
    MULTI_TENSOR_KERNEL(stem##_fp16, Rule, float, float, fp16, Nothing)         \
    MULTI_TENSOR_KERNEL(stem##_fp16_bf16, Rule, float, float, fp16, bf16)       \
    MULTI_TENSOR_KERNEL(stem##_fp16_fp16, Rule, float, float, fp16, fp16)       \
    MULTI_TENSOR_KERNEL(stem##_bf16w_f32s_f32, Rule, bf16, float, float, Nothing)  \
    MULTI_TENSOR_KERNEL(stem##_bf16w_f32s_bf16, Rule, bf16, float, bf16, Nothing)  \
    MULTI_TENSOR_KERNEL(stem##_bf16w_bf16s_f32, Rule, bf16, bf16, float, Nothing)  \
    MULTI_TENSOR_KERNEL(stem##_bf16w_bf16s_bf16, Rule, bf16, bf16, bf16, Nothing)  \
    MULTI_TENSOR_KERNEL(stem##_fp16w_f32s_f32, Rule, fp16, float, float, Nothing)  \
    MULTI_TENSOR_KERNEL(stem##_fp16w_f32s_fp16, Rule, fp16, float, fp16, Nothing)  \
    MULTI_TENSOR_KERNEL(stem##_fp16w_fp16s_f32, Rule, fp16, fp16, float, Nothing)  \
    MULTI_TENSOR_KERNEL(stem##_fp16w_fp16s_fp16, Rule, fp16, fp16, fp16, Nothing)
