/* Rows of a matrix picked, spread and summed by index, as for tokens on their way to experts and back.
 *
 * Rows are worked on in tiles that stay in cache, in fp32 (fp64 for fp64), choice after choice in the order of
 * the index: the bits depend neither on threads nor on the vector width. Matrices that do not stay in cache are
 * written past it, or their memory would be read first. */
#ifndef MPISPEED_ROW_LOOPS_H
#define MPISPEED_ROW_LOOPS_H

#include "exact.h"
#include "halves.h"
#include "ranges.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { MPS_DO_PICK, MPS_DO_COMBINE, MPS_DO_SPREAD, MPS_DO_DOT, MPS_DO_MERGE };

#define MPS_WRITE_TILE 512u            /* elements */
#define MPS_READ_BYTES 256u            /* of a tile whose successor is asked for: more at once would wait for memory */
#define MPS_READ_TILE(T) (MPS_READ_BYTES / sizeof(T)) /* elements, a multiple of the lanes */
#define MPS_ROW_CACHED (1u << 21)      /* bytes: a matrix of as many or more is written past the cache */
#define MPS_LINE 64u                   /* bytes */

/* Token t chooses the rows index[t * choices + j]; -1 is none. Matrices have `width` elements in a row. */
typedef struct {
    int what, kind;          /* 1 fp32, 2 bf16, 3 fp16, 4 fp64; pick and merge know bytes only */
    void *out;               /* pick, combine, merge: [tokens, width]; spread: [rows, width]; dot: [tokens, choices] */
    const void *x, *y;       /* x: the rows, or what is spread to them; y: the other factor of dot, the rest of merge */
    const int64_t *index;
    const void *weights;     /* fp32 (fp64 for fp64) [tokens, choices]; NULL: ones */
    const uint8_t *named;    /* spread: [rows], 0 where a row becomes zero; NULL: nowhere */
    size_t tokens, choices, rows, width, element; /* element: bytes */
} mps_row_job;

/* The first place of `index` that names none of `rows` rows, or a row that an earlier place has named; -1: none does.
 * `named` [rows], zeros before, becomes 1 for rows that are named; NULL: rows may be named often. */
static ptrdiff_t mps_wrong_place(const int64_t *index, size_t n, size_t rows, int may_drop, uint8_t *named) {
    const int64_t least = may_drop ? -1 : 0;
    int is_wrong = 0;
    if (!named) {
        for (size_t i = 0; i < n; i++) is_wrong |= (index[i] < least) | (index[i] >= (int64_t)rows);
        if (!is_wrong) return -1;
    }
    for (size_t i = 0; i < n; i++) {
        int64_t row = index[i];
        if (row < least || row >= (int64_t)rows) return (ptrdiff_t)i;
        if (!named || row < 0) continue;
        if (named[row]) return (ptrdiff_t)i;
        named[row] = 1;
    }
    return -1;
}

/* -- to memory ---------------------------------------------------------------------------------------------------- */

/* Whether rows are written past the cache: they are whole lines then. */
static inline int mps_is_past_cache(const mps_row_job *job, size_t rows) {
#ifdef __SSE2__
    size_t bytes = job->width * job->element;
    return bytes % MPS_LINE == 0 && (uintptr_t)job->out % MPS_LINE == 0 && rows * bytes >= MPS_ROW_CACHED;
#else
    (void)job, (void)rows;
    return 0;
#endif
}

MPS_INLINE void mps_put(void *to, const void *from, size_t bytes, int is_past_cache) {
#ifdef __SSE2__
    if (is_past_cache) {
        const __m128i *source = (const __m128i *)from;
        __m128i *target = (__m128i *)to;
        for (size_t i = 0; i < bytes / sizeof *target; i += 4) {
            __m128i a = _mm_loadu_si128(source + i), b = _mm_loadu_si128(source + i + 1);
            __m128i c = _mm_loadu_si128(source + i + 2), d = _mm_loadu_si128(source + i + 3);
            _mm_stream_si128(target + i, a);
            _mm_stream_si128(target + i + 1, b);
            _mm_stream_si128(target + i + 2, c);
            _mm_stream_si128(target + i + 3, d);
        }
        return;
    }
#endif
    (void)is_past_cache;
    memcpy(to, from, bytes);
}

static inline void mps_put_end(int is_past_cache) {
#ifdef __SSE2__
    if (is_past_cache) _mm_sfence();
#endif
    (void)is_past_cache;
}

