// Probabilities, without dropout, of rows of whole packets.
#include "mpispeed_softmax.cuh"

using namespace mpispeed;

#define KERNELS(tag, T)                             \
    SOFTMAX_LANES(16_##tag, T, kWide<T>, 16, false) \
    SOFTMAX_BLOCK(block_##tag, T, kWide<T>, false)  \
    SOFTMAX_LONG(long_##tag, T, kWide<T>, false)

SOFTMAX_TYPES(KERNELS)
SOFTMAX_LANES(8_f32, float, 4, 8, false)
