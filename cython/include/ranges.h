/* Cutting a flat range for threads. */
#ifndef MPISPEED_RANGES_H
#define MPISPEED_RANGES_H

#include "clones.h"

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#define MPS_GRAIN 1024         /* elements: no two threads share a cache line */
#define MPS_THREAD_GRAINS 16   /* a thread is not worth waking for less */

typedef struct {
    size_t begin, end;
} mps_range;

/* Part `index` of `parts` of [0, n), cut at multiples of `grain`. */
static inline mps_range mps_cut(size_t n, size_t grain, int parts, int index) {
    size_t grains = n / grain + (n % grain != 0);
    mps_range range = {grains * (size_t)index / (size_t)parts * grain, grains * ((size_t)index + 1) / (size_t)parts * grain};
    if (range.end > n) range.end = n;
    if (range.begin > n) range.begin = n;
    return range;
}

/* How many of `threads` have enough work; 1 means: stay out of OpenMP, which does not survive a fork. */
static inline int mps_useful_threads(size_t n, int threads) {
    size_t most = n / ((size_t)MPS_GRAIN * MPS_THREAD_GRAINS) + 1;
    if (threads < 1) return 1;
    return (size_t)threads < most ? threads : (int)most;
}

/* Pool threads may have another flush-to-zero mode than the caller; results must not depend on that. */
static inline unsigned mps_float_mode(void) {
#ifdef __x86_64__
    return _mm_getcsr();
#else
    return 0;
#endif
}

static inline void mps_set_float_mode(unsigned mode) {
#ifdef __x86_64__
    _mm_setcsr(mode);
#else
    (void)mode;
#endif
}

#define MPS_PRAGMA(...) _Pragma(#__VA_ARGS__)

/* The statement once for each part k of `used`, on a thread each, in the caller's mode. */
#define MPS_ON_THREADS(used, k, ...)                                                                                   \
    do {                                                                                                               \
        unsigned mps_mode = mps_float_mode();                                                                          \
        MPS_PRAGMA(omp parallel for num_threads(used) schedule(static, 1))                                             \
        for (int k = 0; k < (used); k++) {                                                                             \
            unsigned mps_before = mps_float_mode();                                                                    \
            mps_set_float_mode(mps_mode);                                                                              \
            __VA_ARGS__;                                                                                               \
            mps_set_float_mode(mps_before);                                                                            \
        }                                                                                                              \
    } while (0)

#endif
