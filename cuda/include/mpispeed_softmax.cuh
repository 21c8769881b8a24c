// Softmax of attention scores over the last dim, with an additive or boolean mask, or causal, with dropout.
//
// A team of threads keeps one row in registers, 8 or 16 elements a thread: up to 32 lanes of a warp for short
// rows, a block for rows of up to 8192. Longer rows are walked over twice; the second pass finds them in
// cache. So device memory is read once and written once (twice with dropout, whose backward pass needs the
// probabilities as well). Sums and the softmax are in fp32.
//
// With 16-bit numbers instructions are what is short, so pairs of them are moved, compared and rounded as words,
// and only a packet that the end of a causal row goes through looks at its elements one by one.
#pragma once
#include "mpispeed_cuda.cuh"

namespace mpispeed {

enum MaskKind { kMaskNone = 0, kMaskSame = 1, kMaskFloat = 2, kMaskBool = 3 };

// A divisor of numbers below 2^31 as a factor: n / by = (2 n * factor / 2^32) >> shift, where shift is the
// number of bits of by - 1 and factor is 2^(31 + shift) / by, rounded up. A division would cost as much as a
// row.
struct QuickDivisor {
    u32 by, factor, shift;
    __device__ __forceinline__ u32 quotient(u32 n) const { return __umulhi(2 * n, factor) >> shift; }
    __device__ __forceinline__ u32 remainder(u32 n) const { return n - quotient(n) * by; }
};

// 96 bytes. Row r is of query r % queries, head r / queries % heads, batch r / queries / heads.
struct SoftmaxTerms {
    u64 mask_batch, mask_head, mask_query;  // strides of the mask in elements; the last dim is dense
    u64 seed;
    u32 rows, columns;
    QuickDivisor queries, heads;
    u32 lane_bits;  // a team within a warp has 2^lane_bits threads
    u32 mask_kind;
    u32 mask_is_wide;  // as many elements of the mask in one access as of the scores
    u32 is_causal;
    u32 threshold;  // of Philox words
    float scale;
    float keep_scale;  // 1 / (1 - ratio)
    u32 is_place;      // the seed is the address of the seed
};

// Several rows in a warp, or one row in a part of it.
struct LaneTeam {
    u32 size;
    template <class Op>
    __device__ __forceinline__ float reduce(float x, float, Op op) const {
#pragma unroll
        for (u32 step = 16; step; step >>= 1)
            if (step < size) x = op(x, __shfl_xor_sync(kAllLanes, x, step));
        return x;
    }
};

struct BlockTeam {
    u32 size;
    float* shared;
    template <class Op>
    __device__ __forceinline__ float reduce(float x, float neutral, Op op) const {
        return block_reduce(x, neutral, shared, op);
    }
};

// Leaves NaN out: it comes back through the sum.
struct Larger {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Columns a row may look at: the last query sees all keys.
__device__ __forceinline__ u32 row_limit(const SoftmaxTerms& t, u32 row) {
    if (row >= t.rows) return 0;
    if (!t.is_causal) return t.columns;
    const long long limit = static_cast<long long>(t.queries.remainder(row)) + 1 + t.columns - t.queries.by;
    return limit > 0 ? static_cast<u32>(limit) : 0;
}

// The row of a thread in a block that has several.
__device__ __forceinline__ u32 row_in_lanes(const SoftmaxTerms& t) {
    return blockIdx.x * (blockDim.x >> t.lane_bits) + (threadIdx.x >> t.lane_bits);
}

// A word of minus infinities.
template <class T>
constexpr u32 kNothing = 0xff800000u;
template <>
constexpr u32 kNothing<bf16> = 0xff80ff80u;
template <>
constexpr u32 kNothing<fp16> = 0xfc00fc00u;

// ---- packets: W neighbours, as words ----------------------------------------------------------------------
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

// S elements of a tile of a row that one thread has: chunk c stands at column base + (c * size + lane) * W.
// Elements from `limit` on are not used and, except beside it, not read.
template <class T, int W, int S>
struct Share {
    static constexpr int kChunks = S / W;
    using Packets = Packet<T, W>[kChunks];
    u32 size, lane, base;
    __device__ __forceinline__ u32 column(int c) const { return base + (c * size + lane) * W; }
    __device__ __forceinline__ bool has(int i, u32 limit) const { return column(i / W) + i % W < limit; }
    // A word of `fill` stands from the limit on. Only where rows are cut, as causal ones are, may the limit be in the
    // middle of a packet.
    __device__ __forceinline__ void read(const T* row, u32 limit, bool is_cut, u32 fill, Packets& raw) const {
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            fill_packet<T, W>(raw[c], fill);
            if (column(c) < limit) raw[c] = *reinterpret_cast<const Packet<T, W>*>(row + column(c));
        }
        if constexpr (W > 1) {
            if (!is_cut) return;
#pragma unroll
            for (int c = 0; c < kChunks; c++)
                if (column(c) < limit && column(c) + W > limit) cut_packet<T, W>(raw[c], limit - column(c), fill);
        }
    }

