/* Update rules for one element, in fp32: Adam, Adagrad, Lion, the two halves of LAMB, 1-bit Adam and 0/1 Adam.
 *
 * Every operation rounds once, in the order written here, which the torch twins repeat. Every function has the
 * same arguments: parameter, up to three states, gradient, terms. */
#ifndef MPISPEED_RULES_H
#define MPISPEED_RULES_H

#include <math.h>

#include "clones.h"

enum {
    MPS_RULE_ADAM = 0,
    MPS_RULE_ADAGRAD = 1,
    MPS_RULE_LION = 2,
    MPS_RULE_LAMB = 3,
    MPS_RULE_ONEBIT_ADAM = 4,
    MPS_RULE_ZERO_ONE_CODED = 5,
    MPS_RULE_ZERO_ONE_LOCAL = 6,
    MPS_RULE_ZERO_ONE_DRIFT = 7,
    MPS_RULE_ZERO_ONE_SETTLE = 8,
    MPS_RULES = 9
};
enum { MPS_DECAY_NONE = 0, MPS_DECAY_DECOUPLED = 1, MPS_DECAY_L2 = 2, MPS_DECAYS = 3 };

typedef struct {
    float beta1, rest1;  /* beta1, 1 - beta1 */
    float beta2, rest2;  /* beta2, 1 - beta2 */
    float step_size;     /* factor of the direction */
    float root_scale;    /* Adam: 1 / sqrt(1 - beta2^t); 0/1 Adam: sum of learning rates */
    float eps;
    float decay;         /* decoupled: lr * weight_decay; else weight_decay */
    float grad_scale;
    int decay_mode;
    int is_eps_inside;   /* LAMB: sqrt(v + eps) */
    double full_step;    /* LAMB: step_size before rounding, multiplied by the trust ratio */
    double least, most;  /* LAMB: limits of the trust ratio */
} mps_terms;

#define MPS_ELEMENT(NAME)                                                                                              \
    MPS_INLINE void NAME(float *p, float *a, float *b, float *c, float g, const mps_terms *t, const int mode)

/* p - (lr wd) p, not p (1 - lr wd): rounding 1 - lr wd to fp32 would bias a small decay by several per cent. */
MPS_ELEMENT(mps_adam_one) {
    float p0 = *p;
    (void)c;
    g = g * t->grad_scale;
    if (mode == MPS_DECAY_L2) g = g + t->decay * p0;
    float m = t->beta1 * *a + t->rest1 * g;
    float v = t->beta2 * *b + t->rest2 * g * g;
    float d = sqrtf(v) * t->root_scale + t->eps;
    *a = m;
    *b = v;
    if (mode == MPS_DECAY_DECOUPLED) p0 = p0 - t->decay * p0;
    *p = p0 - t->step_size * (m / d);
}

MPS_ELEMENT(mps_adagrad_one) {
    float p0 = *p;
    (void)b, (void)c;
    g = g * t->grad_scale;
    if (mode == MPS_DECAY_L2) g = g + t->decay * p0;
    float s = *a + g * g;
    *a = s;
    if (mode == MPS_DECAY_DECOUPLED) p0 = p0 - t->decay * p0;
    *p = p0 - t->step_size * (g / (sqrtf(s) + t->eps));
}

/* The sign of 0 is 0, that of NaN is NaN. */
MPS_ELEMENT(mps_lion_one) {
    float p0 = *p, m = *a;
    (void)b, (void)c;
    g = g * t->grad_scale;
    if (mode == MPS_DECAY_L2) g = g + t->decay * p0;
    float u = t->beta1 * m + t->rest1 * g;
    float sign = u > 0.0f ? 1.0f : u;
    sign = u < 0.0f ? -1.0f : sign;
    *a = t->beta2 * m + t->rest2 * g;
    if (mode == MPS_DECAY_DECOUPLED) p0 = p0 - t->decay * p0;
    *p = p0 - t->step_size * sign;
}

MPS_ELEMENT(mps_lamb_moments) {
    (void)c;
    g = g * t->grad_scale;
    if (mode == MPS_DECAY_L2) g = g + t->decay * *p;
    *a = t->beta1 * *a + t->rest1 * g;
    *b = t->beta2 * *b + t->rest2 * g * g;
}

/* Decoupled decay is part of the direction, so that the trust ratio sees it. */
MPS_INLINE float mps_lamb_direction(float p, float m, float v, const mps_terms *t, const int mode, const int inside) {
    float d = inside ? sqrtf(v + t->eps) : sqrtf(v) + t->eps;
    float q = m / d;
    return mode == MPS_DECAY_DECOUPLED ? q + t->decay * p : q;
}

/* m / (sqrt(v) + eps), and 0 where v is 0: no gradient was seen there, and m can only be noise of the coding. */
MPS_INLINE float mps_quotient(float m, float v, const mps_terms *t) {
    float q = m / (sqrtf(v) + t->eps);
    return v == 0.0f ? 0.0f : q;
}

/* State: the agreed momentum; in the place of the gradient: the variance, only read. */
MPS_ELEMENT(mps_onebit_adam_one) {
    float p0 = *p, q = mps_quotient(*a, g, t);
    (void)b, (void)c;
    *a = g == 0.0f ? 0.0f : *a;
    if (mode == MPS_DECAY_DECOUPLED) p0 = p0 - t->decay * p0;
    *p = p0 - t->step_size * q;
}

/* Adam with a variance that is only read. */
MPS_ELEMENT(mps_zero_one_coded_one) {
    float p0 = *p, v = *b;
    (void)c;
    g = g * t->grad_scale;
    float m = t->beta1 * *a + t->rest1 * g;
    m = v == 0.0f ? 0.0f : m;
    *a = m;
    if (mode == MPS_DECAY_DECOUPLED) p0 = p0 - t->decay * p0;
    *p = p0 - t->step_size * mps_quotient(m, v, t);
}

/* States: momentum, drift since the common parameter, variance (read). *p becomes the local parameter. */
MPS_ELEMENT(mps_zero_one_local_one) {
    float u = *b, v = *c;
    g = g * t->grad_scale;
    float m = t->beta1 * *a + t->rest1 * g;
    m = v == 0.0f ? 0.0f : m;
    *a = m;
    if (mode == MPS_DECAY_DECOUPLED) u = u - t->decay * (*p + u);
    u = u - t->step_size * mps_quotient(m, v, t);
    *b = u;
    *p = *p + u;
}

/* Parameter: the buffer to fill. State: drift, only read; in the place of the gradient: the variance. */
MPS_ELEMENT(mps_zero_one_drift_one) {
    float x = *a * (sqrtf(g) + t->eps);
    (void)b, (void)c, (void)mode;
    *p = g == 0.0f ? 0.0f : x;
}

/* States as for the local update; in the place of the gradient: what ranks agreed on. Where the variance is 0 the
 * drift is decay alone, the same on all ranks. */
MPS_ELEMENT(mps_zero_one_settle_one) {
    float u = *b, v = *c;
    (void)mode;
    float moved = g / (sqrtf(v) + t->eps);
    moved = v == 0.0f ? u : moved;
    float m = -g / t->root_scale;
    *a = v == 0.0f ? 0.0f : m;
    *b = 0.0f;
    *p = *p + moved;
}

#endif
