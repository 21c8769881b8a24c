// Probabilities, with dropout, of rows that begin anywhere.
#include "mpispeed_softmax.cuh"

using namespace mpispeed;

#define KERNELS(tag, T)                                \
    SOFTMAX_LANES(drop_single_8_##tag, T, 1, 8, true)  \
    SOFTMAX_BLOCK(drop_single_block_##tag, T, 1, true) \
    SOFTMAX_LONG(drop_single_long_##tag, T, 1, true)

SOFTMAX_TYPES(KERNELS)
