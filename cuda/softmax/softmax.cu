// Softmax of attention scores over the last dim, with an additive or boolean mask, or causal, with dropout.
//
// A team of threads keeps one row in registers, 8 or 16 elements a thread: up to 32 lanes of a warp for short
// rows, a block for rows of up to 8192. Longer rows are walked over twice; the second pass finds them in
// cache. So device memory is read once and written once (twice with dropout, whose backward pass needs the
// probabilities as well). Sums and the softmax are in fp32.
#include "mpispeed_cuda.cuh"

using namespace mpispeed;

enum MaskKind { kMaskNone = 0, kMaskSame = 1, kMaskFloat = 2, kMaskBool = 3 };

// A divisor of numbers below 2^31 as a factor: n / by = (2 n * factor / 2^32) >> shift, where shift is the
// number of bits of by - 1 and factor is 2^(31 + shift) / by, rounded up. A division would cost as much as a
// row.
struct Divisor {
    u32 by, factor, shift;
    __device__ __forceinline__ u32 quotient(u32 n) const { return __umulhi(2 * n, factor) >> shift; }
    __device__ __forceinline__ u32 remainder(u32 n) const { return n - quotient(n) * by; }
};

// 96 bytes. Row r is of query r % queries, head r / queries % heads, batch r / queries / heads.
struct SoftmaxTerms {
    u64 mask_batch, mask_head, mask_query;  // strides of the mask in elements; the last dim is dense
    u64 seed;
    u32 rows, columns;
    Divisor queries, heads;
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
        for (u32 step = size >> 1; step; step >>= 1) x = op(x, __shfl_xor_sync(kAllLanes, x, step));
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
__device__ __forceinline__ float to_mask(unsigned char x) { return x ? 0.0f : -infinity(); }
template <class T>
__device__ __forceinline__ float to_mask(T x) {
    return to_float(x);
}

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

// S elements of a tile of a row that one thread has: chunk c stands at column base + (c * size + lane) * W.
// Elements from `limit` on are not used and, except beside it, not read.
template <class T, int W, int S>
struct Share {
    static constexpr int kChunks = S / W;
    u32 size, lane, base;
    __device__ __forceinline__ u32 column(int c) const { return base + (c * size + lane) * W; }
    __device__ __forceinline__ bool has(int i, u32 limit) const { return column(i / W) + i % W < limit; }

    __device__ __forceinline__ void load(const T* row, u32 limit, float fill, float (&x)[S]) const {
        Vec<T, W> raw[kChunks] = {};
#pragma unroll
        for (int c = 0; c < kChunks; c++)
            if (column(c) < limit) raw[c] = *reinterpret_cast<const Vec<T, W>*>(row + column(c));
#pragma unroll
        for (int i = 0; i < S; i++) x[i] = has(i, limit) ? to_float(raw[i / W].item[i % W]) : fill;
    }

    __device__ __forceinline__ void save(const float (&x)[S], T* row, u32 columns) const {
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            if (column(c) >= columns) continue;
            Vec<T, W> raw;
#pragma unroll
            for (int k = 0; k < W; k++) store(x[c * W + k], &raw.item[k]);
            *reinterpret_cast<Vec<T, W>*>(row + column(c)) = raw;
        }
    }

