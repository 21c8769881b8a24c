/* Queues of the kernel by raw system calls: libaio, and io_uring. One thread uses a ring at a time. */
#ifndef MPISPEED_BLOCK_IO_RING_H
#define MPISPEED_BLOCK_IO_RING_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/aio_abi.h>) && defined(SYS_io_setup)
#include <linux/aio_abi.h>
#define MPS_HAS_AIO 1
#endif
#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#include <linux/io_uring.h>
#define MPS_HAS_URING 1
#endif
#endif

enum { MPS_RING_AIO = 1, MPS_RING_URING = 2 };

/* A request as the kernel gets it, and what it answers: bytes, or an errno negated. */
typedef struct {
    int fd, is_write;
    struct iovec range;
    uint64_t offset;
} mps_wish;

typedef struct {
    uint64_t index;
    int64_t got;
} mps_answer;

typedef struct {
    int kind, depth;             /* kind 0: closed */
    void *events;                /* libaio: io_event of a reap */
    void *blocks;                /* libaio: an iocb for each index */
    unsigned long context;
    int fd;                      /* io_uring */
    char *map;                   /* submission and completion rings */
    void *entries;               /* io_uring_sqe of the submission ring */
    size_t map_bytes, entries_bytes;
    unsigned in_flight;          /* io_uring: taken by the kernel and not reaped */
    unsigned *tail, *index, mask, *done_head, *done_tail, done_mask;
    void *done;                  /* io_uring_cqe of the completion ring */
} mps_ring;

#ifdef MPS_HAS_AIO
static int mps_aio_open(mps_ring *ring) {
    ring->blocks = calloc((size_t)ring->depth, sizeof(struct iocb));
    ring->events = calloc((size_t)ring->depth, sizeof(struct io_event));
    if (!ring->blocks || !ring->events) return ENOMEM;
    return syscall(SYS_io_setup, ring->depth, &ring->context) < 0 ? errno : 0;
}

static long mps_aio_submit(mps_ring *ring, const mps_wish *wishes, const int *chosen, int count) {
    struct iocb *blocks = ring->blocks, *batch[count];
    for (int i = 0; i < count; i++) {
        const mps_wish *wish = &wishes[chosen[i]];
        batch[i] = &blocks[chosen[i]];
        memset(batch[i], 0, sizeof *batch[i]);
        batch[i]->aio_data = (uint64_t)chosen[i];
        batch[i]->aio_lio_opcode = wish->is_write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        batch[i]->aio_fildes = (uint32_t)wish->fd;
        batch[i]->aio_buf = (uint64_t)(uintptr_t)wish->range.iov_base;
        batch[i]->aio_nbytes = wish->range.iov_len;
        batch[i]->aio_offset = (int64_t)wish->offset;
    }
    long taken = syscall(SYS_io_submit, ring->context, (long)count, batch);
    return taken < 0 ? -errno : taken;
}

static long mps_aio_reap(mps_ring *ring, int least, mps_answer *answers) {
    struct io_event *events = ring->events;
    long count = syscall(SYS_io_getevents, ring->context, (long)least, (long)ring->depth, events, NULL);
    for (long i = 0; i < count; i++) answers[i] = (mps_answer){events[i].data, events[i].res};
    return count < 0 ? -errno : count;
}
#endif

#ifdef MPS_HAS_URING
static int mps_uring_open(mps_ring *ring) {
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    ring->fd = (int)syscall(__NR_io_uring_setup, ring->depth, &params);
    if (ring->fd < 0) return errno;
    if (!(params.features & IORING_FEAT_SINGLE_MMAP)) return ENOSYS;   /* before Linux 5.4 */
    size_t first = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t second = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    ring->map_bytes = first > second ? first : second;
    ring->entries_bytes = params.sq_entries * sizeof(struct io_uring_sqe);
    int access = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    char *map = mmap(NULL, ring->map_bytes, access, flags, ring->fd, IORING_OFF_SQ_RING);
    if (map == MAP_FAILED) return errno;
    ring->map = map;
    void *entries = mmap(NULL, ring->entries_bytes, access, flags, ring->fd, IORING_OFF_SQES);
    if (entries == MAP_FAILED) return errno;
    ring->entries = entries;
    madvise(map, ring->map_bytes, MADV_DONTFORK);
    madvise(entries, ring->entries_bytes, MADV_DONTFORK);
    ring->tail = (unsigned *)(map + params.sq_off.tail);
    ring->mask = *(unsigned *)(map + params.sq_off.ring_mask);
    ring->index = (unsigned *)(map + params.sq_off.array);
    ring->done_head = (unsigned *)(map + params.cq_off.head);
    ring->done_tail = (unsigned *)(map + params.cq_off.tail);
    ring->done_mask = *(unsigned *)(map + params.cq_off.ring_mask);
    ring->done = map + params.cq_off.cqes;
    return 0;
}

