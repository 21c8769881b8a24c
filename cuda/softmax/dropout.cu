// Dropout of probabilities that were kept whole, repeated from its seed.
#include "mpispeed_cuda.cuh"

using namespace mpispeed;

// out = x * mask / (1 - ratio)
template <int W, class T>
__device__ __forceinline__ void drop_chunk(const T* x, T* out, u64 chunk, u64 seed, u32 threshold,
                                           float keep_scale) {
    const Vec<T, W> raw = reinterpret_cast<const Vec<T, W>*>(x)[chunk];
    Vec<T, W> kept;
#pragma unroll
    for (int k = 0; k < W; k += 4) {
        const Bits4 bits = philox(seed, (chunk * W + k) >> 2, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float product = __fmul_rn(to_float(raw.item[k + i]), keep_scale);
            store(bits.item[i] >= threshold ? product : 0.0f, &kept.item[k + i]);
        }
    }
    reinterpret_cast<Vec<T, W>*>(out)[chunk] = kept;
}

template <class T>
__device__ __forceinline__ void drop_again(const T* x, T* out, u64 count, u64 seed, u32 threshold,
                                           float keep_scale) {
    constexpr int W = kWide<T>;
    const u64 first = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
    const u64 chunks = is_aligned_for<W>(x) && is_aligned_for<W>(out) ? count / W : 0;
    for (u64 chunk = first; chunk < chunks; chunk += stride)
        drop_chunk<W>(x, out, chunk, seed, threshold, keep_scale);
    for (u64 i = chunks * W + first; i < count; i += stride) {
        const float product = __fmul_rn(to_float(x[i]), keep_scale);
        store(is_kept(seed, i, threshold) ? product : 0.0f, out + i);
    }
}

#define DROPOUT_KERNEL(tag, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                             \
        dropout_##tag(const T* x, T* out, u64 count, u64 seed, u32 threshold, float keep_scale,   \
                      u32 is_place) {                                                             \
        drop_again(x, out, count, seed_word(seed, is_place), threshold, keep_scale);              \
    }                                                                                             \
    MPISPEED_KERNEL(dropout_##tag)

DROPOUT_KERNEL(f32, float)
DROPOUT_KERNEL(bf16, bf16)
DROPOUT_KERNEL(fp16, fp16)
