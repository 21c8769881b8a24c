/* The threads of block I/O: start, submit, wait, end. */
#ifndef MPISPEED_BLOCK_IO_POOL_H
#define MPISPEED_BLOCK_IO_POOL_H

#include "block_io.h"

#define MPS_IO_STACK (256u << 10)

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

/* Wait for what is queued and end the threads. In a forked child there are none, and the lock may be held. */
static void mps_pool_close(mps_pool *pool) {
    if (pool->owner != getpid()) return;
    pthread_mutex_lock(&pool->lock);
    pool->is_closing = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->threads[i], NULL);
    pool->started = 0;
}

static void mps_pool_free(mps_pool *pool) {
    if (pool == NULL || pool->owner != getpid()) return;
    mps_pool_close(pool);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* Start the threads, with all signals blocked: the interpreter's handlers run elsewhere. 0 or an errno. */
static int mps_pool_start(mps_pool *pool, void *(*run)(void *)) {
    pthread_attr_t attributes;
    sigset_t all, before;
    int error = pthread_attr_init(&attributes);
    if (error) return error;
    pthread_attr_setstacksize(&attributes, MPS_IO_STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (!error && pool->started < pool->options.threads) {
        error = pthread_create(&pool->threads[pool->started], &attributes, run, pool);
        if (!error) pool->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

/* A pool with running threads, or NULL with errno. */
static mps_pool *mps_pool_new(const mps_io_options *options) {
    mps_pool *pool = calloc(1, sizeof *pool + sizeof(pthread_t) * (size_t)options->threads);
    pthread_condattr_t clock;
    if (pool == NULL) return NULL;
    pool->options = *options;
    pool->owner = getpid();
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, &clock);
    pthread_condattr_destroy(&clock);
    int error = mps_pool_start(pool, mps_worker);
    if (error) {
        mps_pool_free(pool);
        errno = error;
        return NULL;
    }
    return pool;
}

/* A transfer cut into `count` parts whose ends lie on whole pages of the file; NULL: no memory. */
static mps_transfer *mps_transfer_new(int direct, int plain, int is_write, char *memory, uint64_t length,
                                      uint64_t offset, int count) {
    mps_transfer *t = calloc(1, sizeof *t + sizeof(mps_part) * (size_t)count);
    uint64_t start = 0, each = length / (uint64_t)count + 1;
    if (t == NULL) return NULL;
    t->direct = direct, t->plain = plain, t->is_write = is_write, t->memory = memory;
    t->length = t->left = length, t->offset = offset, t->is_done = length == 0;
    while (start < length) {
        uint64_t end = offset + start + each;
        end += (MPS_IO_ALIGN - end % MPS_IO_ALIGN) % MPS_IO_ALIGN;
        end = end - offset < length ? end - offset : length;
        t->parts[t->count++] = (mps_part){t, start, end, NULL};
        start = end;
    }
    return t;
}

/* Queue a transfer. 0: the pool is closed. */
static int mps_submit(mps_pool *pool, mps_transfer *t) {
    pthread_mutex_lock(&pool->lock);
    int is_open = !pool->is_closing;
    for (int i = 0; is_open && i < t->count; i++) {
        if (pool->last) pool->last->after = &t->parts[i];
        else pool->first = &t->parts[i];
        pool->last = &t->parts[i];
    }
    uint64_t requests = t->length / pool->options.block + 2;
    if (requests < (uint64_t)pool->options.threads)
        while (is_open && requests--) pthread_cond_signal(&pool->work);
    else if (is_open) pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    return is_open;
}

/* Wait for a transfer, at most so many seconds; 1 when it is done. */
static int mps_wait(mps_pool *pool, mps_transfer *t, double seconds) {
    struct timespec until;
    int code = 0;
    if (__atomic_load_n(&t->is_done, __ATOMIC_ACQUIRE)) return 1;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(seconds * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_mutex_lock(&pool->lock);
    while (!t->is_done && code == 0) code = pthread_cond_timedwait(&pool->done, &pool->lock, &until);
    pthread_mutex_unlock(&pool->lock);
    return t->is_done;
}

#endif