    __device__ __forceinline__ void load(const T* row, u32 limit, bool is_cut, float (&x)[S]) const {
        Packets raw;
        read(row, limit, is_cut, 0, raw);
#pragma unroll
        for (int c = 0; c < kChunks; c++) widen<T, W>(raw[c], x + c * W);
    }

    __device__ __forceinline__ void save(const float (&x)[S], T* row, u32 columns) const {
#pragma unroll
        for (int c = 0; c < kChunks; c++)
            if (column(c) < columns) *reinterpret_cast<Packet<T, W>*>(row + column(c)) = narrow<T, W>(x + c * W);
    }

    // x * scale + mask; where a mask of bytes is 0, minus infinity.
    template <class M>
    __device__ __forceinline__ void add(const M* mask, bool is_wide, u32 limit, float scale, float (&x)[S]) const {
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            if (column(c) >= limit) continue;
            Vec<M, W> raw = {};
            if (is_wide) {
                raw = *reinterpret_cast<const Vec<M, W>*>(mask + column(c));
            } else {
#pragma unroll
                for (int k = 0; k < W; k++)
                    if (has(c * W + k, limit)) raw.item[k] = mask[column(c) + k];
            }
            if constexpr (sizeof(M) == 1) {
#pragma unroll
                for (int k = 0; k < W; k++)
                    x[c * W + k] = raw.item[k] ? __fmul_rn(x[c * W + k], scale) : -infinity();
            } else {
                float m[W];
                widen<M, W>(same_bits<Packet<M, W>>(raw), m);
#pragma unroll
                for (int k = 0; k < W; k++) x[c * W + k] = __fmaf_rn(x[c * W + k], scale, m[k]);
            }
        }
    }

    // Dropped elements become 0, others are multiplied; `first` is the number of the row's first element.
    __device__ __forceinline__ void drop(float (&x)[S], u64 first, u32 limit, const SoftmaxTerms& t) const {
        // Where either is read has been tried: the other place costs each kernel a spilled register.
        const u64 once = W == 1 ? 0 : seed_word(t.seed, t.is_place);
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            if (column(c) >= limit) continue;
            const u64 seed = W == 1 ? seed_word(t.seed, t.is_place) : once;
            const u64 element = first + column(c);
            if constexpr (W == 1) {
                x[c] = is_kept(seed, element, t.threshold) ? __fmul_rn(x[c], t.keep_scale) : 0.0f;
            } else {
#pragma unroll
                for (int k = 0; k < W; k += 4) {
                    const Bits4 bits = philox(seed, (element + k) >> 2, 0);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float kept = __fmul_rn(x[c * W + k + i], t.keep_scale);
                        x[c * W + k + i] = bits.item[i] >= t.threshold ? kept : 0.0f;
                    }
                }
            }
        }
    }
};

// One row of the scores and what is made of it.
template <class T, int W, int S>
struct Row {
    const SoftmaxTerms& t;
    const T* scores;
    const void* mask;  // of this row
    u32 limit;
    bool is_plain;  // nothing but a positive factor is between a score and its exponent
    float factor;   // of what `load` gives, for powers of two

    __device__ __forceinline__ Row(const T* scores, const void* mask, const SoftmaxTerms& t, u32 row)
        : t(t), scores(scores + static_cast<u64>(row) * t.columns), mask(mask), limit(row_limit(t, row)) {
        constexpr float kLog2OfE = 1.4426950408889634f;
        is_plain = t.mask_kind == kMaskNone && t.scale > 0.0f;
        factor = is_plain ? __fmul_rn(t.scale, kLog2OfE) : kLog2OfE;
        if (t.mask_kind == kMaskNone || limit == 0) return;
        const u32 line = t.queries.quotient(row), batch = t.heads.quotient(line);
        const u64 at = batch * t.mask_batch + (line - batch * t.heads.by) * t.mask_head +
                       (row - line * t.queries.by) * t.mask_query;
        const u64 width = t.mask_kind == kMaskSame ? sizeof(T) : t.mask_kind == kMaskFloat ? 4 : 1;
        this->mask = static_cast<const char*>(mask) + at * width;
    }

