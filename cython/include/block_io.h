/* Transfers between files and memory: a queue of them, and what the threads that work on it share. */
#ifndef MPISPEED_BLOCK_IO_H
#define MPISPEED_BLOCK_IO_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "block_io_faults.h"
#include "block_io_ring.h"

#define MPS_IO_ALIGN 4096u       /* of offset, length and address of a request by O_DIRECT */
#define MPS_IO_PAST_END (-1)     /* in place of an errno: the file ends before the range does */
#define MPS_IO_AT_END (-4096)    /* as a verdict; errnos are smaller */

struct mps_transfer;

/* A contiguous range of a transfer: requests are cut from its front. */
typedef struct mps_part {
    struct mps_transfer *transfer;
    uint64_t next, end;          /* relative to the transfer */
    struct mps_part *after;      /* in the queue */
} mps_part;

typedef struct mps_transfer {
    int direct, plain;           /* descriptors with and without O_DIRECT; -1 where there is none */
    int is_write;
    char *memory;
    uint64_t length, offset, left; /* left: bytes not accounted for, under the pool's lock */
    int error;                   /* of the first failure, under the pool's lock */
    uint64_t error_at;           /* offset in the file */
    double began, ended;         /* seconds of CLOCK_MONOTONIC: when it was made, and when it was done */
    int is_done;                 /* atomic; the fields above do not change once it is set */
    int count;
    mps_part parts[];
} mps_transfer;

typedef struct {
    int kind;                    /* 0 system calls, or a kind of ring */
    int threads, depth, is_single, is_overlapped;
    uint64_t block;
} mps_io_options;

typedef struct {
    mps_io_options options;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    mps_part *first, *last;
    int is_closing, started;
    pid_t owner;
    uint64_t counters[4];        /* bytes and requests read, bytes and requests written; atomic */
    mps_ring *rings;             /* one for each thread, of kinds 1 and 2 */
    int opened_rings, used_rings;
    pthread_t threads[];
} mps_pool;

/* One request and the memory it may need; a thread keeps the bounce buffer for the next one. */
typedef struct {
    mps_transfer *transfer;
    char *memory;                /* of the caller */
    uint64_t at, length;         /* relative to the transfer */
    uint64_t done, best;         /* bytes from which to go on, bytes seen transferred */
    int fd, is_direct;
    char *bounce;
    uint64_t bounce_size;
} mps_slot;

/* Seconds of CLOCK_MONOTONIC. */
static double mps_io_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Whether a transfer is over; what it left behind can be read then. */
static int mps_is_done(const mps_transfer *t) { return __atomic_load_n(&t->is_done, __ATOMIC_ACQUIRE); }

/* The next request of a part, 0 when none is left. A failed transfer hands out nothing more. Under the lock. */
static int mps_cut(const mps_pool *pool, mps_part *part, mps_slot *slot) {
    mps_transfer *t = part->transfer;
    if (t->error) {
        t->left -= part->end - part->next;
        part->next = part->end;
    }
    uint64_t rest = part->end - part->next, length = pool->options.block, odd = (t->offset + part->next) % MPS_IO_ALIGN;
    if (rest == 0) return 0;
    slot->is_direct = t->direct >= 0 && odd == 0 && rest >= MPS_IO_ALIGN;
    if (slot->is_direct) {
        rest -= rest % MPS_IO_ALIGN;
        length += (MPS_IO_ALIGN - length % MPS_IO_ALIGN) % MPS_IO_ALIGN;
    } else if (t->direct >= 0) {
        length = MPS_IO_ALIGN - odd;   /* the odd bytes of a page, through the page cache */
    }
    slot->transfer = t;
    slot->at = part->next;
    slot->length = length < rest ? length : rest;
    slot->memory = t->memory + slot->at;
    slot->done = slot->best = 0;
    slot->fd = slot->is_direct ? t->direct : t->plain;
    part->next += slot->length;
    return 1;
}

/* Mark a transfer as done when nothing of it is left. Under the lock. */
static void mps_settle(mps_pool *pool, mps_transfer *t) {
    if (t->left || t->is_done) return;
    t->ended = mps_io_seconds();
    __atomic_store_n(&t->is_done, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->done);
}

