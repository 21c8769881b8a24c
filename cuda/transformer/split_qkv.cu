// The projection [batch, sequence, (heads + 2 key heads) * size] to q, k and v of [batch, heads, sequence,
// size], with bias and rotary embedding; and back, with the sums over rows that the bias gets.
//
// A thread owns a vector of columns, which is a place in a head, and walks over tokens. Rotation turns pairs
// of q and k by an angle of the token; back it turns the other way. A pair is two neighbours, or two elements
// half of the rotated part apart; the partner's vector is read too, which the cache has.
#include "mpispeed_columns.cuh"

using namespace mpispeed;

struct SplitTerms {
    unsigned long long rows;      // tokens of all batches
    unsigned int sequence, cols;  // cols: of the projection
    unsigned int heads, key_heads, size;
    unsigned int rotated;  // leading elements of a head that are turned; 0: none
    int is_halved;         // pairs are half of the rotated part apart
    int is_wide;
};

// Where a column of the projection stands: in which of q, k, v, in which head, and where in it.
template <class T>
struct Place {
    T* base;
    u32 heads, head, offset;
    bool is_turned;

    __device__ __forceinline__ Place(T* q, T* k, T* v, u32 col, const SplitTerms& t) {
        const u32 all = col / t.size;
        offset = col - all * t.size;
        const bool is_query = all < t.heads, is_key = !is_query && all < t.heads + t.key_heads;
        base = is_query ? q : is_key ? k : v;
        heads = is_query ? t.heads : t.key_heads;
        head = is_query ? all : all - t.heads - (is_key ? 0 : t.key_heads);
        is_turned = offset < t.rotated && (is_query || is_key);
    }
    __device__ __forceinline__ T* at(u64 token, const SplitTerms& t) const {
        const u32 row = static_cast<u32>(token), batch = row / t.sequence, place = row - batch * t.sequence;
        return base + ((static_cast<u64>(batch) * heads + head) * t.sequence + place) * t.size + offset;
    }
};

// How V neighbours are turned. `x` is changed; `other` is the partners' vector, of which is used what is not
// in x.
template <int V>
struct Turn {
    u32 offset, half, to_partner;  // the partner's distance, or 0 if it is in the same vector
    bool is_first, is_halved;

    __device__ __forceinline__ Turn(u32 at, const SplitTerms& t) {
        offset = at;
        half = t.rotated / 2;
        is_halved = t.is_halved;
        is_first = is_halved ? at < half : at % 2 == 0;
        to_partner = is_halved ? half : V == 1 ? 1 : 0;
    }
    __device__ __forceinline__ void apply(float* x, const float* other, const float* cosine,
                                          const float* sine, u64 place, float sign) const {
        if (is_halved || V == 1) {
            const u64 from = place * half + (is_halved ? (is_first ? offset : offset - half) : offset / 2);
            float c[V], s[V];
            load_floats<float, V>(cosine + from, c);
            load_floats<float, V>(sine + from, s);
            const float way = is_first ? -sign : sign;
#pragma unroll
            for (int j = 0; j < V; j++)
                x[j] = __fadd_rn(__fmul_rn(x[j], c[j]), __fmul_rn(__fmul_rn(way, other[j]), s[j]));
        } else if constexpr (V > 1) {
            const u64 from = place * half + offset / 2;
            float c[V / 2], s[V / 2];
            load_floats<float, V / 2>(cosine + from, c);
            load_floats<float, V / 2>(sine + from, s);
#pragma unroll
            for (int j = 0; j < V / 2; j++) {
                const float a = x[2 * j], b = x[2 * j + 1];
                x[2 * j] = __fadd_rn(__fmul_rn(a, c[j]), __fmul_rn(__fmul_rn(-sign, b), s[j]));
                x[2 * j + 1] = __fadd_rn(__fmul_rn(b, c[j]), __fmul_rn(__fmul_rn(sign, a), s[j]));
            }
        }
    }
};

template <class T, int V>
struct Pairs {
    Packed<T, V> x, other;
};

template <class T, int V>
struct Split {
    using Loaded = Pairs<T, V>;
    const T* qkv;
    const float *cosine, *sine;
    const SplitTerms& t;
    u32 col;
    Place<T> to;
    Turn<V> turn;
    float bias[V], other_bias[V];

