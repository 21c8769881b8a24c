/* Random bits of runs for one level of vector instructions, which gives MPS_DRAW_LANES and MPS_DRAW_TIMES: products of
 * the low words of 64-bit lanes. A word is the low half of a lane; what is above it is never read. */

typedef uint64_t MPS_AT(mps_draw_lanes) __attribute__((vector_size(8 * MPS_DRAW_LANES)));
typedef uint16_t MPS_AT(mps_draw_halves) __attribute__((vector_size(2 * MPS_DRAW_LANES)));

#define MPS_PUT_HALVES(place, lanes)                                                                                   \
    do {                                                                                                               \
        MPS_AT(mps_draw_halves) low_ = __builtin_convertvector(lanes, MPS_AT(mps_draw_halves));                        \
        MPS_AT(mps_draw_halves) high_ = __builtin_convertvector((lanes) >> 16, MPS_AT(mps_draw_halves));               \
        memcpy(u + (place), &low_, sizeof low_);                                                                       \
        memcpy(u + (place) + 16, &high_, sizeof high_);                                                                \
    } while (0)

MPS_TARGET static void MPS_AT(mps_draw_runs)(uint16_t *u, const mps_state_job *job, uint64_t run, size_t runs) {
    typedef MPS_AT(mps_draw_lanes) lanes;
    for (size_t r = 0; r < runs; r++, run++, u += MPS_DRAW_RUN) {
        lanes c0[16 / MPS_DRAW_LANES], c1[16 / MPS_DRAW_LANES], c2[16 / MPS_DRAW_LANES], c3[16 / MPS_DRAW_LANES];
        const lanes none = {0}, factor0 = none + 0xD2511F53u, factor1 = none + 0xCD9E8D57u;
        uint64_t counters[16];
        uint32_t key0 = (uint32_t)job->seed, key1 = (uint32_t)(job->seed >> 32);
        for (uint32_t j = 0; j < 16; j++) counters[j] = (uint32_t)(run << 4) + j;
        memcpy(c0, counters, sizeof c0);
        for (int i = 0; i < 16 / MPS_DRAW_LANES; i++) {
            c1[i] = none + (run >> 28);
            c2[i] = none + (uint32_t)job->step;
            c3[i] = none + (job->step >> 32);
        }
        for (int round = 0; round < 10; round++) {
            const lanes k0 = none + key0, k1 = none + key1;
            for (int i = 0; i < 16 / MPS_DRAW_LANES; i++) {
                lanes a = MPS_DRAW_TIMES(factor0, c0[i]), b = MPS_DRAW_TIMES(factor1, c2[i]);
                c0[i] = (b >> 32) ^ c1[i] ^ k0;
                c2[i] = (a >> 32) ^ c3[i] ^ k1;
                c1[i] = b;
                c3[i] = a;
            }
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
        for (int i = 0; i < 16 / MPS_DRAW_LANES; i++) {
            MPS_PUT_HALVES(i * MPS_DRAW_LANES, c0[i]);
            MPS_PUT_HALVES(32 + i * MPS_DRAW_LANES, c1[i]);
            MPS_PUT_HALVES(64 + i * MPS_DRAW_LANES, c2[i]);
            MPS_PUT_HALVES(96 + i * MPS_DRAW_LANES, c3[i]);
        }
    }
}
#undef MPS_PUT_HALVES
