/* Runs of floats of any width to and from fp32 in cache. */
#ifndef MPISPEED_TILES_H
#define MPISPEED_TILES_H

#include "halves.h"

enum { MPS_FLOAT32 = 1, MPS_BFLOAT16 = 2, MPS_FLOAT16 = 3 };

MPS_INLINE void mps_read_tile(float *v, const void *x, int kind, size_t at, size_t n) {
    if (kind == MPS_FLOAT32) {
        memcpy(v, (const float *)x + at, n * sizeof *v);
    } else if (kind == MPS_BFLOAT16) {
        const uint16_t *h = (const uint16_t *)x + at;
        MPS_SIMD for (size_t j = 0; j < n; j++) v[j] = mps_load_bf16(h[j]);
    } else {
        const uint16_t *h = (const uint16_t *)x + at;
        MPS_SIMD for (size_t j = 0; j < n; j++) v[j] = mps_load_f16(h[j]);
    }
}

MPS_INLINE void mps_write_tile(void *out, int kind, size_t at, const float *v, size_t n, float scale) {
    if (kind == MPS_FLOAT32) {
        float *f = (float *)out + at;
        MPS_SIMD for (size_t j = 0; j < n; j++) f[j] = v[j] * scale;
    } else if (kind == MPS_BFLOAT16) {
        uint16_t *h = (uint16_t *)out + at;
        MPS_SIMD for (size_t j = 0; j < n; j++) h[j] = mps_store_bf16(v[j] * scale);
    } else {
        uint16_t *h = (uint16_t *)out + at;
        MPS_SIMD for (size_t j = 0; j < n; j++) h[j] = mps_store_f16(v[j] * scale);
    }
}

#endif
