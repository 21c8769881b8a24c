// Gradients of scores, with dropout, of rows that begin anywhere.
#include "mpispeed_softmax.cuh"

using namespace mpispeed;

#define KERNELS(tag, T)                                     \
    SOFTMAX_GRAD_LANES(drop_single_8_##tag, T, 1, 8, true)  \
    SOFTMAX_GRAD_BLOCK(drop_single_block_##tag, T, 1, true) \
    SOFTMAX_GRAD_LONG(drop_single_long_##tag, T, 1, true)

SOFTMAX_TYPES(KERNELS)
