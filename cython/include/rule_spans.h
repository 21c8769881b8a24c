/* The loops of the update rules at one x86-64 level: included once for each, see levels.h. No guard. */

#define MPS_DEFINE_SPAN(NAME, ONE, MODE, STATES)                                                                       \
    MPS_TARGET static void MPS_AT(NAME)(float *p, float *a, float *b, float *c, const float *g, size_t n,              \
                                        const mps_terms *terms) {                                                      \
        const mps_terms t = *terms;                                                                                    \
        size_t i = 0;                                                                                                  \
        for (; i + MPS_STRIP <= n; i += MPS_STRIP) {                                                                   \
            for (size_t q = i + MPS_AHEAD; q < i + MPS_AHEAD + MPS_STRIP; q += 16) {                                   \
                MPS_PREFETCH_WRITE(p + q);                                                                             \
                MPS_PREFETCH_WRITE(a + q);                                                                             \
                if (STATES > 1) MPS_PREFETCH_WRITE(b + q);                                                             \
                if (STATES > 2) MPS_PREFETCH_READ(c + q);                                                              \
                MPS_PREFETCH_READ(g + q);                                                                              \
            }                                                                                                          \
            MPS_SIMD for (size_t j = i; j < i + MPS_STRIP; j++) ONE(p + j, a + j, b + j, c + j, g[j], &t, MODE);       \
        }                                                                                                              \
        MPS_SIMD for (size_t j = i; j < n; j++) ONE(p + j, a + j, b + j, c + j, g[j], &t, MODE);                       \
    }

MPS_DEFINE_SPAN(adam_none, mps_adam_one, MPS_DECAY_NONE, 2)
MPS_DEFINE_SPAN(adam_decoupled, mps_adam_one, MPS_DECAY_DECOUPLED, 2)
MPS_DEFINE_SPAN(adam_l2, mps_adam_one, MPS_DECAY_L2, 2)
MPS_DEFINE_SPAN(adagrad_none, mps_adagrad_one, MPS_DECAY_NONE, 1)
MPS_DEFINE_SPAN(adagrad_decoupled, mps_adagrad_one, MPS_DECAY_DECOUPLED, 1)
MPS_DEFINE_SPAN(adagrad_l2, mps_adagrad_one, MPS_DECAY_L2, 1)
MPS_DEFINE_SPAN(lion_none, mps_lion_one, MPS_DECAY_NONE, 1)
MPS_DEFINE_SPAN(lion_decoupled, mps_lion_one, MPS_DECAY_DECOUPLED, 1)
MPS_DEFINE_SPAN(lion_l2, mps_lion_one, MPS_DECAY_L2, 1)
MPS_DEFINE_SPAN(lamb_moments, mps_lamb_moments, MPS_DECAY_NONE, 2)
MPS_DEFINE_SPAN(lamb_moments_l2, mps_lamb_moments, MPS_DECAY_L2, 2)
MPS_DEFINE_SPAN(onebit_none, mps_onebit_adam_one, MPS_DECAY_NONE, 1)
MPS_DEFINE_SPAN(onebit_decoupled, mps_onebit_adam_one, MPS_DECAY_DECOUPLED, 1)
MPS_DEFINE_SPAN(coded_none, mps_zero_one_coded_one, MPS_DECAY_NONE, 2)
MPS_DEFINE_SPAN(coded_decoupled, mps_zero_one_coded_one, MPS_DECAY_DECOUPLED, 2)
MPS_DEFINE_SPAN(local_none, mps_zero_one_local_one, MPS_DECAY_NONE, 3)
MPS_DEFINE_SPAN(local_decoupled, mps_zero_one_local_one, MPS_DECAY_DECOUPLED, 3)
MPS_DEFINE_SPAN(drift, mps_zero_one_drift_one, MPS_DECAY_NONE, 1)
MPS_DEFINE_SPAN(settle, mps_zero_one_settle_one, MPS_DECAY_NONE, 3)

#define MPS_LAMB_DIRECTIONS(q)                                                                                         \
    if (t.is_eps_inside && t.decay_mode == MPS_DECAY_DECOUPLED) MPS_FILL(q, MPS_DECAY_DECOUPLED, 1)                    \
    else if (t.is_eps_inside) MPS_FILL(q, MPS_DECAY_NONE, 1)                                                           \
    else if (t.decay_mode == MPS_DECAY_DECOUPLED) MPS_FILL(q, MPS_DECAY_DECOUPLED, 0)                                  \
    else MPS_FILL(q, MPS_DECAY_NONE, 0)