    static __device__ __forceinline__ float largest_of(const float (&x)[S]) {
        float top = -infinity();
#pragma unroll
        for (int i = 0; i < S; i++) top = fmaxf(top, x[i]);
        return top;
    }
    // Two by two where they are pairs.
    static __device__ __forceinline__ float largest_of(const typename Share<T, W, S>::Packets& raw,
                                                       const float (&x)[S]) {
        if constexpr (kInPairs<T> && W > 1) {
            u32 top = raw[0].item[0];
#pragma unroll
            for (int j = 1; j < kWords<T, S>; j++)
                top = larger_pair<T>(top, raw[j / kWords<T, W>].item[j % kWords<T, W>]);
            float two[2];
            widen_pair<T>(top, two);
            return fmaxf(-infinity(), fmaxf(two[0], two[1]));
        } else {
            return largest_of(x);
        }
    }

    // The elements, minus infinity from the limit on, and the largest of them.
    __device__ __forceinline__ float load(const Share<T, W, S>& share, float (&x)[S]) const {
        typename Share<T, W, S>::Packets raw;
        share.read(scores, limit, t.is_causal, kNothing<T>, raw);
#pragma unroll
        for (int c = 0; c < share.kChunks; c++) widen<T, W>(raw[c], x + c * W);
        if (is_plain) return largest_of(raw, x);
        const bool is_wide = t.mask_is_wide != 0;
        if (t.mask_kind == kMaskNone) {
#pragma unroll
            for (int i = 0; i < S; i++) x[i] = __fmul_rn(x[i], t.scale);
        }
        if (t.mask_kind == kMaskSame) share.add(static_cast<const T*>(mask), is_wide, limit, t.scale, x);
        if (t.mask_kind == kMaskFloat) share.add(static_cast<const float*>(mask), is_wide, limit, t.scale, x);
        if (t.mask_kind == kMaskBool)
            share.add(static_cast<const unsigned char*>(mask), is_wide, limit, t.scale, x);
        // After scale and mask, either of which may turn an infinity into something else.
#pragma unroll
        for (int c = 0; c < share.kChunks; c++) {
            if (share.column(c) + W <= limit) continue;
#pragma unroll
            for (int i = c * W; i < (c + 1) * W; i++)
                if (!share.has(i, limit)) x[i] = -infinity();
        }
        return largest_of(x);
    }

    // Turns x into exp(scale * (x - top)) and gives its sum. A top of -inf (all masked, or all NaN) counts as 0; the
    // sum tells. With 16-bit scores the product with the top is rounded, alike for all elements, so that their
    // quotients know nothing of it but the rounding of storage.
    __device__ __forceinline__ float raise_all(float (&x)[S], float top) const {
        if (top == -infinity()) top = 0.0f;
        const float shift = __fmul_rn(top, factor);
        float sum = 0.0f;
        if (is_fused(shift)) {
#pragma unroll
            for (int i = 0; i < S; i++) sum += x[i] = exp2_of(__fmaf_rn(x[i], factor, -shift));
        } else {
#pragma unroll
            for (int i = 0; i < S; i++) sum += x[i] = exp2_of(__fmul_rn(x[i] - top, factor));
        }
        return sum;
    }

    // What a sum under one top counts under a larger one: with the products that `raise_all` rounds.
    __device__ __forceinline__ float lowered(float before, float top) const {
        const float shift = __fmul_rn(top, factor);
        if (is_fused(shift)) return exp2_of(__fsub_rn(__fmul_rn(before, factor), shift));
        return exp2_of(__fmul_rn(before - top, factor));
    }

    __device__ __forceinline__ bool is_fused(float shift) const {
        return kInPairs<T> && is_plain && fabsf(shift) < infinity();
    }
};

__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.0f ? 0.0f : __frcp_rn(sum); }

template <bool kDrops, class T, int W, int S>
__device__ __forceinline__ void put(const Share<T, W, S>& share, float (&x)[S], float inverse, T* probs,
                                    T* dropped, u64 first, u32 limit, const SoftmaxTerms& t) {
#pragma unroll
    for (int i = 0; i < S; i++) x[i] = __fmul_rn(x[i], inverse);
    share.save(x, probs + first, t.columns);
    if constexpr (kDrops) {
#pragma unroll
        for (int c = 0; c < share.kChunks; c++) {
            // What is dropped from is what was stored, so that it can be repeated from there.
            const Packet<T, W> stored = narrow<T, W>(x + c * W);
            widen<T, W>(stored, x + c * W);
        }
        share.drop(x, first, limit, t);
        share.save(x, dropped + first, t.columns);
    }
}

