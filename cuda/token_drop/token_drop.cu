// Rows of tokens: picked out of a batch, and put back into it. Rows are copied as units of 1 to 16 bytes, whatever
// their dtype; threadIdx.x goes along a row, threadIdx.y over rows. An index that is out of range touches no memory of
// others: its row is zeros, or is left out.
#include "mpispeed_cuda.cuh"

using namespace mpispeed;

struct TokenGrid {
    u64 rows;    // of the result
    u64 batch, tokens, picked;
    u64 units;   // of a row
    u32 is_batch_first;
};

using Unit16 = Vec<u32, 4>;
using Unit8 = u64;
using Unit4 = u32;
using Unit2 = unsigned short;
using Unit1 = unsigned char;

struct Token {
    u64 sample, place;
};

// The token of row `row` where a sample has `length` tokens, and back.
__device__ __forceinline__ Token token_of(u64 row, u64 length, const TokenGrid& grid) {
    const u64 minor = grid.is_batch_first ? length : grid.batch;
    u64 major;
    if ((row | minor) >> 32) {
        major = row / minor;
    } else {
        major = static_cast<u32>(row) / static_cast<u32>(minor);
    }
    const u64 rest = row - major * minor;
    return grid.is_batch_first ? Token{major, rest} : Token{rest, major};
}
__device__ __forceinline__ u64 row_of(const Token& token, u64 length, const TokenGrid& grid) {
    return grid.is_batch_first ? token.sample * length + token.place : token.place * grid.batch + token.sample;
}

// Four units of a thread are on their way at once. No source: zeros.
template <class Unit>
__device__ __forceinline__ void copy_row(Unit* to, const Unit* from, u64 units) {
    for (u64 at = threadIdx.x; at < units; at += 4 * blockDim.x) {
        Unit held[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u64 unit = at + k * blockDim.x;
            held[k] = {};
            if (from && unit < units) held[k] = from[unit];
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u64 unit = at + k * blockDim.x;
            if (unit < units) to[unit] = held[k];
        }
    }
}

template <class Unit, class Index>
__device__ __forceinline__ void gather(Unit* out, const Unit* x, const Index* index, const TokenGrid& grid) {
    const u64 row = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= grid.rows) return;
    const Token token = token_of(row, grid.picked, grid);
    const u64 place = static_cast<u64>(static_cast<long long>(index[token.sample * grid.picked + token.place]));
    const u64 source = row_of({token.sample, place}, grid.tokens, grid);
    const Unit* from = place < grid.tokens ? x + source * grid.units : nullptr;
    copy_row(out + row * grid.units, from, grid.units);
}

// For each row of the batch, which row is put there; the others keep the -1 they come with.
template <class Index>
__device__ __forceinline__ void find_sources(long long* sources, const Index* index, const TokenGrid& grid) {
    const u64 at = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= grid.rows) return;
    const u64 sample = at / grid.picked;
    const u64 place = static_cast<u64>(static_cast<long long>(index[at]));
    if (place >= grid.tokens) return;
    const u64 source = row_of({sample, at - sample * grid.picked}, grid.picked, grid);
    sources[row_of({sample, place}, grid.tokens, grid)] = static_cast<long long>(source);
}

// Each row from `y` if it has a source there, and from `into` otherwise; zeros stand for the one that is missing.
template <class Unit>
__device__ __forceinline__ void merge(Unit* out, const Unit* y, const Unit* into, const long long* sources,
                                      const TokenGrid& grid) {
    const u64 row = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= grid.rows) return;
    const long long source = sources[row];
    const Unit* from = source < 0 ? into : y;
    if (from) from += (source < 0 ? row : static_cast<u64>(source)) * grid.units;
    copy_row(out + row * grid.units, from, grid.units);
}

#define UNIT_KERNELS(bytes)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) token_gather_##bytes##_i32(                                 \
        Unit##bytes* out, const Unit##bytes* x, const int* index, const TokenGrid grid) {                         \
        gather(out, x, index, grid);                                                                              \
    }                                                                                                             \
    MPISPEED_KERNEL(token_gather_##bytes##_i32)                                                                   \
    extern "C" __global__ void __launch_bounds__(256) token_gather_##bytes##_i64(                                 \
        Unit##bytes* out, const Unit##bytes* x, const long long* index, const TokenGrid grid) {                   \
        gather(out, x, index, grid);                                                                              \
    }                                                                                                             \
    MPISPEED_KERNEL(token_gather_##bytes##_i64)                                                                   \
    extern "C" __global__ void __launch_bounds__(256) token_merge_##bytes(                                        \
        Unit##bytes* out, const Unit##bytes* y, const Unit##bytes* into, const long long* sources,                \
        const TokenGrid grid) {                                                                                   \
        merge(out, y, into, sources, grid);                                                                       \
    }                                                                                                             \
    MPISPEED_KERNEL(token_merge_##bytes)

UNIT_KERNELS(16)
UNIT_KERNELS(8)
UNIT_KERNELS(4)
UNIT_KERNELS(2)
UNIT_KERNELS(1)

extern "C" __global__ void __launch_bounds__(256)
    token_sources_i32(long long* sources, const int* index, const TokenGrid grid) {
    find_sources(sources, index, grid);
}
MPISPEED_KERNEL(token_sources_i32)

extern "C" __global__ void __launch_bounds__(256)
    token_sources_i64(long long* sources, const long long* index, const TokenGrid grid) {
    find_sources(sources, index, grid);
}
MPISPEED_KERNEL(token_sources_i64)
