// The kernels' language on the host, for tests: the same .cu files compiled by a C++17 compiler.
//
// Every thread of a block is a fiber; blocks run one after another (or on OpenMP threads). A barrier or a shuffle
// switches fibers, so a missing barrier gives wrong results in one of the two orders of warps
// (mpispeed_host_reverse), and one that not all threads reach ends the process with a message. Dynamic shared
// memory starts as NaN. Fibers have a guard page. Not modelled: memory spaces, the order of atomics, fused arithmetic.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __grid_constant__
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __restrict__ __restrict
#define __shared__ static thread_local

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static constexpr int warpSize = 32;

// ---- 16-bit numbers, rounded to nearest even -----------------------------------------------------------------
struct __half { _Float16 value; };
struct __nv_bfloat16 { uint16_t bits; };
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __bfloat162float(__nv_bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)}; }
inline float __low2float(__half2 a) { return __half2float(a.x); }
inline float __high2float(__half2 a) { return __half2float(a.y); }
// The other one where one is NaN, as the device has it.
inline __half2 __hmax2(__half2 a, __half2 b) {
    return __floats2half2_rn(fmaxf(__half2float(a.x), __half2float(b.x)), fmaxf(__half2float(a.y), __half2float(b.y)));
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(fmaxf(__bfloat162float(a.x), __bfloat162float(b.x)),
                                 fmaxf(__bfloat162float(a.y), __bfloat162float(b.y)));
}

