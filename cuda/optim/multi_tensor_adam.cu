// Adam and AdamW over many flat tensors in one launch, with a 16-bit copy of the masters if wanted. One read and one
// write of each element.
//
// The arithmetic and its order are those of the host loop, so moving a range between host and device changes no bits
// (other than the payload of a NaN).
#include "multi_tensor.cuh"

using namespace mpispeed;

struct AdamRule : RuleTraits {
    static constexpr int kStates = 2;
    __device__ static __forceinline__ float one(float p, float g, float* m, float* v, float, const RuleTerms& t) {
        *m = moment(t.beta1, *m, __fmul_rn(t.rest1, g));
        *v = moment(t.beta2, *v, __fmul_rn(__fmul_rn(t.rest2, g), g));
        const float d = __fadd_rn(__fmul_rn(__fsqrt_rn(*v), t.root_scale), t.eps);
        return __fsub_rn(decayed(p, t), __fmul_rn(t.step_size, __fdiv_rn(*m, d)));
    }
};

MULTI_TENSOR_KERNELS(adam, AdamRule)
