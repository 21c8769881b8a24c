// Dropout of neighbours: the mask is made from the seed whenever it is needed, never stored.
#pragma once
#include "mpispeed_cuda.cuh"

namespace mpispeed {

struct Dropout {
    unsigned long long seed;
    unsigned int threshold;  // 0: everything is kept, and no random number is made
    float scale;             // of what is kept
    unsigned int is_place;   // the seed is the address of the seed, so that a graph draws anew at each replay

    __device__ __forceinline__ u64 word() const { return seed_word(seed, is_place); }
};

// Which of V neighbours are kept; `element` is a multiple of V.
template <int V>
__device__ __forceinline__ void keep(const Dropout& d, u64 element, bool* kept) {
    if constexpr (V == 1) {
        kept[0] = is_kept(d.word(), element, d.threshold);
    } else {
        const u64 seed = d.word();
#pragma unroll
        for (int part = 0; part < V / 4; part++) {
            const Bits4 bits = philox(seed, element / 4 + part, 0);
#pragma unroll
            for (int j = 0; j < 4; j++) kept[4 * part + j] = bits.item[j] >= d.threshold;
        }
    }
}

template <int V>
__device__ __forceinline__ void drop(const Dropout& d, u64 element, float* x) {
    if (d.threshold == 0) return;
    bool kept[V];
    keep<V>(d, element, kept);
#pragma unroll
    for (int j = 0; j < V; j++) x[j] = kept[j] ? __fmul_rn(x[j], d.scale) : 0.0f;
}

}  // namespace mpispeed
