/* Rows of unsigned integers read from a file by position and widened into rows of signed ones.
 *
 * What the kernel has in memory is copied by one system call a row. At the first row that it has not, all rows that
 * are still to come are announced, so that the disk works on them at once, and are then waited for in turn. */
#ifndef MPISPEED_TOKEN_LOOPS_H
#define MPISPEED_TOKEN_LOOPS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "clones.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MPS_TOKENS_PAST_END = -1, MPS_TOKENS_NO_PLACE = -2 };

#define MPS_ANNOUNCED (128u << 10) /* bytes: the kernel may cut off what one call announces beyond this */
#define MPS_MOST_READ (1u << 30)   /* bytes of one system call */

typedef struct {
    int handle;
    uint64_t offset, total;  /* of the table: bytes from the start of the file, elements */
    size_t itemsize;         /* 1, 2, 4, 8 */
    const int64_t *starts, *counts; /* [rows] elements */
    size_t rows, length;
    void *ids, *labels;      /* [rows, length]; labels may be NULL */
    size_t wide;             /* bytes of an element of both: 4 or 8 */
    int64_t fill, label_fill;
    size_t shift;            /* labels[i] is what stands `shift` elements behind ids[i] */
    size_t failed_row;
} mps_token_job;

#define MPS_WIDEN(NAME, FROM, TO)                                                                                      \
    MPS_CLONES static void mps_widen_##NAME(TO *restrict out, const FROM *restrict x, size_t n, size_t length,         \
                                            TO fill) {                                                                 \
        for (size_t i = 0; i < n; i++) out[i] = (TO)x[i];                                                              \
        for (size_t i = n; i < length; i++) out[i] = fill;                                                             \
    }
MPS_WIDEN(1_4, uint8_t, int32_t)
MPS_WIDEN(2_4, uint16_t, int32_t)
MPS_WIDEN(4_4, uint32_t, int32_t)
MPS_WIDEN(8_4, uint64_t, int32_t)
MPS_WIDEN(1_8, uint8_t, int64_t)
MPS_WIDEN(2_8, uint16_t, int64_t)
MPS_WIDEN(4_8, uint32_t, int64_t)
MPS_WIDEN(8_8, uint64_t, int64_t)

static void mps_widen(const mps_token_job *job, void *rows, size_t row, const void *x, size_t n, int64_t fill) {
    char *out = (char *)rows + row * job->length * job->wide;
    const size_t kept = n < job->length ? n : job->length;
#define MPS_WIDEN_AS(FROM, FROM_T, TO, TO_T)                                                                           \
    if (job->itemsize == FROM && job->wide == TO) {                                                                    \
        mps_widen_##FROM##_##TO((TO_T *)out, (const FROM_T *)x, kept, job->length, (TO_T)fill);                        \
        return;                                                                                                        \
    }
    MPS_WIDEN_AS(1, uint8_t, 4, int32_t)
    MPS_WIDEN_AS(2, uint16_t, 4, int32_t)
    MPS_WIDEN_AS(4, uint32_t, 4, int32_t)
    MPS_WIDEN_AS(8, uint64_t, 4, int32_t)
    MPS_WIDEN_AS(1, uint8_t, 8, int64_t)
    MPS_WIDEN_AS(2, uint16_t, 8, int64_t)
    MPS_WIDEN_AS(4, uint32_t, 8, int64_t)
    MPS_WIDEN_AS(8, uint64_t, 8, int64_t)
#undef MPS_WIDEN_AS
}

static uint64_t mps_row_offset(const mps_token_job *job, size_t row) {
    return job->offset + (uint64_t)job->starts[row] * job->itemsize;
}

/* Bytes that are in memory already, -1 if that cannot be told. */
static ssize_t mps_read_now(int handle, char *to, size_t nbytes, uint64_t offset) {
#ifdef RWF_NOWAIT
    struct iovec piece = {to, nbytes < MPS_MOST_READ ? nbytes : MPS_MOST_READ};
    return preadv2(handle, &piece, 1, (off_t)offset, RWF_NOWAIT);
#else
    (void)handle, (void)to, (void)nbytes, (void)offset;
    return -1;
#endif
}

static int mps_read_all(int handle, char *to, size_t nbytes, uint64_t offset) {
    while (nbytes) {
        const ssize_t n = pread(handle, to, nbytes < MPS_MOST_READ ? nbytes : MPS_MOST_READ, (off_t)offset);
        if (n == 0) return MPS_TOKENS_PAST_END;
        if (n < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        to += n, nbytes -= (size_t)n, offset += (uint64_t)n;
    }
    return 0;
}

static void mps_announce(const mps_token_job *job, size_t row) {
#ifdef POSIX_FADV_WILLNEED
    for (; row < job->rows; row++) {
        uint64_t at = mps_row_offset(job, row), left = (uint64_t)job->counts[row] * job->itemsize;
        while (left) {
            const uint64_t n = left < MPS_ANNOUNCED ? left : MPS_ANNOUNCED;
            (void)posix_fadvise(job->handle, (off_t)at, (off_t)n, POSIX_FADV_WILLNEED); /* advice only */
            at += n, left -= n;
        }
    }
#else
    (void)job, (void)row;
#endif
}

/* The most bytes of a row; -1 if a row is not within the table, which is then the failed one. */
static int64_t mps_longest_row(mps_token_job *job) {
    int64_t longest = 0;
    for (size_t row = 0; row < job->rows; row++) {
        const int64_t start = job->starts[row], count = job->counts[row];
        job->failed_row = row;
        if (start < 0 || count < 0 || (uint64_t)start > job->total || (uint64_t)count > job->total - (uint64_t)start)
            return -1;
        if (count > longest) longest = count;
    }
    return longest * (int64_t)job->itemsize;
}

/* 0, an errno, or one of the codes above; then `failed_row` is the row. */
static int mps_read_tokens(mps_token_job *job) {
    const int64_t longest = mps_longest_row(job);
    if (longest < 0) return MPS_TOKENS_NO_PLACE;
    char *scratch = (char *)malloc(longest ? (size_t)longest : 1);
    if (scratch == NULL) return ENOMEM;
    int code = 0, is_announced = 0;
    for (size_t row = 0; row < job->rows && !code; row++) {
        const size_t count = (size_t)job->counts[row], nbytes = count * job->itemsize;
        const uint64_t offset = mps_row_offset(job, row);
        size_t done = 0;
        if (!is_announced && nbytes) {
            const ssize_t n = mps_read_now(job->handle, scratch, nbytes, offset);
            if (n > 0) done = (size_t)n;
            if (done < nbytes) {
                is_announced = 1;
                mps_announce(job, row);
            }
        }
        job->failed_row = row;
        code = mps_read_all(job->handle, scratch + done, nbytes - done, offset + done);
        if (code) break;
        mps_widen(job, job->ids, row, scratch, count, job->fill);
        if (job->labels != NULL) {
            const size_t skipped = count < job->shift ? count : job->shift;
            mps_widen(job, job->labels, row, scratch + skipped * job->itemsize, count - skipped, job->label_fill);
        }
    }
    free(scratch);
    return code;
}

#endif
