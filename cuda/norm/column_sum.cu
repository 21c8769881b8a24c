// The last step of sums over rows: rows of partial sums in fp32 are added up, in a fixed order, and rounded
// once.
//
// Grid: x counts groups of 32 columns, y the matrices (up to two of the same shape, one after the other).
// Blocks of 32 x 32 threads.
#include "mpispeed_cuda.cuh"

using namespace mpispeed;

template <class T>
__device__ __forceinline__ void column_sum(T* first, T* second, const float* partial, u64 rows, u64 cols) {
    __shared__ float tile[32][33];
    const u64 col = static_cast<u64>(blockIdx.x) * 32 + threadIdx.x;
    const float* from = partial + blockIdx.y * rows * cols;
    float sum = 0;
    if (col < cols) {
#pragma unroll 4
        for (u64 row = threadIdx.y; row < rows; row += 32) sum += from[row * cols + col];
    }
    tile[threadIdx.x][threadIdx.y] = sum;
    __syncthreads();
    sum = warp_reduce(tile[threadIdx.y][threadIdx.x], Sum());
    const u64 mine = static_cast<u64>(blockIdx.x) * 32 + threadIdx.y;
    if (threadIdx.x == 0 && mine < cols) store(sum, (blockIdx.y ? second : first) + mine);
}

#define COLUMN_SUM(name, T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024)                                                      \
        name(T* first, T* second, const float* partial, unsigned long long rows, unsigned long long cols) { \
        column_sum<T>(first, second, partial, rows, cols);                                                  \
    }                                                                                                       \
    MPISPEED_KERNEL_SYNC(name)

COLUMN_SUM(column_sum_f32, float)
COLUMN_SUM(column_sum_bf16, bf16)
COLUMN_SUM(column_sum_fp16, fp16)
