/* One source compiled for several x86-64 levels, with the level chosen at run time.
 *
 * A header with loops is included once for each level; it marks its functions MPS_TARGET and names them
 * MPS_AT(name). Unlike target clones, a level below that of the processor can be chosen, so that a test
 * sees every variant. The bits are the same at every level: contraction is off, no sum is reassociated. */
#ifndef MPISPEED_LEVELS_H
#define MPISPEED_LEVELS_H

#include "clones.h"

#define MPS_JOIN_(name, suffix) name##_##suffix
#define MPS_JOIN(name, suffix) MPS_JOIN_(name, suffix)
#define MPS_AT(name) MPS_JOIN(name, MPS_SUFFIX)

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MPS_HAS_LEVELS 1
#if __GNUC__ >= 12
#define MPS_TARGET_V4 __attribute__((target("arch=x86-64-v4")))
#define MPS_TARGET_V3 __attribute__((target("arch=x86-64-v3")))
#define MPS_SUPPORTS_V4() __builtin_cpu_supports("x86-64-v4")
#define MPS_SUPPORTS_V3() __builtin_cpu_supports("x86-64-v3")
#else
#define MPS_TARGET_V4 __attribute__((target("avx512f")))
#define MPS_TARGET_V3 __attribute__((target("avx2")))
#define MPS_SUPPORTS_V4() __builtin_cpu_supports("avx512f")
#define MPS_SUPPORTS_V3() __builtin_cpu_supports("avx2")
#endif
#else
#define MPS_HAS_LEVELS 0
#endif

/* 4: AVX-512, 3: AVX2, 1: plain (also on other processors). */
static inline int mps_best_level(void) {
#if MPS_HAS_LEVELS
    return MPS_SUPPORTS_V4() ? 4 : MPS_SUPPORTS_V3() ? 3 : 1;
#else
    return 1;
#endif
}

static int mps_forced_level = 0;

static inline int mps_level(void) { return mps_forced_level ? mps_forced_level : mps_best_level(); }

/* Returns 0, or -1 when this processor or this build has no such level. */
static inline int mps_force_level(int level) {
    if (!(level == 1 || level == 3 || level == 4) || level > mps_best_level()) return -1;
    mps_forced_level = level;
    return 0;
}

#endif
