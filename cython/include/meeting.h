/* Processes meet at a counter in memory that all of them have mapped.
 *
 * Each adds one; the counter never goes back, so a meeting is over once it has reached size times the number of
 * meetings. Whoever waits reads one word, for a short time awake and then asleep on a futex, and the last to arrive wakes
 * all sleepers with one call, or with none if nobody sleeps.
 *
 * What was written before arriving is seen by everybody after waiting: the additions release and acquire.
 * Source: Drepper, "Futexes Are Tricky", 2011. */
#ifndef MPISPEED_MEETING_H
#define MPISPEED_MEETING_H

#include <limits.h>
#include <stdint.h>
#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MPS_POLLS 16 /* between two looks at the clock */
#define MPS_LINE 64  /* bytes that no other word shares, so that a core which polls keeps its copy */

typedef struct {
    uint32_t arrived;
    char apart[MPS_LINE - sizeof(uint32_t)];
    uint32_t asleep;
    char end[MPS_LINE - sizeof(uint32_t)];
} mps_door;

static inline void mps_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline int64_t mps_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int mps_has_reached(uint32_t arrived, uint32_t target) { return (int32_t)(arrived - target) >= 0; }

/* Sleep while the counter is `seen`, at most `nap_ns`; also until a signal comes, or for no reason. */
static inline void mps_sleep(mps_door *door, uint32_t seen, int64_t nap_ns) {
    struct timespec nap = {(time_t)(nap_ns / 1000000000), (long)(nap_ns % 1000000000)};
#ifdef __linux__
    syscall(SYS_futex, &door->arrived, FUTEX_WAIT, seen, &nap, NULL, 0);
#else
    struct timespec least = {0, 20000};
    (void)door, (void)seen;
    nanosleep(nap_ns > 20000 ? &least : &nap, NULL);
#endif
}

/* Add this process to the meeting that is complete at `target`. */
static inline void mps_arrive(mps_door *door, uint32_t target) {
    uint32_t arrived = __atomic_add_fetch(&door->arrived, 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    /* A sleeper counts itself before it looks at the counter for the last time: one of us sees the other. */
    if (arrived == target && __atomic_load_n(&door->asleep, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &door->arrived, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#else
    (void)arrived;
#endif
}

/* Wait awake for `spin_ns`, then asleep once for at most `nap_ns`. Returns 1 once all have come, else 0. */
static inline int mps_wait(mps_door *door, uint32_t target, int64_t spin_ns, int64_t nap_ns) {
    if (mps_has_reached(__atomic_load_n(&door->arrived, __ATOMIC_ACQUIRE), target)) return 1;
    if (spin_ns > 0) {
        int64_t end = mps_now() + spin_ns;
        do {
            for (int i = 0; i < MPS_POLLS; i++) {
                if (mps_has_reached(__atomic_load_n(&door->arrived, __ATOMIC_ACQUIRE), target)) return 1;
                mps_pause();
            }
        } while (mps_now() < end);
    }
    __atomic_add_fetch(&door->asleep, 1, __ATOMIC_SEQ_CST);
    int64_t until = mps_now() + nap_ns;
    int is_over;
    for (;;) {
        uint32_t seen = __atomic_load_n(&door->arrived, __ATOMIC_SEQ_CST);
        is_over = mps_has_reached(seen, target);
        int64_t left = until - mps_now();
        if (is_over || left <= 0) break;
        mps_sleep(door, seen, left);
    }
    __atomic_sub_fetch(&door->asleep, 1, __ATOMIC_SEQ_CST);
    return is_over;
}

#endif
