// Lets a C++ compiler take a kernel whose threads are independent: every block and thread runs in turn.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index {
    unsigned x, y;
};
inline Index blockIdx, threadIdx, blockDim, gridDim;

struct __half {
    _Float16 value;
};
struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __bfloat162float(__nv_bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }

// Arguments come as a list of addresses, as the driver takes them.
template <class... A, size_t... I>
void run_all(void (*kernel)(A...), const unsigned* dims, void** arguments, std::index_sequence<I...>) {
    gridDim = {dims[0], dims[1]};
    blockDim = {dims[2], 1};
    threadIdx.y = 0;
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
                kernel(*static_cast<std::remove_const_t<A>*>(arguments[I])...);
}
template <class... A>
void run_all(void (*kernel)(A...), const unsigned* dims, void** arguments) {
    run_all(kernel, dims, arguments, std::index_sequence_for<A...>{});
}

#define MPISPEED_KERNEL(name) \
    extern "C" void on_host_##name(const unsigned* dims, void** arguments) { run_all(&name, dims, arguments); }
