/* Compiler switches shared by the loops.
 *
 * MPS_CLONES compiles one function for several x86-64 levels and picks one when the module is loaded.
 * The bits are the same at every level, because contraction is off and no sum is reassociated. */
#ifndef MPISPEED_CLONES_H
#define MPISPEED_CLONES_H

#include <features.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(MPISPEED_NO_CLONES) || !defined(__x86_64__) || !defined(__GLIBC__) || !defined(__GNUC__) || defined(__clang__)
#define MPS_CLONES
#elif __GNUC__ >= 12
#define MPS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MPS_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

#define MPS_INLINE static inline __attribute__((always_inline))
#define MPS_SIMD _Pragma("omp simd")

/* Prefetching beyond the end of a buffer is harmless: a prefetch never faults. */
#define MPS_PREFETCH_READ(address) __builtin_prefetch((const void *)(address), 0, 3)
#define MPS_PREFETCH_WRITE(address) __builtin_prefetch((const void *)(address), 1, 3)
#define MPS_AHEAD 512 /* elements */
#define MPS_STRIP 64  /* elements between two prefetches */

#endif