/* Account for a finished request. Under the lock. */
static void mps_account(mps_pool *pool, mps_slot *slot, int error) {
    mps_transfer *t = slot->transfer;
    uint64_t at = t->offset + slot->at + slot->best;
    if (error && (!t->error || at < t->error_at)) t->error = error, t->error_at = at;
    t->left -= slot->length;
    __atomic_fetch_add(&pool->counters[2 * t->is_write], slot->best, __ATOMIC_RELAXED);
    __atomic_fetch_add(&pool->counters[2 * t->is_write + 1], 1, __ATOMIC_RELAXED);
    mps_settle(pool, t);
}

/* The memory that the system call sees: the caller's, or an aligned copy. NULL: none to be had. */
static char *mps_memory(mps_slot *slot) {
    if (!slot->is_direct || (uintptr_t)slot->memory % MPS_IO_ALIGN == 0) return slot->memory;
    if (slot->bounce_size < slot->length) {
        free(slot->bounce);
        slot->bounce_size = 0;
        if (posix_memalign((void **)&slot->bounce, MPS_IO_ALIGN, slot->length)) return slot->bounce = NULL;
        slot->bounce_size = slot->length;
    }
    if (slot->transfer->is_write && slot->done == 0) memcpy(slot->bounce, slot->memory, slot->length);
    return slot->bounce;
}

/* Take in what a system call reported. 1: go on with the rest, 0: complete, or an error (errno is negated). */
static int mps_take_in(mps_slot *slot, ssize_t got) {
    if (got == -EINTR || got == -EAGAIN) return 1;
    if (got < 0) return (int)got;
    uint64_t reached = slot->done + (uint64_t)got;
    if (reached <= slot->best) return slot->transfer->is_write ? -EIO : MPS_IO_AT_END;
    slot->best = slot->done = reached;
    if (reached >= slot->length) {
        if (!slot->transfer->is_write && slot->is_direct && (uintptr_t)slot->memory % MPS_IO_ALIGN)
            memcpy(slot->memory, slot->bounce, slot->length);
        return 0;
    }
    if (slot->is_direct) slot->done -= reached % MPS_IO_ALIGN;  /* again from the last whole page */
    return 1;
}

/* What mps_take_in says as an error of the transfer. */
static int mps_error(int verdict) { return verdict == MPS_IO_AT_END ? MPS_IO_PAST_END : -verdict; }

/* Perform a request by system calls, from where it stands. 0, or an error of the transfer. */
static int mps_perform(mps_slot *slot) {
    char *memory = mps_memory(slot);
    int verdict = 1;
    if (memory == NULL) return ENOMEM;
    while (verdict == 1) {
        mps_transfer *t = slot->transfer;
        uint64_t rest = slot->length - slot->done, at = t->offset + slot->at + slot->done;
        mps_fault fault = mps_next_fault(t->is_write);
        ssize_t got = -fault.error;
        mps_sleep(fault.seconds);
        if (!fault.error) {
            got = t->is_write ? pwrite(slot->fd, memory + slot->done, rest, (off_t)at)
                              : pread(slot->fd, memory + slot->done, rest, (off_t)at);
            if (got < 0) got = -errno;
        }
        verdict = mps_take_in(slot, mps_shorten(got, fault));
    }
    return verdict ? mps_error(verdict) : 0;
}

/* Take the front request of the queue; parts that are used up leave it. Under the lock. */
static int mps_take(mps_pool *pool, mps_slot *slot) {
    while (pool->first) {
        mps_part *part = pool->first;
        int has_one = mps_cut(pool, part, slot);
        if (part->next == part->end) {
            pool->first = part->after;
            if (!pool->first) pool->last = NULL;
        }
        if (has_one) return 1;
        mps_settle(pool, part->transfer);
    }
    return 0;
}

/* A thread that performs one request at a time. */
static void *mps_worker(void *argument) {
    mps_pool *pool = argument;
    mps_slot slot = {0};
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->first && !pool->is_closing) pthread_cond_wait(&pool->work, &pool->lock);
        if (mps_take(pool, &slot)) {
            pthread_mutex_unlock(&pool->lock);
            int error = mps_perform(&slot);
            pthread_mutex_lock(&pool->lock);
            mps_account(pool, &slot, error);
        } else if (pool->is_closing) {
            break;
        }
    }
    pthread_mutex_unlock(&pool->lock);
    free(slot.bounce);
    return NULL;
}

#endif
