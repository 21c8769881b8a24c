// Lion over many flat tensors in one launch; the bits are those of the host loop.
#include "multi_tensor.cuh"

using namespace mpispeed;

struct LionRule : RuleTraits {
    static constexpr int kStates = 1;
    __device__ static __forceinline__ float one(float p, float g, float* m, float*, float, const RuleTerms& t) {
        const float u = moment(t.beta1, *m, __fmul_rn(t.rest1, g));
        // The sign of 0 is 0, that of NaN is NaN.
        const float sign = u > 0.0f ? 1.0f : u < 0.0f ? -1.0f : u;
        *m = moment(t.beta2, *m, __fmul_rn(t.rest2, g));
        return __fsub_rn(decayed(p, t), __fmul_rn(t.step_size, sign));
    }
};

MULTI_TENSOR_KERNELS(lion, LionRule)