template <bool kDrops, int W, int S, class T, class Team>
__device__ __forceinline__ void softmax_row(const T* scores, const void* mask, T* probs, T* dropped,
                                            const SoftmaxTerms& t, u32 row_number, u32 lane,
                                            const Team& team) {
    const Share<T, W, S> share = {team.size, lane, 0};
    const Row<T, W, S> row(scores, mask, t, row_number);
    float x[S];
    const float top = team.reduce(row.load(share, x), -infinity(), Larger());
    const float sum = team.reduce(row.raise_all(x, top), 0.0f, Sum());
    if (row_number >= t.rows) return;
    put<kDrops>(share, x, inverse_of(sum), probs, dropped, static_cast<u64>(row_number) * t.columns,
                row.limit, t);
}

template <bool kDrops, int W, int S, class T>
__device__ __forceinline__ void softmax_long_row(const T* scores, const void* mask, T* probs, T* dropped,
                                                 const SoftmaxTerms& t, const BlockTeam& team) {
    const Row<T, W, S> row(scores, mask, t, blockIdx.x);
    const u32 tile = team.size * S;
    float top = -infinity(), sum = 0.0f, x[S];
    for (u32 base = 0; base < row.limit; base += tile) {
        const float before = top;
        top = fmaxf(top, row.load({team.size, threadIdx.x, base}, x));
        if (top != before) sum *= row.lowered(before, top);
        sum += row.raise_all(x, top);
    }
    const float mine = top;
    top = team.reduce(mine, -infinity(), Larger());
    if (mine != -infinity()) sum *= row.lowered(mine, top);
    const float inverse = inverse_of(team.reduce(sum, 0.0f, Sum()));
    for (u32 base = 0; base < t.columns; base += tile) {
        const Share<T, W, S> share = {team.size, threadIdx.x, base};
        row.load(share, x);
        row.raise_all(x, top);
        put<kDrops>(share, x, inverse, probs, dropped, static_cast<u64>(blockIdx.x) * t.columns, row.limit,
                    t);
    }
}

// The probabilities and the gradient of what was dropped from them.
template <bool kDrops, int W, int S, class T>
__device__ __forceinline__ void load_grad(const Share<T, W, S>& share, const T* probs, const T* grad,
                                          u64 first, u32 limit, const SoftmaxTerms& t, float (&p)[S],
                                          float (&g)[S]) {
    share.load(probs + first, limit, false, p);  // 0 from the limit on
    share.load(grad + first, limit, t.is_causal, g);
    if constexpr (kDrops) share.drop(g, first, limit, t);
}

template <int S>
__device__ __forceinline__ float product_sum(const float (&p)[S], const float (&g)[S]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < S; i++) sum += p[i] * g[i];
    return sum;
}

template <bool kDrops, int W, int S, class T, class Team>
__device__ __forceinline__ void grad_row(const T* probs, const T* grad, T* out, const SoftmaxTerms& t,
                                         u32 row, u32 lane, const Team& team) {
    const Share<T, W, S> share = {team.size, lane, 0};
    const u64 first = static_cast<u64>(row) * t.columns;
    float p[S], g[S];
    load_grad<kDrops>(share, probs, grad, first, row_limit(t, row), t, p, g);
    const float sum = team.reduce(product_sum(p, g), 0.0f, Sum());
#pragma unroll
    for (int i = 0; i < S; i++) g[i] = t.scale * (p[i] * (g[i] - sum));
    if (row < t.rows) share.save(g, out + first, t.columns);
}

template <bool kDrops, int W, int S, class T>
__device__ __forceinline__ void grad_long_row(const T* probs, const T* grad, T* out, const SoftmaxTerms& t,
                                              const BlockTeam& team) {
    const u64 first = static_cast<u64>(blockIdx.x) * t.columns;
    const u32 tile = team.size * S, limit = row_limit(t, blockIdx.x);
    float sum = 0.0f, p[S], g[S];
    for (u32 base = 0; base < limit; base += tile) {
        const Share<T, W, S> share = {team.size, threadIdx.x, base};
        load_grad<kDrops>(share, probs, grad, first, limit, t, p, g);
        sum += product_sum(p, g);
    }
    sum = team.reduce(sum, 0.0f, Sum());
    for (u32 base = 0; base < t.columns; base += tile) {
        const Share<T, W, S> share = {team.size, threadIdx.x, base};
        load_grad<kDrops>(share, probs, grad, first, limit, t, p, g);
#pragma unroll
        for (int i = 0; i < S; i++) g[i] = t.scale * (p[i] * (g[i] - sum));
        share.save(g, out + first, t.columns);
    }
}