#define MPS_FILL(q, MODE, INSIDE)                                                                                      \
    { MPS_SIMD for (size_t j = 0; j < n; j++) q[j] = mps_lamb_direction(p[j], m[j], v[j], &t, MODE, INSIDE); }

/* Sum of squares of at most one tile: sixteen fp64 lanes, joined in a fixed order. */
MPS_TARGET static double MPS_AT(squares)(const float *x, size_t n) {
    mps_double8 low = {0}, high = {0};
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        mps_double8 y, z;
        for (int j = 0; j < 8; j++) y[j] = x[i + j];
        for (int j = 0; j < 8; j++) z[j] = x[i + 8 + j];
        low += y * y;
        high += z * z;
    }
    double lanes[16];
    for (int j = 0; j < 8; j++) lanes[j] = low[j];
    for (int j = 0; j < 8; j++) lanes[8 + j] = high[j];
    for (size_t j = 0; i + j < n; j++) lanes[j] += (double)x[i + j] * (double)x[i + j];
    for (int width = 8; width; width /= 2)
        for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
    return lanes[0];
}

/* Sums of squares of the parameter and of the direction over at most one tile. */
MPS_TARGET static void MPS_AT(lamb_sums)(const float *p, const float *m, const float *v, size_t n,
                                         const mps_terms *terms, double *sums) {
    const mps_terms t = *terms;
    float q[MPS_TILE];
    MPS_LAMB_DIRECTIONS(q)
    sums[0] = MPS_AT(squares)(p, n);
    sums[1] = MPS_AT(squares)(q, n);
}

MPS_TARGET static void MPS_AT(lamb_apply)(float *p, const float *m, const float *v, size_t n, const mps_terms *terms,
                                          float factor) {
    const mps_terms t = *terms;
    float q[MPS_TILE];
    MPS_LAMB_DIRECTIONS(q)
    MPS_SIMD for (size_t j = 0; j < n; j++) p[j] = p[j] - factor * q[j];
}

MPS_TARGET static void MPS_AT(load)(float *to, const void *from, int kind, size_t at, size_t n) {
    if (kind == MPS_F32) {
        memcpy(to, (const float *)from + at, n * sizeof *to);
    } else if (kind == MPS_BF16) {
        const uint16_t *h = (const uint16_t *)from + at;
        MPS_SIMD for (size_t j = 0; j < n; j++) to[j] = mps_load_bf16(h[j]);
    } else {
        const uint16_t *h = (const uint16_t *)from + at;
        MPS_SIMD for (size_t j = 0; j < n; j++) to[j] = mps_load_f16(h[j]);
    }
}

MPS_TARGET static void MPS_AT(store)(void *to, const float *from, int kind, size_t at, size_t n) {
    if (kind == MPS_F32) {
        memcpy((float *)to + at, from, n * sizeof *from);
    } else if (kind == MPS_BF16) {
        uint16_t *h = (uint16_t *)to + at;
        MPS_SIMD for (size_t j = 0; j < n; j++) h[j] = mps_store_bf16(from[j]);
    } else {
        uint16_t *h = (uint16_t *)to + at;
        MPS_SIMD for (size_t j = 0; j < n; j++) h[j] = mps_store_f16(from[j]);
    }
}

static const mps_loops MPS_AT(mps_loops) = {
    .span = {{MPS_AT(adam_none), MPS_AT(adam_decoupled), MPS_AT(adam_l2)},
             {MPS_AT(adagrad_none), MPS_AT(adagrad_decoupled), MPS_AT(adagrad_l2)},
             {MPS_AT(lion_none), MPS_AT(lion_decoupled), MPS_AT(lion_l2)},
             {MPS_AT(lamb_moments), MPS_AT(lamb_moments), MPS_AT(lamb_moments_l2)},
             {MPS_AT(onebit_none), MPS_AT(onebit_decoupled), NULL},
             {MPS_AT(coded_none), MPS_AT(coded_decoupled), NULL},
             {MPS_AT(local_none), MPS_AT(local_decoupled), NULL},
             {MPS_AT(drift), MPS_AT(drift), NULL},
             {MPS_AT(settle), MPS_AT(settle), NULL}},
    .lamb_sums = MPS_AT(lamb_sums),
    .lamb_apply = MPS_AT(lamb_apply),
    .load = MPS_AT(load),
    .store = MPS_AT(store),
};

#undef MPS_DEFINE_SPAN
#undef MPS_LAMB_DIRECTIONS
#undef MPS_FILL
