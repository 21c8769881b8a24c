// Adagrad over many flat tensors in one launch; the bits are those of the host loop.
#include "multi_tensor.cuh"

using namespace mpispeed;

struct AdagradRule : RuleTraits {
    static constexpr int kStates = 1;
    __device__ static __forceinline__ float one(float p, float g, float* s, float*, float, const RuleTerms& t) {
        *s = __fadd_rn(*s, __fmul_rn(g, g));
        const float d = __fadd_rn(__fsqrt_rn(*s), t.eps);
        return __fsub_rn(decayed(p, t), __fmul_rn(t.step_size, __fdiv_rn(g, d)));
    }
};

MULTI_TENSOR_KERNELS(adagrad, AdagradRule)
