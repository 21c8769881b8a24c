/* The threads of block I/O: start, submit, wait, end. */
#ifndef MPISPEED_BLOCK_IO_POOL_H
#define MPISPEED_BLOCK_IO_POOL_H

#include "block_io_queue.h"

#define MPS_IO_STACK (256u << 10)

/* Wait for what is queued, end the threads and give their queues back. In a forked child there are none, and the lock may be held. */
static void mps_pool_close(mps_pool *pool) {
    if (pool->owner != getpid()) return;
    pthread_mutex_lock(&pool->lock);
    pool->is_closing = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->threads[i], NULL);
    for (int i = 0; i < pool->opened_rings; i++) mps_ring_close(&pool->rings[i]);
    pool->started = pool->opened_rings = 0;
}

static void mps_pool_free(mps_pool *pool) {
    if (pool == NULL || pool->owner != getpid()) return;
    mps_pool_close(pool);
    free(pool->rings);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* Start the threads, with signals blocked: the interpreter's handlers run elsewhere. 0 or an errno. */
static int mps_pool_start(mps_pool *pool, void *(*run)(void *)) {
    pthread_attr_t attributes;
    sigset_t all, before;
    int error = pthread_attr_init(&attributes);
    if (error) return error;
    pthread_attr_setstacksize(&attributes, MPS_IO_STACK);
    sigfillset(&all);
    sigdelset(&all, SIGSEGV), sigdelset(&all, SIGBUS), sigdelset(&all, SIGFPE), sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (!error && pool->started < pool->options.threads) {
        error = pthread_create(&pool->threads[pool->started], &attributes, run, pool);
        if (!error) pool->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

/* A queue of the kernel for each thread. 0 or an errno. */
static int mps_pool_open_rings(mps_pool *pool) {
    const mps_io_options *options = &pool->options;
    pool->rings = calloc((size_t)options->threads, sizeof *pool->rings);
    if (pool->rings == NULL) return ENOMEM;
    while (pool->opened_rings < options->threads) {
        int error = mps_ring_open(&pool->rings[pool->opened_rings], options->kind, options->depth);
        if (error) return error;
        pool->opened_rings++;
    }
    return 0;
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
    int error = options->kind ? mps_pool_open_rings(pool) : 0;
    if (!error) error = mps_pool_start(pool, options->kind ? mps_queue_worker : mps_worker);
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
    t->began = t->ended = mps_io_seconds();
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
    if (mps_is_done(t)) return 1;
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
