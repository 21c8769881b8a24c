// Sums of buffers in the tree of native.reduce: neighbours first, an odd one passes up, in fp32, times a factor, rounded
// once. Parts may lie in memory of other processes and GPUs; each element is read once from every part.
#include "mpispeed_cuda.cuh"

using namespace mpispeed;

constexpr int kMostParts = 8;

struct TreeParts {
    const void* part[kMostParts];
    u64 count;  // elements of each
    float scale;
    u32 parts;
};

// In and out may be the same memory, so neither is declared to be alone.
template <class T, class Out>
__device__ __forceinline__ void tree_sum(Out* out, const TreeParts& given) {
    constexpr int kItems = kWide<T>;
    using Packet = Vec<T, kItems>;
    const u64 first = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * kItems;
    if (first >= given.count) return;
    const bool is_whole = first + kItems <= given.count;
    float held[kMostParts][kItems];
#pragma unroll
    for (int p = 0; p < kMostParts; p++) {
        if (p >= given.parts) break;
        const T* part = static_cast<const T*>(given.part[p]) + first;
        Packet packet;
        if (is_whole && is_aligned_for<kItems>(part)) {
            packet = *reinterpret_cast<const Packet*>(part);
        } else {
#pragma unroll
            for (int i = 0; i < kItems; i++) packet.item[i] = first + i < given.count ? part[i] : T{};
        }
#pragma unroll
        for (int i = 0; i < kItems; i++) held[p][i] = to_float(packet.item[i]);
    }
#pragma unroll
    for (int step = 1; step < kMostParts; step *= 2) {
#pragma unroll
        for (int p = 0; p + step < kMostParts; p += 2 * step) {
            if (p + step >= given.parts) break;
#pragma unroll
            for (int i = 0; i < kItems; i++) held[p][i] = __fadd_rn(held[p][i], held[p + step][i]);
        }
    }
#pragma unroll
    for (int i = 0; i < kItems; i++) {
        if (given.scale != 1.0f) held[0][i] = __fmul_rn(held[0][i], given.scale);
    }
    constexpr int kOut = kItems < kWide<Out> ? kItems : kWide<Out>;  // fp32 of 16-bit parts leaves in two packets
    if (is_whole && is_aligned_for<kOut>(out)) {
#pragma unroll
        for (int begin = 0; begin < kItems; begin += kOut) {
            Vec<Out, kOut> packet;
#pragma unroll
            for (int i = 0; i < kOut; i++) store(held[0][begin + i], &packet.item[i]);
            store_whole(packet, reinterpret_cast<Vec<Out, kOut>*>(out + first + begin));
        }
    } else {
#pragma unroll
        for (int i = 0; i < kItems; i++) {
            if (first + i < given.count) store(held[0][i], out + first + i);
        }
    }
}

#define TREE_KERNEL(name, T, Out)                                                                       \
    extern "C" __global__ void __launch_bounds__(256) name(Out* out, const TreeParts given) {           \
        tree_sum<T>(out, given);                                                                        \
    }                                                                                                   \
    MPISPEED_KERNEL(name)

TREE_KERNEL(tree_sum_f32, float, float)
TREE_KERNEL(tree_sum_bf16, bf16, bf16)
TREE_KERNEL(tree_sum_fp16, fp16, fp16)
TREE_KERNEL(tree_sum_bf16_f32, bf16, float)
TREE_KERNEL(tree_sum_fp16_f32, fp16, float)
