// Gradients of scores, without dropout, of rows that begin anywhere.
#include "mpispeed_softmax.cuh"

using namespace mpispeed;

#define KERNELS(tag, T)                                 \
    SOFTMAX_GRAD_LANES(single_8_##tag, T, 1, 8, false)  \
    SOFTMAX_GRAD_BLOCK(single_block_##tag, T, 1, false) \
    SOFTMAX_GRAD_LONG(single_long_##tag, T, 1, false)

SOFTMAX_TYPES(KERNELS)