// ---- kernels ----------------------------------------------------------------------------------------------
// W elements in one access: 16 bytes, or, in kernels named "single", one element for rows that begin
// anywhere. They are kernels of their own, because single accesses need twice the registers, and wide ones
// have to fill the memory.

// Blocks of 128 threads, teams of up to 32 lanes of which each has S elements.
#define SOFTMAX_LANES(name, T, W, S, drops)                                                                  \
    extern "C" __global__ void __launch_bounds__(128, 8)                                                     \
        softmax_##name(const T* scores, const void* mask, T* probs, T* dropped, const SoftmaxTerms t) {      \
        const u32 row = row_in_lanes(t);                                                                     \
        const LaneTeam team = {1u << t.lane_bits};                                                           \
        softmax_row<drops, W, S>(scores, mask, probs, dropped, t, row, threadIdx.x & (team.size - 1), team); \
    }                                                                                                        \
    MPISPEED_KERNEL_SYNC(softmax_##name)
#define SOFTMAX_GRAD_LANES(name, T, W, S, drops)                                              \
    extern "C" __global__ void __launch_bounds__(128, 8)                                      \
        softmax_grad_##name(const T* probs, const T* grad, T* out, const SoftmaxTerms t) {    \
        const u32 row = row_in_lanes(t);                                                      \
        const LaneTeam team = {1u << t.lane_bits};                                            \
        grad_row<drops, W, S>(probs, grad, out, t, row, threadIdx.x & (team.size - 1), team); \
    }                                                                                         \
    MPISPEED_KERNEL_SYNC(softmax_grad_##name)

// A block has a row: as many threads as it needs, a multiple of 32. What a thread does for a row costs as much as some
// elements, so it has 16 where they are pairs. Walking
// blocks have 8 where single accesses make long code.
template <class T, int W>
constexpr int kBlockShare = kInPairs<T> && W > 1 ? 16 : 8;
template <int W>
constexpr int kLongShare = W > 1 ? 16 : 8;

#define SOFTMAX_BLOCK(name, T, W, drops)                                                                          \
    extern "C" __global__ void __launch_bounds__(1024)                                                            \
        softmax_##name(const T* scores, const void* mask, T* probs, T* dropped, const SoftmaxTerms t) {           \
        __shared__ float parts[32];                                                                               \
        const BlockTeam team = {blockDim.x, parts};                                                               \
        softmax_row<drops, W, kBlockShare<T, W>>(scores, mask, probs, dropped, t, blockIdx.x, threadIdx.x, team); \
    }                                                                                                             \
    MPISPEED_KERNEL_SYNC(softmax_##name)
#define SOFTMAX_GRAD_BLOCK(name, T, W, drops)                                                      \
    extern "C" __global__ void __launch_bounds__(1024)                                             \
        softmax_grad_##name(const T* probs, const T* grad, T* out, const SoftmaxTerms t) {         \
        __shared__ float parts[32];                                                                \
        const BlockTeam team = {blockDim.x, parts};                                                \
        grad_row<drops, W, kBlockShare<T, W>>(probs, grad, out, t, blockIdx.x, threadIdx.x, team); \
    }                                                                                              \
    MPISPEED_KERNEL_SYNC(softmax_grad_##name)

#define SOFTMAX_LONG(name, T, W, drops)                                                                 \
    extern "C" __global__ void __launch_bounds__(512)                                                   \
        softmax_##name(const T* scores, const void* mask, T* probs, T* dropped, const SoftmaxTerms t) { \
        __shared__ float parts[32];                                                                     \
        const BlockTeam team = {blockDim.x, parts};                                                     \
        softmax_long_row<drops, W, kLongShare<W>>(scores, mask, probs, dropped, t, team);               \
    }                                                                                                   \
    MPISPEED_KERNEL_SYNC(softmax_##name)
#define SOFTMAX_GRAD_LONG(name, T, W, drops)                                               \
    extern "C" __global__ void __launch_bounds__(512)                                      \
        softmax_grad_##name(const T* probs, const T* grad, T* out, const SoftmaxTerms t) { \
        __shared__ float parts[32];                                                        \
        const BlockTeam team = {blockDim.x, parts};                                        \
        grad_long_row<drops, W, kLongShare<W>>(probs, grad, out, t, team);                 \
    }                                                                                      \
    MPISPEED_KERNEL_SYNC(softmax_grad_##name)

#define SOFTMAX_TYPES(kernels) \
    kernels(f32, float)        \
    kernels(bf16, bf16)        \
    kernels(fp16, fp16)

}  // namespace mpispeed
