// Gradients of scores, with dropout, of rows of whole packets.
#include "mpispeed_softmax.cuh"

using namespace mpispeed;

#define KERNELS(tag, T)                                      \
    SOFTMAX_GRAD_LANES(drop_16_##tag, T, kWide<T>, 16, true) \
    SOFTMAX_GRAD_BLOCK(drop_block_##tag, T, kWide<T>, true)  \
    SOFTMAX_GRAD_LONG(drop_long_##tag, T, kWide<T>, true)

SOFTMAX_TYPES(KERNELS)
SOFTMAX_GRAD_LANES(drop_8_f32, float, 4, 8, true)
