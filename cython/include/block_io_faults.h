/* Faults of the block I/O for tests: an errno or a short transfer in place of a result, and latency. */
#ifndef MPISPEED_BLOCK_IO_FAULTS_H
#define MPISPEED_BLOCK_IO_FAULTS_H

#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

enum { MPS_FAULT_READ, MPS_FAULT_WRITE, MPS_FAULT_SUBMIT, MPS_FAULT_REAP, MPS_FAULT_KINDS };

typedef struct {
    int error;          /* in place of the call */
    uint64_t bytes;     /* report at most so many; UINT64_MAX: as they are */
    double seconds;     /* before the result */
} mps_fault;

static struct {
    pthread_mutex_t lock;
    uint64_t nth[MPS_FAULT_KINDS], bytes[MPS_FAULT_KINDS];   /* nth counts down to the call that is hit, 0: none */
    int error[MPS_FAULT_KINDS];
    double seconds;
    int is_armed;                /* atomic */
} mps_faults = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void mps_arm(void) {
    int on = mps_faults.seconds > 0;
    for (int kind = 0; kind < MPS_FAULT_KINDS; kind++) on |= mps_faults.nth[kind] > 0;
    __atomic_store_n(&mps_faults.is_armed, on, __ATOMIC_RELEASE);
}

/* The nth call of a kind from now: come short at `bytes` if there are any, fail with `error` if there is one. */
static void mps_inject(int kind, uint64_t nth, int error, uint64_t bytes) {
    pthread_mutex_lock(&mps_faults.lock);
    mps_faults.nth[kind] = nth;
    mps_faults.error[kind] = error;
    mps_faults.bytes[kind] = bytes;
    mps_arm();
    pthread_mutex_unlock(&mps_faults.lock);
}

static void mps_inject_latency(double seconds) {
    pthread_mutex_lock(&mps_faults.lock);
    mps_faults.seconds = seconds;
    mps_arm();
    pthread_mutex_unlock(&mps_faults.lock);
}

/* What happens to the next call. */
static mps_fault mps_next_fault(int kind) {
    mps_fault fault = {0, UINT64_MAX, 0.0};
    if (!__atomic_load_n(&mps_faults.is_armed, __ATOMIC_ACQUIRE)) return fault;
    pthread_mutex_lock(&mps_faults.lock);
    fault.seconds = mps_faults.seconds;
    if (mps_faults.nth[kind] && --mps_faults.nth[kind] == 0) {
        if (mps_faults.bytes[kind]) {
            fault.bytes = mps_faults.bytes[kind];
            mps_faults.bytes[kind] = 0;
            mps_faults.nth[kind] = mps_faults.error[kind] ? 1 : 0;  /* the rest of it fails */
        } else {
            fault.error = mps_faults.error[kind];
        }
        mps_arm();
    }
    pthread_mutex_unlock(&mps_faults.lock);
    return fault;
}

static ssize_t mps_shorten(ssize_t got, mps_fault fault) {
    return got > 0 && (uint64_t)got > fault.bytes ? (ssize_t)fault.bytes : got;
}

static void mps_sleep(double seconds) {
    struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (seconds > 0 && nanosleep(&pause, &pause)) {}
}

#endif
