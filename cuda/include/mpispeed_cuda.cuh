// What every kernel starts from: number formats, vectors, sums over a block, random bits.
//
// Arithmetic that has to give the bits of the host loops is written with the _rn functions, which the
// compiler never fuses; so the result does not depend on -fmad. Kernels include nothing but headers of this
// folder: compiled by a plain C++ compiler with a header named mpispeed_cuda_host.h on the include path they
// run on the host. Each `extern "C" __global__` is followed by MPISPEED_KERNEL(name), or by
// MPISPEED_KERNEL_SYNC(name) if it has barriers or shuffles; all threads of a block reach those.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define MPISPEED_KERNEL(name)  // on the host: an entry that loops over blocks and threads
#define MPISPEED_KERNEL_SYNC(name)
#define MPISPEED_DYNAMIC_SHARED(T, name)                        \
    extern __shared__ __align__(16) unsigned char name##_raw[]; \
    T* name = reinterpret_cast<T*>(name##_raw)
#else
#include "mpispeed_cuda_host.h"
#endif

namespace mpispeed {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using u32 = unsigned int;
using u64 = unsigned long long;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

// Round to nearest even, as torch does.
__device__ __forceinline__ void store(float x, float* at) { *at = x; }
__device__ __forceinline__ void store(float x, bf16* at) { *at = __float2bfloat16_rn(x); }
__device__ __forceinline__ void store(float x, fp16* at) { *at = __float2half_rn(x); }

// Two 16-bit floats in one word, the first in its low half: widened, rounded, and the larger of each, which leaves
// NaN out.
template <class T>
struct Halves;
template <>
struct Halves<bf16> {
    using Type = __nv_bfloat162;
    static __device__ __forceinline__ Type rounded(float a, float b) { return __floats2bfloat162_rn(a, b); }
};
template <>
struct Halves<fp16> {
    using Type = __half2;
    static __device__ __forceinline__ Type rounded(float a, float b) { return __floats2half2_rn(a, b); }
};
template <class To, class From>
__device__ __forceinline__ To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "bits of another number format");
    To out;
    memcpy(&out, &x, sizeof out);
    return out;
}
template <class T>
__device__ __forceinline__ void widen_pair(u32 word, float* x) {
    const typename Halves<T>::Type pair = same_bits<typename Halves<T>::Type>(word);
    x[0] = __low2float(pair);
    x[1] = __high2float(pair);
}
template <>
__device__ __forceinline__ void widen_pair<bf16>(u32 word, float* x) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
}
template <class T>
__device__ __forceinline__ u32 narrow_pair(float a, float b) {
    return same_bits<u32>(Halves<T>::rounded(a, b));
}
template <class T>
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
    using Two = typename Halves<T>::Type;
    return same_bits<u32>(__hmax2(same_bits<Two>(a), same_bits<Two>(b)));
}

// 2^x to about 2^-22 of it; 0 where that is no normal number.
__device__ __forceinline__ float exp2_of(float x) {
#ifdef __CUDACC__
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
#else
    return x < -126.0f ? 0.0f : exp2f(x);
#endif
}

// Neighbours that are moved in one instruction.
template <class T, int N>
struct alignas(N * sizeof(T)) Vec {
    T item[N];
};
template <class T>
using Four = Vec<T, 4>;
// 16 bytes of T: the widest access of a thread.
template <class T>
constexpr int kWide = 16 / sizeof(T);

// Writes 16 or 8 bytes in one instruction. Where another branch writes single elements to the same place the compiler
// may take a plain assignment apart, to share its last words with that branch.
template <class V>
__device__ __forceinline__ void store_whole(const V& v, V* at) {
    if (sizeof(V) == 16) {
        uint4 words;
        memcpy(&words, &v, 16);
        __stcg(reinterpret_cast<uint4*>(at), words);
    } else {
        static_assert(sizeof(V) == 16 || sizeof(V) == 8, "the widest and the second widest access of a thread");
        uint2 words;
        memcpy(&words, &v, 8);
        __stcg(reinterpret_cast<uint2*>(at), words);
    }
}

template <int N, class T>
__device__ __forceinline__ bool is_aligned_for(const T* pointer) {
    return reinterpret_cast<size_t>(pointer) % (N * sizeof(T)) == 0;
}
template <class T>
__device__ __forceinline__ bool is_aligned(const T* pointer) {
    return is_aligned_for<4>(pointer);
}

// ---- sums over a warp or a block, in a fixed order; every thread gets the result --------------------------
constexpr u32 kAllLanes = 0xffffffffu;

struct Sum {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
struct Max {
    // A NaN stays.
    __device__ __forceinline__ float operator()(float a, float b) const { return (a > b || a != a) ? a : b; }
};

template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T x, Op op) {
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) x = op(x, __shfl_xor_sync(kAllLanes, x, lane));
    return x;
}

// `shared` has room for 32 T; blockDim.x is a multiple of 32. Barriers stand before and after its use.
template <class T, class Op>
__device__ __forceinline__ T block_reduce(T x, T neutral, T* shared, Op op) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x = warp_reduce(x, op);
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return warp_reduce(lane < (blockDim.x >> 5) ? shared[lane] : neutral, op);
}

template <class T>
__device__ __forceinline__ T block_sum(T x, T* shared) {
    return block_reduce(x, static_cast<T>(0), shared, Sum());
}

// ---- random bits: Philox 4x32-10 (Salmon et al., SC 2011) -------------------------------------------------
struct Bits4 {
    u32 item[4];
};

__device__ __forceinline__ Bits4 philox(u64 seed, u64 counter, u64 stream) {
    u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
    u32 c0 = static_cast<u32>(counter), c1 = static_cast<u32>(counter >> 32);
    u32 c2 = static_cast<u32>(stream), c3 = static_cast<u32>(stream >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 product0 = static_cast<u64>(0xD2511F53u) * c0, product1 = static_cast<u64>(0xCD9E8D57u) * c2;
        const u32 n0 = static_cast<u32>(product1 >> 32) ^ c1 ^ key0, n2 = static_cast<u32>(product0 >> 32) ^ c3 ^ key1;
        c1 = static_cast<u32>(product1);
        c3 = static_cast<u32>(product0);
        c0 = n0;
        c2 = n2;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// A seed that came with the launch, or that stands at an address.
__device__ __forceinline__ u64 seed_word(u64 seed, u32 is_place) {
    return is_place ? *reinterpret_cast<const u64*>(seed) : seed;
}

// Element i of a dropout has word i % 4 of counter i / 4 and stream 0; it is kept if its word is not below
// `threshold`, the dropped part of 2^32.
__device__ __forceinline__ bool is_kept(u64 seed, u64 element, u32 threshold) {
    const Bits4 bits = philox(seed, element >> 2, 0);
    const u32 word = element & 3;
    // No indexing by a run-time value: it would put the words into local memory.
    const u32 low = word & 1 ? bits.item[1] : bits.item[0], high = word & 1 ? bits.item[3] : bits.item[2];
    return (word & 2 ? high : low) >= threshold;
}

}  // namespace mpispeed
