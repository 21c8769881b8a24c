// What every kernel starts from: conversions between fp32 and the 16-bit formats, and vectors of four.
//
// Arithmetic that has to give the bits of the host loops is written with the _rn functions, which the
// compiler never fuses; so the result does not depend on -fmad. Kernels include nothing else: compiled by a
// plain C++ compiler with a header named mpispeed_cuda_host.h on the include path they run on the host.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define MPISPEED_KERNEL(name)  // on the host: an entry that loops over blocks and threads
#else
#include "mpispeed_cuda_host.h"
#endif

namespace mpispeed {

using bf16 = __nv_bfloat16;
using fp16 = __half;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

// Round to nearest even, as torch does.
__device__ __forceinline__ void store(float x, float* at) { *at = x; }
__device__ __forceinline__ void store(float x, bf16* at) { *at = __float2bfloat16_rn(x); }
__device__ __forceinline__ void store(float x, fp16* at) { *at = __float2half_rn(x); }

// Four neighbours, moved in one instruction.
template <class T>
struct alignas(4 * sizeof(T)) Four {
    T item[4];
};

template <class T>
__device__ __forceinline__ bool is_aligned(const T* pointer) {
    return reinterpret_cast<size_t>(pointer) % sizeof(Four<T>) == 0;
}

}  // namespace mpispeed
