/* Products of coded weights at one x86-64 level: included once for each, see levels.h. No guard. */

/* Sixteen signed bytes as integers. GCC spreads a conversion by four to single elements; by two, twice, it does not. */
#undef MPS_WIDEN
#ifdef MPS_WIDE_REGISTERS
#define MPS_WIDEN(to, from) to = (mps_int_lanes)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from)))
#else
#define MPS_WIDEN(to, from)                                                                                            \
    do {                                                                                                               \
        mps_byte_lanes byte_;                                                                                          \
        memcpy(&byte_, from, sizeof byte_);                                                                            \
        to = __builtin_convertvector(__builtin_convertvector(byte_, mps_short_lanes), mps_int_lanes);                  \
    } while (0)
#endif

/* `MANY` rows of x, from row `from`, times rows [first, last) of the weight; `spare` has room for the codes of one. */
#define MPS_DEFINE_DOT(NAME, BITS, MANY)                                                                               \
    MPS_TARGET static void MPS_AT(NAME)(const mps_product *p, const mps_row *row, const mps_arranged *a, size_t from,  \
                                        size_t first, size_t last, char *spare) {                                      \
        const mps_weight *w = &p->weight;                                                                              \
        const char *end = (const char *)w->codes + w->rows * row->bytes;                                               \
        const float *x = a->x + from * row->lanes, *sums = a->sums + from * row->sums;                                 \
        for (size_t r = first; r < last; r++) {                                                                        \
            const char *q = (const char *)w->codes + r * row->bytes;                                                   \
            const float *scale = w->scales + r * row->groups, *y = x;                                                  \
            mps_float_lanes sum[MANY] = {{0}};                                                                         \
            if ((size_t)(end - q) < row->bytes + MPS_LANE) q = (const char *)memcpy(spare, q, row->bytes);             \
            for (size_t g = 0; g < row->groups; g++, q += row->group_bytes) {                                          \
                size_t steps = g + 1 < row->groups ? row->steps : row->last_steps;                                     \
                for (size_t begin = 0; begin < steps; begin += MPS_RUN) {                                              \
                    size_t stop = steps - begin < MPS_RUN ? steps : begin + MPS_RUN;                                   \
                    mps_float_lanes part[MANY] = {{0}};                                                                \
                    for (size_t j = begin; j < stop; j += 8 / BITS, y += MPS_LANE * 8 / BITS) {                        \
                        mps_int_lanes code;                                                                            \
                        const char *at = q + MPS_LANE * BITS / 8 * j;                                                  \
                        MPS_PREFETCH_READ(at + MPS_CODES_AHEAD);                                                       \
                        MPS_WIDEN(code, at);                                                                           \
                        MPS_STEP##BITS(part, code, y, row->lanes, MANY);                                               \
                    }                                                                                                  \
                    for (int m = 0; m < MANY; m++) sum[m] += scale[g] * part[m];                                       \
                }                                                                                                      \
            }                                                                                                          \
            if (w->offsets) mps_add_offsets((float *)sum, w->offsets + r * row->groups, sums, row, MANY);              \
            for (int m = 0; m < MANY; m++) mps_put(p, from + (size_t)m, r, mps_join((const float *)&sum[m]));          \
        }                                                                                                              \
    }

MPS_DEFINE_DOT(dot8_1, 8, 1)
MPS_DEFINE_DOT(dot8_2, 8, 2)
MPS_DEFINE_DOT(dot8_4, 8, 4)
MPS_DEFINE_DOT(dot4_1, 4, 1)
MPS_DEFINE_DOT(dot4_2, 4, 2)
MPS_DEFINE_DOT(dot4_4, 4, 4)

static const mps_dot MPS_AT(dots)[2][3] = {
    {MPS_AT(dot8_1), MPS_AT(dot8_2), MPS_AT(dot8_4)},
    {MPS_AT(dot4_1), MPS_AT(dot4_2), MPS_AT(dot4_4)},
};
#undef MPS_DEFINE_DOT
