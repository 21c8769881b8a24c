// The updates of 1-bit Adam and 0/1 Adam with a variance that stays as it is, over many flat tensors in one launch; the
// bits are those of the host loops. Everything is fp32, but for the copy.
#include "multi_tensor.cuh"

using namespace mpispeed;

// m / (sqrt(v) + eps), and 0 where v is 0: no gradient was seen there, and m can only be noise of the coding.
__device__ __forceinline__ float seen(float x, float v) { return v == 0.0f ? 0.0f : x; }
__device__ __forceinline__ float root_plus(float v, const RuleTerms& t) { return __fadd_rn(__fsqrt_rn(v), t.eps); }
__device__ __forceinline__ float quotient(float m, float v, const RuleTerms& t) {
    return seen(__fdiv_rn(m, root_plus(v, t)), v);
}

// State: the agreed momentum; in the place of the gradient: the variance.
struct OnebitAdamRule : RuleTraits {
    static constexpr int kStates = 1;
    static constexpr bool kScalesGradient = false;
    __device__ static __forceinline__ float one(float p, float v, float* m, float*, float, const RuleTerms& t) {
        const float q = quotient(*m, v, t);
        *m = seen(*m, v);
        return __fsub_rn(decayed(p, t), __fmul_rn(t.step_size, q));
    }
};

// States: momentum, variance (read).
struct ZeroOneCodedRule : RuleTraits {
    static constexpr int kStates = 2;
    static constexpr bool kWritesB = false;
    __device__ static __forceinline__ float one(float p, float g, float* m, float* v, float, const RuleTerms& t) {
        *m = seen(moment(t.beta1, *m, __fmul_rn(t.rest1, g)), *v);
        return __fsub_rn(decayed(p, t), __fmul_rn(t.step_size, quotient(*m, *v, t)));
    }
};

// States: momentum, drift since the common parameter, variance (read). The local parameter goes to the copy.
struct ZeroOneLocalRule : RuleTraits {
    static constexpr int kStates = 3;
    static constexpr bool kWritesParam = false;
    __device__ static __forceinline__ float one(float p, float g, float* m, float* u, float v, const RuleTerms& t) {
        *m = seen(moment(t.beta1, *m, __fmul_rn(t.rest1, g)), v);
        float drift = *u;
        if (t.decay_mode == kDecayDecoupled) drift = __fsub_rn(drift, __fmul_rn(t.decay, __fadd_rn(p, drift)));
        *u = __fsub_rn(drift, __fmul_rn(t.step_size, quotient(*m, v, t)));
        return __fadd_rn(p, *u);
    }
};

// Parameter: the buffer to fill. State: drift (read); in the place of the gradient: the variance.
struct ZeroOneDriftRule : RuleTraits {
    static constexpr int kStates = 1;
    static constexpr bool kScalesGradient = false, kReadsParam = false, kWritesA = false;
    __device__ static __forceinline__ float one(float, float v, float* u, float*, float, const RuleTerms& t) {
        return seen(__fmul_rn(*u, root_plus(v, t)), v);
    }
};

// States as for the local update; in the place of the gradient: what ranks agreed on.
struct ZeroOneSettleRule : RuleTraits {
    static constexpr int kStates = 3;
    static constexpr bool kScalesGradient = false;
    __device__ static __forceinline__ float one(float p, float g, float* m, float* u, float v, const RuleTerms& t) {
        const float moved = v == 0.0f ? *u : __fdiv_rn(g, root_plus(v, t));
        *m = seen(__fdiv_rn(-g, t.root_scale), v);
        *u = 0.0f;
        return __fadd_rn(p, moved);
    }
};

#define ONEBIT_KERNELS(stem, Rule)                                        \
    MULTI_TENSOR_KERNEL(stem##_f32, Rule, float, float, float, Nothing)   \
    MULTI_TENSOR_KERNEL(stem##_f32_bf16, Rule, float, float, float, bf16) \
    MULTI_TENSOR_KERNEL(stem##_f32_fp16, Rule, float, float, float, fp16)

ONEBIT_KERNELS(onebit_adam, OnebitAdamRule)
ONEBIT_KERNELS(zero_one_coded, ZeroOneCodedRule)
ONEBIT_KERNELS(zero_one_drift, ZeroOneDriftRule)
ONEBIT_KERNELS(zero_one_settle, ZeroOneSettleRule)
MULTI_TENSOR_KERNEL(zero_one_local_f32_f32, ZeroOneLocalRule, float, float, float, float)
MULTI_TENSOR_KERNEL(zero_one_local_f32_bf16, ZeroOneLocalRule, float, float, float, bf16)
MULTI_TENSOR_KERNEL(zero_one_local_f32_fp16, ZeroOneLocalRule, float, float, float, fp16)