    template <class M>
    __device__ __forceinline__ void add(const M* mask, bool is_wide, u32 limit, float (&x)[S]) const {
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
#pragma unroll
            for (int k = 0; k < W; k++) x[c * W + k] += to_mask(raw.item[k]);
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

    __device__ __forceinline__ Row(const T* scores, const void* mask, const SoftmaxTerms& t, u32 row)
        : t(t), scores(scores + static_cast<u64>(row) * t.columns), mask(mask), limit(row_limit(t, row)) {
        if (t.mask_kind == kMaskNone || limit == 0) return;
        const u32 line = t.queries.quotient(row), batch = t.heads.quotient(line);
        const u64 at = batch * t.mask_batch + (line - batch * t.heads.by) * t.mask_head +
                       (row - line * t.queries.by) * t.mask_query;
        const u64 width = t.mask_kind == kMaskSame ? sizeof(T) : t.mask_kind == kMaskFloat ? 4 : 1;
        this->mask = static_cast<const char*>(mask) + at * width;
    }

    __device__ __forceinline__ void load(const Share<T, W, S>& share, float (&x)[S]) const {
        share.load(scores, limit, -infinity(), x);
#pragma unroll
        for (int i = 0; i < S; i++) x[i] *= t.scale;
        const bool is_wide = t.mask_is_wide != 0;
        if (t.mask_kind == kMaskSame) share.add(static_cast<const T*>(mask), is_wide, limit, x);
        if (t.mask_kind == kMaskFloat) share.add(static_cast<const float*>(mask), is_wide, limit, x);
        if (t.mask_kind == kMaskBool) share.add(static_cast<const unsigned char*>(mask), is_wide, limit, x);
        // After scale and mask, either of which may turn an infinity into something else.
#pragma unroll
        for (int i = 0; i < S; i++)
            if (!share.has(i, limit)) x[i] = -infinity();
    }
};

template <int S>
__device__ __forceinline__ float largest(const float (&x)[S]) {
    float top = -infinity();
#pragma unroll
    for (int i = 0; i < S; i++) top = fmaxf(top, x[i]);
    return top;
}

// Turns x into exp(x - top) and gives its sum. A top of -inf (all masked, or all NaN) counts as 0; the sum
// tells.
template <int S>
__device__ __forceinline__ float raise_all(float (&x)[S], float top) {
    if (top == -infinity()) top = 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < S; i++) sum += x[i] = __expf(x[i] - top);
    return sum;
}

__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.0f ? 0.0f : __frcp_rn(sum); }

template <bool kDrops, class T, int W, int S>
__device__ __forceinline__ void put(const Share<T, W, S>& share, float (&x)[S], float inverse, T* probs,
                                    T* dropped, u64 first, u32 limit, const SoftmaxTerms& t) {
#pragma unroll
    for (int i = 0; i < S; i++) {
        T low;  // what is dropped from is what was stored, so that it can be repeated from there
        store(__fmul_rn(x[i], inverse), &low);
        x[i] = to_float(low);
    }
    share.save(x, probs + first, t.columns);
    if constexpr (kDrops) {
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
    row.load(share, x);
    const float top = team.reduce(largest(x), -infinity(), Larger());
    const float sum = team.reduce(raise_all(x, top), 0.0f, Sum());
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
        row.load({team.size, threadIdx.x, base}, x);
        const float before = top;
        top = fmaxf(top, largest(x));
        if (top != before) sum *= __expf(before - top);
        sum += raise_all(x, top);
    }
    const float mine = top;
    top = team.reduce(mine, -infinity(), Larger());
    if (mine != -infinity()) sum *= __expf(mine - top);
    const float inverse = inverse_of(team.reduce(sum, 0.0f, Sum()));
    for (u32 base = 0; base < t.columns; base += tile) {
        const Share<T, W, S> share = {team.size, threadIdx.x, base};
        row.load(share, x);
        raise_all(x, top);
        put<kDrops>(share, x, inverse, probs, dropped, static_cast<u64>(blockIdx.x) * t.columns, row.limit,
                    t);
    }
}

