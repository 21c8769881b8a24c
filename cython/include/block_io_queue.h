/* A thread that keeps requests in flight in a queue of the kernel. */
#ifndef MPISPEED_BLOCK_IO_QUEUE_H
#define MPISPEED_BLOCK_IO_QUEUE_H

#include "block_io.h"

/* Requests of one thread, by index; free ones are a stack. */
typedef struct {
    mps_pool *pool;
    mps_ring *ring;
    mps_part *part;              /* the range this thread cuts requests from */
    mps_slot *slots;
    mps_wish *wishes;
    mps_answer *answers;
    mps_fault *faults;
    double *due;                 /* seconds of the clock before which an answer counts as not there */
    int *free, *batch;
    char *is_out;                /* by index: the kernel has it */
    int free_count, in_flight;
} mps_queue;

static double mps_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The next request of this thread: from its part, then from the first part that waits. Under the lock. */
static int mps_queue_take(mps_queue *q, mps_slot *slot) {
    mps_pool *pool = q->pool;
    for (;;) {
        if (!q->part) {
            if (!pool->first) return 0;
            q->part = pool->first;
            pool->first = q->part->after;
            if (!pool->first) pool->last = NULL;
        }
        mps_part *part = q->part;
        int has_one = mps_cut(pool, part, slot);
        if (part->next == part->end) q->part = NULL;
        if (has_one) return 1;
        mps_settle(pool, part->transfer);
    }
}

/* Account for a request and free its slot. */
static void mps_queue_finish(mps_queue *q, int index, int error) {
    pthread_mutex_lock(&q->pool->lock);
    mps_account(q->pool, &q->slots[index], error);
    pthread_mutex_unlock(&q->pool->lock);
    q->free[q->free_count++] = index;
}

/* Finish a request by what was reported for it; what is missing goes by system calls. */
static void mps_queue_take_in(mps_queue *q, int index, ssize_t got) {
    int verdict = mps_take_in(&q->slots[index], got);
    mps_queue_finish(q, index, verdict == 1 ? mps_perform(&q->slots[index]) : verdict ? mps_error(verdict) : 0);
}

/* Write down a request for the kernel; 0 when it is finished without it. */
static int mps_queue_prepare(mps_queue *q, int index) {
    mps_slot *slot = &q->slots[index];
    char *memory = slot->is_direct ? mps_memory(slot) : NULL;
    if (!slot->is_direct || memory == NULL) {   /* odd bytes of a page; the kernel would block on them */
        mps_queue_finish(q, index, slot->is_direct ? ENOMEM : mps_perform(slot));
        return 0;
    }
    mps_fault fault = q->faults[index] = mps_next_fault(slot->transfer->is_write);
    if (fault.error) {
        mps_queue_take_in(q, index, -fault.error);
        return 0;
    }
    q->due[index] = fault.seconds > 0 ? mps_now() + fault.seconds : 0.0;
    q->wishes[index] = (mps_wish){slot->fd, slot->transfer->is_write, {memory, slot->length},
                                  slot->transfer->offset + slot->at};
    return 1;
}

/* Take in answers, at least so many. */
static void mps_queue_reap(mps_queue *q, int least) {
    int refused = mps_next_fault(MPS_FAULT_REAP).error;
    long count = refused ? -refused : mps_ring_reap(q->ring, least, q->answers);
    if (count == -EINTR) return;
    if (count < 0) {   /* closing completes what is in flight; requests go by system calls from here on */
        mps_ring_close(q->ring);
        for (int i = 0; i < q->ring->depth; i++) {
            if (!q->is_out[i]) continue;   /* free, or of the batch that is being submitted */
            q->is_out[i] = 0;
            mps_queue_finish(q, i, (int)-count);
        }
        q->in_flight = 0;
        return;
    }
    for (long i = 0; i < count; i++) {
        int index = (int)q->answers[i].index;
        if (q->due[index] > 0) mps_sleep(q->due[index] - mps_now());
        q->in_flight--, q->is_out[index] = 0;
        mps_queue_take_in(q, index, mps_shorten((ssize_t)q->answers[i].got, q->faults[index]));
    }
}