/* Ask for a tile, from byte `at` on, of the row that is chosen in `place`: the processor does not guess where it is. */
MPS_INLINE void mps_expect(const mps_row_job *job, size_t place, size_t places, size_t at) {
    if (place >= places || job->index[place] < 0) return;
    const char *tile = (const char *)job->x + (size_t)job->index[place] * job->width * job->element + at;
    for (size_t byte = 0; byte < MPS_READ_BYTES; byte += MPS_LINE) MPS_PREFETCH_READ(tile + byte);
}

/* Length of the tile that begins at `at`. */
MPS_INLINE size_t mps_tile(size_t all, size_t at, size_t tile) { return all - at < tile ? all - at : tile; }

/* -- passes over a range of tokens -------------------------------------------------------------------------------- */

static void mps_pick_range(const mps_row_job *job, size_t begin, size_t end) {
    size_t bytes = job->width * job->element;
    int is_past_cache = mps_is_past_cache(job, job->tokens);
    for (size_t t = begin; t < end; t++) {
        char *to = (char *)job->out + t * bytes;
        const char *from = (const char *)job->x + (size_t)job->index[t] * bytes;
        for (size_t at = 0; at < bytes; at += MPS_READ_BYTES) {
            mps_expect(job, t + 1, end, at);
            mps_put(to + at, from + at, mps_tile(bytes, at, MPS_READ_BYTES), is_past_cache);
        }
    }
    mps_put_end(is_past_cache);
}

/* A row of x where `index` names one, else the own row of y; NULL: zeros. */
static void mps_merge_range(const mps_row_job *job, size_t begin, size_t end) {
    size_t bytes = job->width * job->element;
    int is_past_cache = mps_is_past_cache(job, job->tokens);
    for (size_t t = begin; t < end; t++) {
        int is_put = job->index[t] >= 0;
        const char *matrix = (const char *)(is_put ? job->x : job->y);
        char *to = (char *)job->out + t * bytes;
        if (matrix) mps_put(to, matrix + (is_put ? (size_t)job->index[t] : t) * bytes, bytes, is_past_cache);
        else memset(to, 0, bytes);
    }
    mps_put_end(is_past_cache);
}

MPS_INLINE double mps_wide_f64(double value) { return value; }

/* A finished tile of sums, rounded to the dtype of the matrix. */
#define MPS_DEFINE_PUT(NAME, T, IN, STORE)                                                                             \
    MPS_INLINE void NAME(IN *out, const T *v, size_t n, int is_past_cache) {                                           \
        IN rounded[MPS_WRITE_TILE] __attribute__((aligned(64)));                                                       \
        IN *to = is_past_cache ? rounded : out;                                                                        \
        MPS_SIMD for (size_t i = 0; i < n; i++) to[i] = STORE(v[i]);                                                   \
        if (is_past_cache) mps_put(out, rounded, n * sizeof *out, 1);                                                  \
    }

MPS_INLINE void mps_put_f32(float *out, const float *v, size_t n, int is_past_cache) {
    mps_put(out, v, n * sizeof *out, is_past_cache);
}

MPS_INLINE void mps_put_f64(double *out, const double *v, size_t n, int is_past_cache) {
    mps_put(out, v, n * sizeof *out, is_past_cache);
}

MPS_DEFINE_PUT(mps_put_bf16, float, uint16_t, mps_store_bf16)
MPS_DEFINE_PUT(mps_put_f16, float, uint16_t, mps_store_f16)

/* Sixteen lanes of fp64, as in the sums of squares. */
typedef float mps_float8 __attribute__((vector_size(32)));

#define MPS_DEFINE_LANES(NAME, T, EIGHT)                                                                               \
    MPS_INLINE void NAME(double *lane, const T *x, const T *y, size_t n) {                                             \
        mps_double8 low, high;                                                                                         \
        EIGHT a, b;                                                                                                    \
        size_t i = 0;                                                                                                  \
        memcpy(&low, lane, sizeof low);                                                                                \
        memcpy(&high, lane + 8, sizeof high);                                                                          \
        for (; i + MPS_LANES <= n; i += MPS_LANES) {                                                                   \
            memcpy(&a, x + i, sizeof a);                                                                               \
            memcpy(&b, y + i, sizeof b);                                                                               \
            low += __builtin_convertvector(a, mps_double8) * __builtin_convertvector(b, mps_double8);                  \
            memcpy(&a, x + i + 8, sizeof a);                                                                           \
            memcpy(&b, y + i + 8, sizeof b);                                                                           \
            high += __builtin_convertvector(a, mps_double8) * __builtin_convertvector(b, mps_double8);                 \
        }                                                                                                              \
        memcpy(lane, &low, sizeof low);                                                                                \
        memcpy(lane + 8, &high, sizeof high);                                                                          \
        for (int j = 0; i < n; i++, j++) lane[j] += (double)x[i] * (double)y[i];                                       \
    }