// The probabilities and the gradient of what was dropped from them.
template <bool kDrops, int W, int S, class T>
__device__ __forceinline__ void load_grad(const Share<T, W, S>& share, const T* probs, const T* grad,
                                          u64 first, u32 limit, const SoftmaxTerms& t, float (&p)[S],
                                          float (&g)[S]) {
    share.load(probs + first, limit, 0.0f, p);
    share.load(grad + first, limit, 0.0f, g);
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
    MPISPEED_KERNEL_SYNC(softmax_##name)                                                                     \
    extern "C" __global__ void __launch_bounds__(128, 8)                                                     \
        softmax_grad_##name(const T* probs, const T* grad, T* out, const SoftmaxTerms t) {                   \
        const u32 row = row_in_lanes(t);                                                                     \
        const LaneTeam team = {1u << t.lane_bits};                                                           \
        grad_row<drops, W, S>(probs, grad, out, t, row, threadIdx.x & (team.size - 1), team);                \
    }                                                                                                        \
    MPISPEED_KERNEL_SYNC(softmax_grad_##name)

// A block has a row: as many threads as it needs, a multiple of 32.
#define SOFTMAX_BLOCK(name, T, W, drops)                                                                \
    extern "C" __global__ void __launch_bounds__(1024)                                                  \
        softmax_##name(const T* scores, const void* mask, T* probs, T* dropped, const SoftmaxTerms t) { \
        __shared__ float parts[32];                                                                     \
        const BlockTeam team = {blockDim.x, parts};                                                     \
        softmax_row<drops, W, 8>(scores, mask, probs, dropped, t, blockIdx.x, threadIdx.x, team);       \
    }                                                                                                   \
    MPISPEED_KERNEL_SYNC(softmax_##name)                                                                \
    extern "C" __global__ void __launch_bounds__(1024)                                                  \
        softmax_grad_##name(const T* probs, const T* grad, T* out, const SoftmaxTerms t) {              \
        __shared__ float parts[32];                                                                     \
        const BlockTeam team = {blockDim.x, parts};                                                     \
        grad_row<drops, W, 8>(probs, grad, out, t, blockIdx.x, threadIdx.x, team);                      \
    }                                                                                                   \
    MPISPEED_KERNEL_SYNC(softmax_grad_##name)

#define SOFTMAX_LONG(name, T, W, drops)                                                                 \
    extern "C" __global__ void __launch_bounds__(512)                                                   \
        softmax_##name(const T* scores, const void* mask, T* probs, T* dropped, const SoftmaxTerms t) { \
        __shared__ float parts[32];                                                                     \
        const BlockTeam team = {blockDim.x, parts};                                                     \
        softmax_long_row<drops, W, 16>(scores, mask, probs, dropped, t, team);                          \
    }                                                                                                   \
    MPISPEED_KERNEL_SYNC(softmax_##name)                                                                \
    extern "C" __global__ void __launch_bounds__(512)                                                   \
        softmax_grad_##name(const T* probs, const T* grad, T* out, const SoftmaxTerms t) {              \
        __shared__ float parts[32];                                                                     \
        const BlockTeam team = {blockDim.x, parts};                                                     \
        grad_long_row<drops, W, 16>(probs, grad, out, t, team);                                         \
    }                                                                                                   \
    MPISPEED_KERNEL_SYNC(softmax_grad_##name)

#define SOFTMAX_KERNELS(tag, T)                         \
    SOFTMAX_LANES(8_##tag, T, kWide<T>, 8, false)       \
    SOFTMAX_LANES(16_##tag, T, kWide<T>, 16, false)     \
    SOFTMAX_BLOCK(block_##tag, T, kWide<T>, false)      \
    SOFTMAX_LONG(long_##tag, T, kWide<T>, false)        \
    SOFTMAX_LANES(drop_8_##tag, T, kWide<T>, 8, true)   \
    SOFTMAX_LANES(drop_16_##tag, T, kWide<T>, 16, true) \
    SOFTMAX_BLOCK(drop_block_##tag, T, kWide<T>, true)  \
    SOFTMAX_LONG(drop_long_##tag, T, kWide<T>, true)    \
    SOFTMAX_LANES(single_8_##tag, T, 1, 8, false)       \
    SOFTMAX_BLOCK(single_block_##tag, T, 1, false)      \
    SOFTMAX_LONG(single_long_##tag, T, 1, false)        \
    SOFTMAX_LANES(drop_single_8_##tag, T, 1, 8, true)   \
    SOFTMAX_BLOCK(drop_single_block_##tag, T, 1, true)  \
    SOFTMAX_LONG(drop_single_long_##tag, T, 1, true)

SOFTMAX_KERNELS(f32, float)
SOFTMAX_KERNELS(bf16, bf16)
SOFTMAX_KERNELS(fp16, fp16)

// Repeats the dropout of probabilities that were kept whole: out = x * mask / (1 - ratio).
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