    __device__ __forceinline__ long step() const {
        return turn.is_first ? static_cast<long>(turn.to_partner) : -static_cast<long>(turn.to_partner);
    }
    __device__ __forceinline__ Loaded load(u64 row) const {
        const T* from = qkv + row * t.cols + col;
        Loaded out;
        out.x.load(from);
        if (to.is_turned && turn.to_partner) out.other.load(from + step());
        return out;
    }
    __device__ __forceinline__ void finish(const Loaded& got, u64 row) const {
        float x[V], other[V];
#pragma unroll
        for (int j = 0; j < V; j++) x[j] = __fadd_rn(got.x.at(j), bias[j]);
        if (to.is_turned) {
#pragma unroll
            for (int j = 0; j < V; j++)
                other[j] = turn.to_partner ? __fadd_rn(got.other.at(j), other_bias[j]) : 0;
            turn.apply(x, other, cosine, sine, static_cast<u32>(row) % t.sequence, 1);
        }
        store_floats<T, V>(x, to.at(row, t));
    }
};

template <class T, int V>
struct Merge {
    using Loaded = Pairs<T, V>;
    T* dqkv;
    const float *cosine, *sine;
    const SplitTerms& t;
    u32 col;
    Place<const T> from;
    Turn<V> turn;
    float sums[V];

    __device__ __forceinline__ Loaded load(u64 row) const {
        const T* at = from.at(row, t);
        const long step =
            turn.is_first ? static_cast<long>(turn.to_partner) : -static_cast<long>(turn.to_partner);
        Loaded out;
        out.x.load(at);
        if (from.is_turned && turn.to_partner) out.other.load(at + step);
        return out;
    }
    __device__ __forceinline__ void finish(const Loaded& got, u64 row) {
        float x[V], other[V];
#pragma unroll
        for (int j = 0; j < V; j++) x[j] = got.x.at(j);
        if (from.is_turned) {
#pragma unroll
            for (int j = 0; j < V; j++) other[j] = turn.to_partner ? got.other.at(j) : 0;
            turn.apply(x, other, cosine, sine, static_cast<u32>(row) % t.sequence, -1);
        }
#pragma unroll
        for (int j = 0; j < V; j++) sums[j] += x[j];
        store_floats<T, V>(x, dqkv + row * t.cols + col);
    }
};

template <class T, int V>
__device__ __forceinline__ void split(T* q, T* k, T* v, const T* qkv, const T* bias, const float* cosine,
                                      const float* sine, const SplitTerms& t) {
    const u32 col = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (col >= t.cols) return;
    const Place<T> place(q, k, v, col, t);
    Split<T, V> body = {qkv, cosine, sine, t, col, place, Turn<V>(place.offset, t), {}, {}};
#pragma unroll
    for (int j = 0; j < V; j++) body.bias[j] = body.other_bias[j] = 0;
    if (bias) load_floats<T, V>(bias + col, body.bias);
    if (bias && place.is_turned && body.turn.to_partner)
        load_floats<T, V>(bias + col + body.step(), body.other_bias);
    walk_rows<2>(t.rows, body);
}

template <class T, int V>
__device__ __forceinline__ void merge(T* dqkv, float* dbias, const T* dq, const T* dk, const T* dv,
                                      const float* cosine, const float* sine, const SplitTerms& t) {
    MPISPEED_DYNAMIC_SHARED(float, room);
    const u32 col = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    const Place<const T> place(dq, dk, dv, col, t);
    Merge<T, V> body = {dqkv, cosine, sine, t, col, place, Turn<V>(place.offset, t), {}};
    if (col < t.cols) walk_rows<2>(t.rows, body);
    if (dbias) store_partial<V>(body.sums, dbias, t.cols, room);
}

#define SPLIT_QKV(tag, T)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 3)                                                   \
        split_qkv_##tag(T* q, T* k, T* v, const T* qkv, const T* bias, const float* cosine,                \
                        const float* sine, const SplitTerms t) {                                           \
        if (t.is_wide)                                                                                     \
            split<T, kWide<T>>(q, k, v, qkv, bias, cosine, sine, t);                                       \
        else                                                                                               \
            split<T, 1>(q, k, v, qkv, bias, cosine, sine, t);                                              \
    }                                                                                                      \
    MPISPEED_KERNEL(split_qkv_##tag)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 3)                                                   \
        merge_qkv_##tag(T* dqkv, float* dbias, const T* dq, const T* dk, const T* dv, const float* cosine, \
                        const float* sine, const SplitTerms t) {                                           \
        if (t.is_wide)                                                                                     \
            merge<T, kWide<T>>(dqkv, dbias, dq, dk, dv, cosine, sine, t);                                  \
        else                                                                                               \
            merge<T, 1>(dqkv, dbias, dq, dk, dv, cosine, sine, t);                                         \
    }                                                                                                      \
    MPISPEED_KERNEL_SYNC(merge_qkv_##tag)

SPLIT_QKV(f32, float)
SPLIT_QKV(bf16, bf16)
SPLIT_QKV(fp16, fp16)