MPS_DEFINE_LANES(mps_lanes_f32, float, mps_float8)
MPS_DEFINE_LANES(mps_lanes_f64, double, mps_double8)

/* A tile in the dtype of sums: where it lies, or widened into `room`. */
#define MPS_IN_PLACE(room, x, n, LOAD) (x)
#define MPS_WIDENED(room, x, n, LOAD)                                                                                  \
    ({                                                                                                                 \
        MPS_SIMD for (size_t i_ = 0; i_ < (n); i_++) (room)[i_] = LOAD((x)[i_]);                                       \
        (room);                                                                                                        \
    })

/* Two choices are added in one pass, in their order; one without a second is added alone. */
#define MPS_DEFINE_ROWS(SUFFIX, T, IN, LOAD, TILE, PUT, LANES)                                                         \
    MPS_INLINE void mps_sum_##SUFFIX(T *sum, const mps_row_job *job, size_t t, size_t at, size_t n) {                  \
        const int64_t *index = job->index + t * job->choices;                                                          \
        const T *weights = job->weights ? (const T *)job->weights + t * job->choices : NULL;                           \
        int is_begun = 0;                                                                                              \
        for (size_t j = 0; j < job->choices; j++) {                                                                    \
            if (index[j] < 0) continue;                                                                                \
            const T u = weights ? weights[j] : (T)1;                                                                   \
            const IN *a = (const IN *)job->x + (size_t)index[j] * job->width + at;                                     \
            do j++; while (j < job->choices && index[j] < 0);                                                          \
            if (j < job->choices) {                                                                                    \
                const T v = weights ? weights[j] : (T)1;                                                               \
                const IN *b = (const IN *)job->x + (size_t)index[j] * job->width + at;                                 \
                if (is_begun)                                                                                          \
                    MPS_SIMD for (size_t i = 0; i < n; i++) sum[i] = (sum[i] + u * LOAD(a[i])) + v * LOAD(b[i]);       \
                else                                                                                                   \
                    MPS_SIMD for (size_t i = 0; i < n; i++) sum[i] = u * LOAD(a[i]) + v * LOAD(b[i]);                  \
            } else if (is_begun) {                                                                                     \
                MPS_SIMD for (size_t i = 0; i < n; i++) sum[i] = sum[i] + u * LOAD(a[i]);                              \
            } else {                                                                                                   \
                MPS_SIMD for (size_t i = 0; i < n; i++) sum[i] = u * LOAD(a[i]);                                       \
            }                                                                                                          \
            is_begun = 1;                                                                                              \
        }                                                                                                              \
        if (!is_begun) memset(sum, 0, n * sizeof *sum);                                                                \
    }                                                                                                                  \
    MPS_CLONES static void mps_combine_##SUFFIX(const mps_row_job *job, size_t begin, size_t end) {                    \
        T sum[MPS_READ_TILE(IN)] __attribute__((aligned(64)));                                                         \
        int is_past_cache = mps_is_past_cache(job, job->tokens);                                                       \
        for (size_t t = begin; t < end; t++) {                                                                         \
            for (size_t at = 0; at < job->width; at += MPS_READ_TILE(IN)) {                                            \
                size_t n = mps_tile(job->width, at, MPS_READ_TILE(IN));                                                \
                for (size_t j = 0; j < job->choices; j++)                                                              \
                    mps_expect(job, (t + 1) * job->choices + j, end * job->choices, at * sizeof(IN));                  \
                mps_sum_##SUFFIX(sum, job, t, at, n);                                                                  \
                PUT((IN *)job->out + t * job->width + at, sum, n, is_past_cache);                                      \
            }                                                                                                          \
        }                                                                                                              \
        mps_put_end(is_past_cache);                                                                                    \
    }                                                                                                                  \
    MPS_CLONES static void mps_spread_##SUFFIX(const mps_row_job *job, size_t begin, size_t end) {                     \
        T scaled[MPS_WRITE_TILE] __attribute__((aligned(64)));                                                         \
        int is_past_cache = mps_is_past_cache(job, job->rows);                                                         \
        for (size_t t = begin; t < end; t++) {                                                                         \
            for (size_t at = 0; at < job->width; at += MPS_WRITE_TILE) {                                               \
                size_t n = mps_tile(job->width, at, MPS_WRITE_TILE);                                                   \
                const IN *x = (const IN *)job->x + t * job->width + at;                                                \
                for (size_t j = t * job->choices; j < (t + 1) * job->choices; j++) {                                   \
                    if (job->index[j] < 0) continue;                                                                   \
                    const T weight = ((const T *)job->weights)[j];                                                     \
                    MPS_SIMD for (size_t i = 0; i < n; i++) scaled[i] = weight * LOAD(x[i]);                           \
                    PUT((IN *)job->out + (size_t)job->index[j] * job->width + at, scaled, n, is_past_cache);           \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        mps_put_end(is_past_cache);                                                                                    \
    }                                                                                                                  \
    MPS_CLONES static void mps_dot_##SUFFIX(const mps_row_job *job, size_t begin, size_t end) {                        \
        T first[MPS_READ_TILE(IN)], second[MPS_READ_TILE(IN)];                                                         \
        (void)first, (void)second;                                                                                     \
        for (size_t place = begin * job->choices; place < end * job->choices; place++) {                               \
            double lane[MPS_LANES] = {0};                                                                              \
            for (size_t at = 0; at < job->width && job->index[place] >= 0; at += MPS_READ_TILE(IN)) {                  \
                size_t n = mps_tile(job->width, at, MPS_READ_TILE(IN));                                                \
                const IN *a = (const IN *)job->x + (size_t)job->index[place] * job->width + at;                        \
                const IN *b = (const IN *)job->y + place / job->choices * job->width + at;                             \
                mps_expect(job, place + 1, end * job->choices, at * sizeof(IN));                                       \
                const T *x = TILE(first, a, n, LOAD), *y = TILE(second, b, n, LOAD);                                   \
                LANES(lane, x, y, n);                                                                                  \
            }                                                                                                          \
            ((T *)job->out)[place] = (T)mps_join_lanes(lane);                                                          \
        }                                                                                                              \
    }

MPS_DEFINE_ROWS(f32, float, float, mps_load_f32, MPS_IN_PLACE, mps_put_f32, mps_lanes_f32)
MPS_DEFINE_ROWS(bf16, float, uint16_t, mps_load_bf16, MPS_WIDENED, mps_put_bf16, mps_lanes_f32)
MPS_DEFINE_ROWS(f16, float, uint16_t, mps_load_f16, MPS_WIDENED, mps_put_f16, mps_lanes_f32)
MPS_DEFINE_ROWS(f64, double, double, mps_wide_f64, MPS_IN_PLACE, mps_put_f64, mps_lanes_f64)

typedef void (*mps_row_loop)(const mps_row_job *, size_t, size_t);

/* By what the job does, then by kind. */
static const mps_row_loop mps_row_loops[][5] = {
    [MPS_DO_COMBINE] = {NULL, mps_combine_f32, mps_combine_bf16, mps_combine_f16, mps_combine_f64},
    [MPS_DO_SPREAD] = {NULL, mps_spread_f32, mps_spread_bf16, mps_spread_f16, mps_spread_f64},
    [MPS_DO_DOT] = {NULL, mps_dot_f32, mps_dot_bf16, mps_dot_f16, mps_dot_f64},
};

/* Without weights rows are copied as they are. */
static void mps_copy_range(const mps_row_job *job, size_t begin, size_t end) {
    size_t bytes = job->width * job->element;
    int is_past_cache = mps_is_past_cache(job, job->rows);
    for (size_t place = begin * job->choices; place < end * job->choices; place++) {
        if (job->index[place] < 0) continue;
        const char *from = (const char *)job->x + place / job->choices * bytes;
        mps_put((char *)job->out + (size_t)job->index[place] * bytes, from, bytes, is_past_cache);
    }
    mps_put_end(is_past_cache);
}

static void mps_clear_range(const mps_row_job *job, size_t begin, size_t end) {
    size_t bytes = job->width * job->element;
    for (size_t row = begin; row < end; row++)
        if (!job->named[row]) memset((char *)job->out + row * bytes, 0, bytes);
}

/* -- over threads ------------------------------------------------------------------------------------------------- */

static void mps_row_part(const mps_row_job *job, int parts, int part) {
    mps_range tokens = mps_cut(job->tokens, 1, parts, part), rows = mps_cut(job->rows, 1, parts, part);
    if (job->what == MPS_DO_PICK) mps_pick_range(job, tokens.begin, tokens.end);
    else if (job->what == MPS_DO_MERGE) mps_merge_range(job, tokens.begin, tokens.end);
    else if (job->what == MPS_DO_SPREAD && !job->weights) mps_copy_range(job, tokens.begin, tokens.end);
    else mps_row_loops[job->what][job->kind](job, tokens.begin, tokens.end);
    if (job->named) mps_clear_range(job, rows.begin, rows.end);
}

static void mps_run_rows(const mps_row_job *job, int threads) {
    int used = mps_useful_threads((job->tokens * job->choices + (job->named ? job->rows : 0)) * job->width, threads);
    if (used == 1) {
        mps_row_part(job, 1, 0);
        return;
    }
    MPS_ON_THREADS(used, k, mps_row_part(job, used, k));
}

#endif