static long mps_uring_submit(mps_ring *ring, const mps_wish *wishes, const int *chosen, int count) {
    unsigned tail = *ring->tail;
    for (int i = 0; i < count; i++) {
        unsigned place = (tail + (unsigned)i) & ring->mask;
        struct io_uring_sqe *entry = (struct io_uring_sqe *)ring->entries + place;
        const mps_wish *wish = &wishes[chosen[i]];
        memset(entry, 0, sizeof *entry);
        entry->opcode = wish->is_write ? IORING_OP_WRITEV : IORING_OP_READV;
        entry->fd = wish->fd;
        entry->addr = (uint64_t)(uintptr_t)&wish->range;
        entry->len = 1;
        entry->off = wish->offset;
        entry->user_data = (uint64_t)chosen[i];
        ring->index[place] = place;
    }
    __atomic_store_n(ring->tail, tail + (unsigned)count, __ATOMIC_RELEASE);
    long taken = syscall(__NR_io_uring_enter, ring->fd, count, 0, 0, NULL, 0);
    if (taken < 0) taken = -errno;
    /* What the kernel did not take is taken back: it looks at the ring during the call only. */
    __atomic_store_n(ring->tail, tail + (unsigned)(taken < 0 ? 0 : taken), __ATOMIC_RELEASE);
    ring->in_flight += (unsigned)(taken < 0 ? 0 : taken);
    return taken;
}

static long mps_uring_reap(mps_ring *ring, int least, mps_answer *answers) {
    struct io_uring_cqe *done = ring->done;
    unsigned head = *ring->done_head, tail = __atomic_load_n(ring->done_tail, __ATOMIC_ACQUIRE);
    if (tail - head < (unsigned)least) {
        long code = syscall(__NR_io_uring_enter, ring->fd, 0, least, IORING_ENTER_GETEVENTS, NULL, 0);
        if (code < 0) return -errno;
        tail = __atomic_load_n(ring->done_tail, __ATOMIC_ACQUIRE);
    }
    long count = 0;
    for (; head != tail; head++, count++)
        answers[count] = (mps_answer){done[head & ring->done_mask].user_data, done[head & ring->done_mask].res};
    __atomic_store_n(ring->done_head, head, __ATOMIC_RELEASE);
    ring->in_flight -= (unsigned)count;
    return count;
}

/* Wait until nothing is in flight. Neither close nor munmap waits for it, and the kernel would go on to use the
   buffers. The completion ring is watched without a system call on it: answers come there also when io_uring_enter
   fails for good, even with a descriptor that is gone, as the maps keep the ring. As with io_destroy there is no
   limit of time: a request that the kernel never ends is waited for. */
static void mps_uring_drain(const mps_ring *ring) {
    const struct timespec nap = {0, 200000};
    if (!ring->in_flight) return;
    while (__atomic_load_n(ring->done_tail, __ATOMIC_ACQUIRE) - *ring->done_head < ring->in_flight)
        nanosleep(&nap, NULL);   /* coming back from any system call lets the kernel end requests of this thread */
}
#endif

/* Give a ring back once what is in flight is complete; io_destroy waits for it, and fails only where another call has
   destroyed the context and waited. From here on submit and reap answer -ENOSYS; the depth stays. */
static void mps_ring_close(mps_ring *ring) {
#ifdef MPS_HAS_AIO
    if (ring->context) syscall(SYS_io_destroy, ring->context);
#endif
#ifdef MPS_HAS_URING
    mps_uring_drain(ring);
#endif
    ring->kind = 0, ring->context = 0, ring->in_flight = 0;
    if (ring->entries) munmap(ring->entries, ring->entries_bytes);
    if (ring->map) munmap(ring->map, ring->map_bytes);
    ring->entries = ring->map = NULL;
    if (ring->fd >= 0) close(ring->fd);
    ring->fd = -1;
    free(ring->blocks);
    free(ring->events);
    ring->blocks = ring->events = NULL;
}

/* 0, or the errno with which the kernel refuses. */
static int mps_ring_open(mps_ring *ring, int kind, int depth) {
    int error = ENOSYS;
    memset(ring, 0, sizeof *ring);
    ring->kind = kind, ring->depth = depth, ring->fd = -1;
#ifdef MPS_HAS_AIO
    if (kind == MPS_RING_AIO) error = mps_aio_open(ring);
#endif
#ifdef MPS_HAS_URING
    if (kind == MPS_RING_URING) error = mps_uring_open(ring);
#endif
    if (error) mps_ring_close(ring);
    return error;
}

/* Hand over the chosen wishes with one system call: how many were taken from the front, or an errno negated. */
static long mps_ring_submit(mps_ring *ring, const mps_wish *wishes, const int *chosen, int count) {
#ifdef MPS_HAS_AIO
    if (ring->kind == MPS_RING_AIO) return mps_aio_submit(ring, wishes, chosen, count);
#endif
#ifdef MPS_HAS_URING
    if (ring->kind == MPS_RING_URING) return mps_uring_submit(ring, wishes, chosen, count);
#endif
    return -ENOSYS;
}

/* Wait for at least so many answers, and take all that are there, at most as many as are in flight; how many, or an errno negated. */
static long mps_ring_reap(mps_ring *ring, int least, mps_answer *answers) {
#ifdef MPS_HAS_AIO
    if (ring->kind == MPS_RING_AIO) return mps_aio_reap(ring, least, answers);
#endif
#ifdef MPS_HAS_URING
    if (ring->kind == MPS_RING_URING) return mps_uring_reap(ring, least, answers);
#endif
    return -ENOSYS;
}

#endif