// ---- arithmetic ----------------------------------------------------------------------------------------------
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frsqrt_rn(float a) { return 1.0f / sqrtf(a); }
inline float __expf(float a) { return expf(a); }
inline float __logf(float a) { return logf(a); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline double rsqrt(double a) { return 1.0 / sqrt(a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsqrt_rn(double a) { return sqrt(a); }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline int __float2int_rn(float a) { return static_cast<int>(nearbyintf(a)); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline double __hiloint2double(int high, int low) {
    const uint64_t bits = (static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32) | static_cast<uint32_t>(low);
    double out;
    memcpy(&out, &bits, 8);
    return out;
}
inline long long __double_as_longlong(double a) { long long out; memcpy(&out, &a, 8); return out; }
inline double __longlong_as_double(long long a) { double out; memcpy(&out, &a, 8); return out; }
inline unsigned __float_as_uint(float a) { unsigned out; memcpy(&out, &a, 4); return out; }
inline float __uint_as_float(unsigned a) { float out; memcpy(&out, &a, 4); return out; }
inline int __float_as_int(float a) { return static_cast<int>(__float_as_uint(a)); }
inline float __int_as_float(int a) { return __uint_as_float(static_cast<unsigned>(a)); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __clz(int a) { return a ? __builtin_clz(static_cast<unsigned>(a)) : 32; }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline unsigned __brev(unsigned a) {
    unsigned out = 0;
    for (int i = 0; i < 32; i++) out |= ((a >> i) & 1u) << (31 - i);
    return out;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t all = static_cast<uint64_t>(b) << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= static_cast<unsigned>(all >> (8 * ((selector >> (4 * i)) & 7u)) & 0xffu) << (8 * i);
    return out;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32); }
template <class T> inline T __ldg(const T* at) { return *at; }
template <class T> inline T __ldcs(const T* at) { return *at; }
template <class T> inline void __stcs(T* at, T x) { *at = x; }
template <class T> inline void __stcg(T* at, T x) { *at = x; }
using std::max;
using std::min;

// ---- fibers --------------------------------------------------------------------------------------------------
namespace mpispeed_host {

enum State { kReady, kAtBlock, kAtWarp, kDone };
struct Fiber {
    ucontext_t context;
    void* stack_pointer;
    State state;
    dim3 thread;
    unsigned number;
};
struct Block {
    dim3 grid, block, index;
    unsigned threads;
    std::vector<unsigned char> shared;
};
inline thread_local Block* block;
inline thread_local unsigned number;  // of the running thread in its block
inline thread_local dim3 thread;
inline bool is_reversed = false;  // the order in which warps, and threads of a warp, take their turns

constexpr size_t kGuard = 4096, kStack = 128 * 1024;  // the guard page is the lowest of a stack

#if defined(__x86_64__)
// Saves and restores what the calling convention keeps, no signal mask: ten times faster than swapcontext.
extern "C" void mpispeed_fiber_switch(void** save, void* load);
__asm__(R"(
.pushsection .text
.weak mpispeed_fiber_switch
.type mpispeed_fiber_switch,@function
mpispeed_fiber_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.popsection
)");
#endif

class Scheduler {
  public:
    void run(const std::function<void()>& body) {
        start(body);
        while (done_ < fibers_.size()) {
            bool moved = false;
            const unsigned warps = static_cast<unsigned>(at_warp_.size());
            for (unsigned w = 0; w < warps; w++) moved |= run_warp(is_reversed ? warps - 1 - w : w);
            if (at_block_ && at_block_ + done_ == fibers_.size()) {
                if (done_) fail("a barrier of the block is reached by some threads, and others have ended");
                at_block_ = 0;
                for (Fiber& fiber : fibers_)
                    if (fiber.state == kAtBlock) fiber.state = kReady;
                moved = true;
            }
            if (!moved && done_ < fibers_.size()) fail("threads wait at different barriers");
        }
    }
    void wait_block() {
        at_block_++;
        leave(kAtBlock);
    }
    void wait_warp() {
        at_warp_[current_->number >> 5]++;
        leave(kAtWarp);
    }
    uint64_t* mailbox() { return mailbox_.data(); }

  private:
    std::vector<Fiber> fibers_;
    std::vector<uint64_t> mailbox_;
    std::vector<unsigned> at_warp_, done_in_warp_;
    unsigned at_block_ = 0, done_ = 0;
    const std::function<void()>* body_ = nullptr;
    Fiber* current_ = nullptr;
    char* stacks_ = nullptr;
    size_t room_ = 0;
    ucontext_t main_;
    void* main_pointer_ = nullptr;

    [[noreturn]] static void fail(const char* why) {
        fprintf(stderr, "kernel on the host: %s (block %u %u %u)\n", why, block->index.x, block->index.y, block->index.z);
        abort();
    }
    static Scheduler*& self() {
        static thread_local Scheduler* instance;
        return instance;
    }
    static void entry() {
        Scheduler* me = self();
        (*me->body_)();
        me->done_++;
        me->done_in_warp_[me->current_->number >> 5]++;
        me->leave(kDone);
    }
    void leave(State state) {
        Fiber* fiber = current_;
        fiber->state = state;
#if defined(__x86_64__)
        mpispeed_fiber_switch(&fiber->stack_pointer, main_pointer_);
#else
        swapcontext(&fiber->context, &main_);
#endif
    }
    void enter(Fiber& fiber) {
        current_ = &fiber;
        number = fiber.number;
        thread = fiber.thread;
#if defined(__x86_64__)
        mpispeed_fiber_switch(&main_pointer_, fiber.stack_pointer);
#else
        swapcontext(&main_, &fiber.context);
#endif
    }
    void make_room(size_t count) {
        if (room_ >= count) return;
        if (stacks_) munmap(stacks_, room_ * kStack);
        stacks_ = static_cast<char*>(
            mmap(nullptr, count * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (stacks_ == MAP_FAILED) fail("no memory for stacks");
        for (size_t i = 0; i < count; i++) mprotect(stacks_ + i * kStack, kGuard, PROT_NONE);
        room_ = count;
    }
    void start(const std::function<void()>& body) {
        const unsigned count = block->threads, warps = (count + 31) / 32;
        self() = this;
        body_ = &body;
        make_room(count);
        fibers_.resize(count);
        mailbox_.assign(count, 0);
        at_warp_.assign(warps, 0);
        done_in_warp_.assign(warps, 0);
        at_block_ = done_ = 0;
        for (unsigned i = 0; i < count; i++) {
            Fiber& fiber = fibers_[i];
            fiber.number = i;
            fiber.state = kReady;
            fiber.thread = dim3(i % block->block.x, i / block->block.x % block->block.y,
                                i / (block->block.x * block->block.y));
#if defined(__x86_64__)
            void** top = reinterpret_cast<void**>(stacks_ + (i + 1) * kStack);
            *--top = nullptr;  // entry finds the stack as after a call: 8 bytes below a multiple of 16
            *--top = reinterpret_cast<void*>(&entry);
            for (int k = 0; k < 6; k++) *--top = nullptr;
            fiber.stack_pointer = top;
#else
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = stacks_ + i * kStack + kGuard;
            fiber.context.uc_stack.ss_size = kStack - kGuard;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, &entry, 0);
#endif
        }
    }
    bool run_warp(unsigned warp) {
        const unsigned begin = warp * 32, end = std::min<unsigned>(static_cast<unsigned>(fibers_.size()), begin + 32);
        bool moved = false, again = true;
        while (again) {
            again = false;
            for (unsigned k = begin; k < end; k++) {
                Fiber& fiber = fibers_[is_reversed ? end - 1 - (k - begin) : k];
                if (fiber.state != kReady) continue;
                enter(fiber);
                moved = true;
            }
            if (at_warp_[warp] && at_warp_[warp] + done_in_warp_[warp] == end - begin) {
                at_warp_[warp] = 0;
                for (unsigned k = begin; k < end; k++)
                    if (fibers_[k].state == kAtWarp) fibers_[k].state = kReady;
                again = true;
            }
        }
        return moved;
    }
};
inline thread_local Scheduler scheduler;

template <class T>
inline T exchange(T x, unsigned lane) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t word = 0;
    memcpy(&word, &x, sizeof(T));
    const unsigned me = number, from = (me & ~31u) + lane;
    scheduler.mailbox()[me] = word;
    scheduler.wait_warp();
    word = scheduler.mailbox()[from < block->threads ? from : me];
    scheduler.wait_warp();
    T out;
    memcpy(&out, &word, sizeof(T));
    return out;
}

}  // namespace mpispeed_host

#define threadIdx (::mpispeed_host::thread)
#define blockIdx (::mpispeed_host::block->index)
#define blockDim (::mpispeed_host::block->block)
#define gridDim (::mpispeed_host::block->grid)
inline void __syncthreads() { mpispeed_host::scheduler.wait_block(); }
inline void __syncwarp(unsigned = ~0u) { mpispeed_host::scheduler.wait_warp(); }
inline void __threadfence() {}
template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask, int = 32) {
    return mpispeed_host::exchange(x, (mpispeed_host::number & 31) ^ static_cast<unsigned>(mask));
}
template <class T> inline T __shfl_sync(unsigned, T x, int lane, int width = 32) {
    return mpispeed_host::exchange(x, (mpispeed_host::number & 31) / width * width + lane % width);
}
template <class T> inline T __shfl_down_sync(unsigned, T x, unsigned by, int width = 32) {
    const unsigned lane = mpispeed_host::number & 31;
    return mpispeed_host::exchange(x, lane % width + by < static_cast<unsigned>(width) ? lane + by : lane);
}
template <class T> inline T __shfl_up_sync(unsigned, T x, unsigned by, int width = 32) {
    const unsigned lane = mpispeed_host::number & 31;
    return mpispeed_host::exchange(x, lane % width >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned, int truth) {
    const unsigned me = mpispeed_host::number, base = me & ~31u;
    uint64_t* mailbox = mpispeed_host::scheduler.mailbox();
    mailbox[me] = truth ? 1 : 0;
    mpispeed_host::scheduler.wait_warp();
    unsigned out = 0;
    for (unsigned i = 0; i < 32 && base + i < mpispeed_host::block->threads; i++)
        out |= static_cast<unsigned>(mailbox[base + i]) << i;
    mpispeed_host::scheduler.wait_warp();
    return out;
}
inline int __any_sync(unsigned mask, int truth) { return __ballot_sync(mask, truth) != 0; }
inline int __syncthreads_or(int truth) {
    static thread_local int found;
    __syncthreads();
    found = 0;
    __syncthreads();
    if (truth) found = 1;
    __syncthreads();
    return found;
}
template <class T> inline T atomicAdd(T* at, T x) {
    T old, sum;
    __atomic_load(at, &old, __ATOMIC_RELAXED);
    do sum = old + x;
    while (!__atomic_compare_exchange(at, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
template <class T> inline T atomicOr(T* at, T x) { return __atomic_fetch_or(at, x, __ATOMIC_RELAXED); }
template <class T> inline T atomicMax(T* at, T x) {
    T old;
    __atomic_load(at, &old, __ATOMIC_RELAXED);
    while (old < x && !__atomic_compare_exchange(at, &old, &x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
#define MPISPEED_DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(::mpispeed_host::block->shared.data())

// ---- launches: the packed argument buffer is the one that the driver would get ---------------------------------
namespace mpispeed_host {

enum Result { kRan = 0, kUnknown = 1, kWrongArguments = 2 };
using Entry = int (*)(dim3, dim3, size_t, const char*, size_t);

template <class T>
inline size_t placed(size_t offset) {
    return (offset + alignof(T) - 1) / alignof(T) * alignof(T);
}
template <class T>
inline T take(const char* buffer, size_t& offset) {
    offset = placed<T>(offset);
    T out;
    memcpy(&out, buffer + offset, sizeof(T));
    offset += sizeof(T);
    return out;
}
template <class... A>
int launch(void (*kernel)(A...), dim3 grid, dim3 threads, size_t shared, const char* buffer, size_t length, bool syncs) {
    size_t needed = 0;
    ((needed = placed<std::decay_t<A>>(needed) + sizeof(std::decay_t<A>)), ...);
    if (needed != length) return kWrongArguments;
    size_t offset = 0;
    const std::tuple<std::decay_t<A>...> args{take<std::decay_t<A>>(buffer, offset)...};
    const std::function<void()> body = [&] { std::apply(kernel, args); };
    const long blocks = static_cast<long>(grid.x) * grid.y * grid.z;
#pragma omp parallel
    {
        Block mine;
        mine.grid = grid;
        mine.block = threads;
        mine.threads = threads.x * threads.y * threads.z;
        mine.shared.resize(shared + 16);
        block = &mine;
#pragma omp for schedule(dynamic, 1)
        for (long at = 0; at < blocks; at++) {
            mine.index = dim3(static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                              static_cast<unsigned>(at / (static_cast<long>(grid.x) * grid.y)));
            memset(mine.shared.data(), 0xff, mine.shared.size());
            if (syncs) {
                scheduler.run(body);
                continue;
            }
            for (number = 0; number < mine.threads; number++) {
                thread = dim3(number % threads.x, number / threads.x % threads.y, number / (threads.x * threads.y));
                body();
            }
        }
    }
    return kRan;
}
inline std::map<std::string, Entry>& entries() {
    static std::map<std::string, Entry> table;
    return table;
}
struct Enter {
    Enter(const char* name, Entry entry) { entries()[name] = entry; }
};

}  // namespace mpispeed_host

#define MPISPEED_HOST_ENTRY(name, syncs)                                                                       \
    static ::mpispeed_host::Enter enter_##name(                                                                \
        #name, [](dim3 grid, dim3 threads, size_t shared, const char* buffer, size_t length) {                 \
            return ::mpispeed_host::launch(&name, grid, threads, shared, buffer, length, syncs);               \
        });
#define MPISPEED_KERNEL(name) MPISPEED_HOST_ENTRY(name, false)
#define MPISPEED_KERNEL_SYNC(name) MPISPEED_HOST_ENTRY(name, true)

extern "C" __attribute__((weak)) void mpispeed_host_reverse(int truth) { mpispeed_host::is_reversed = truth != 0; }
extern "C" __attribute__((weak)) int mpispeed_host_launch(const char* name, const unsigned* grid, const unsigned* threads,
                                                          size_t shared, const char* buffer, size_t length) {
    const auto found = mpispeed_host::entries().find(name);
    if (found == mpispeed_host::entries().end()) return mpispeed_host::kUnknown;
    return found->second(dim3(grid[0], grid[1], grid[2]), dim3(threads[0], threads[1], threads[2]), shared, buffer, length);
}