/* Hand the batch to the kernel. What it does not take while nothing is in flight goes by system calls. */
static void mps_queue_submit(mps_queue *q, int count) {
    int *batch = q->batch;
    while (count > 0) {
        int refused = mps_next_fault(MPS_FAULT_SUBMIT).error;
        long taken = -refused;
        if (!refused) taken = mps_ring_submit(q->ring, q->wishes, batch, q->pool->options.is_single ? 1 : count);
        if (taken > 0) {
            for (long i = 0; i < taken; i++) q->is_out[batch[i]] = 1;
            batch += taken, count -= (int)taken, q->in_flight += (int)taken;
        } else if (taken != -EINTR && q->in_flight > 0 && (taken == -EAGAIN || taken == -EBUSY)) {
            mps_queue_reap(q, 1);
        } else if (taken != -EINTR) {
            mps_queue_finish(q, *batch, mps_perform(&q->slots[*batch]));
            batch++, count--;
        }
    }
}

/* Fill the queue from what waits; 0 when the thread shall end. */
static int mps_queue_fill(mps_queue *q) {
    mps_pool *pool = q->pool;
    int taken = 0, ready = 0;
    pthread_mutex_lock(&pool->lock);
    while (!q->in_flight && !q->part && !pool->first && !pool->is_closing) pthread_cond_wait(&pool->work, &pool->lock);
    if (pool->options.is_overlapped || !q->in_flight)
        while (q->free_count && mps_queue_take(q, &q->slots[q->free[q->free_count - 1]]))
            q->batch[taken++] = q->free[--q->free_count];
    int goes_on = taken || q->in_flight || !pool->is_closing;
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < taken; i++)
        if (mps_queue_prepare(q, q->batch[i])) q->batch[ready++] = q->batch[i];
    mps_queue_submit(q, ready);
    return goes_on;
}

static void mps_queue_free(mps_queue *q) {
    for (int i = 0; q->slots && i < q->ring->depth; i++) free(q->slots[i].bounce);
    free(q->slots), free(q->wishes), free(q->answers), free(q->faults), free(q->due), free(q->free), free(q->batch);
    free(q->is_out);
}

static int mps_queue_init(mps_queue *q, mps_pool *pool, mps_ring *ring) {
    size_t depth = (size_t)ring->depth;
    *q = (mps_queue){.pool = pool, .ring = ring};
    q->slots = calloc(depth, sizeof *q->slots);
    q->wishes = calloc(depth, sizeof *q->wishes);
    q->answers = calloc(depth, sizeof *q->answers);
    q->faults = calloc(depth, sizeof *q->faults);
    q->due = calloc(depth, sizeof *q->due);
    q->free = calloc(depth, sizeof *q->free);
    q->batch = calloc(depth, sizeof *q->batch);
    q->is_out = calloc(depth, sizeof *q->is_out);
    if (!q->slots || !q->wishes || !q->answers || !q->faults || !q->due || !q->free || !q->batch || !q->is_out)
        return 0;
    while (q->free_count < ring->depth) {
        q->free[q->free_count] = q->free_count;
        q->free_count++;
    }
    return 1;
}

static void *mps_queue_worker(void *argument) {
    mps_pool *pool = argument;
    mps_queue queue, *q = &queue;
    mps_ring *ring = &pool->rings[__atomic_fetch_add(&pool->used_rings, 1, __ATOMIC_RELAXED)];
    if (!mps_queue_init(q, pool, ring)) {
        mps_queue_free(q);
        return mps_worker(pool);
    }
    while (mps_queue_fill(q))
        if (q->in_flight) mps_queue_reap(q, pool->options.is_overlapped ? 1 : q->in_flight);
    mps_queue_free(q);
    return NULL;
}

#endif
