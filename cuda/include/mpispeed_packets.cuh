// Packets: W neighbours as words, so that 16-bit numbers are moved, cut and rounded two by two; a single number is
// itself.
#pragma once
#include "mpispeed_cuda.cuh"

namespace mpispeed {
template <class T>
constexpr bool kInPairs = sizeof(T) == 2;
template <class T, int W>
constexpr int kWords = W * sizeof(T) / 4;  // 0 for a single 16-bit number

template <class T, int W>
struct PacketOf {
    using Type = Vec<u32, kWords<T, W>>;
};
template <class T>
struct PacketOf<T, 1> {
    using Type = Vec<T, 1>;
};
template <class T, int W>
using Packet = typename PacketOf<T, W>::Type;

template <class T, int W>
__device__ __forceinline__ void widen(const Packet<T, W>& packet, float* x) {
    if constexpr (W == 1) {
        x[0] = to_float(packet.item[0]);
    } else {
#pragma unroll
        for (int j = 0; j < kWords<T, W>; j++) {
            if constexpr (kInPairs<T>) {
                widen_pair<T>(packet.item[j], x + 2 * j);
            } else {
                x[j] = __uint_as_float(packet.item[j]);
            }
        }
    }
}

template <class T, int W>
__device__ __forceinline__ Packet<T, W> narrow(const float* x) {
    Packet<T, W> packet;
    if constexpr (W == 1) {
        store(x[0], packet.item);
    } else {
#pragma unroll
        for (int j = 0; j < kWords<T, W>; j++) {
            if constexpr (kInPairs<T>) {
                packet.item[j] = narrow_pair<T>(x[2 * j], x[2 * j + 1]);
            } else {
                packet.item[j] = __float_as_uint(x[j]);
            }
        }
    }
    return packet;
}

// `fill`, a word, in every place.
template <class T, int W>
__device__ __forceinline__ void fill_packet(Packet<T, W>& packet, u32 fill) {
    if constexpr (W == 1) {
        memcpy(&packet, &fill, sizeof packet);
    } else {
#pragma unroll
        for (int j = 0; j < kWords<T, W>; j++) packet.item[j] = fill;
    }
}

// The same from place `count` on.
template <class T, int W>
__device__ __forceinline__ void cut_packet(Packet<T, W>& packet, u32 count, u32 fill) {
    constexpr u32 kEach = 4 / sizeof(T);
#pragma unroll
    for (u32 j = 0; j < kWords<T, W>; j++) {
        u32 kept = j * kEach < count ? 0xffffffffu : 0;
        if (kEach == 2 && j * 2 + 1 == count) kept = 0xffffu;
        packet.item[j] = (packet.item[j] & kept) | (fill & ~kept);
    }
}

}  // namespace mpispeed
