// Runs CUDA kernels on the CPU, for tests: what a kernel's text needs to be compiled by g++, and what launches it.
//
// One thread block at a time, one fiber per CUDA thread, one fiber at a time. A warp runs until all its lanes wait, then the
// next warp does, so that warps are as far apart as barriers let them be; in a second run threads, warps and blocks go in
// reverse. What a GPU leaves undefined is made visible:
// - shared memory starts as 0xff bytes (NaN in every element type) and ends at a page that cannot be touched;
// - what cp.async copies is 0xff from its start to the wait of its thread;
// - a product of a warpgroup reads its operands, and writes its result, 0xff before, when its warp waits for it and no other
//   thread can go on;
// - locals that were not initialised hold a pattern, undefined arithmetic and misaligned accesses trap (compiler flags);
// - a barrier, shuffle or matrix instruction that not all of its threads reach at the same place ends the launch, as do a
//   wrong address, an address that is not shared where it must be, and a launch that takes too long. `launch` says which.
#pragma once
#define PAGEKV_HOST 1
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// In a section of their own, so that a launch can fill them with 0xff. Only inside a kernel, not in templates.
#define __shared__ static __attribute__((section("pagekv_shared")))

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static dim3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

extern "C" char __start_pagekv_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_pagekv_shared[] __attribute__((weak, visibility("hidden")));

#include "host_fibers.h"

namespace host_run {

// --- waiting

inline void wait(Thread::State state, const Site& site) {
    Thread& self = *run.current;
    self.state = state;
    self.site = site;
    to_scheduler();
}

inline unsigned lane() { return index_of(*run.current) % 32; }

inline void warp_operation(const Site& site, unsigned mask, void* operand, Resolve resolve) {
    Thread& self = *run.current;
    if (!(mask >> lane() & 1))
        PAGEKV_HOST_FAIL("%s:%d: %s: lane %u is not in its own mask 0x%08x", site.file, site.line, site.what, lane(), mask);
    self.mask = mask;
    self.operand = operand;
    self.resolve = resolve;
    wait(Thread::kWarp, site);
}

// Lets every complete group of waiting lanes go on. False: none was complete.
inline bool release(size_t begin, size_t end) {
    bool any = false;
    for (size_t first = begin; first < end; ++first) {
        Thread& leader = run.threads[first];
        if (leader.state != Thread::kWarp) continue;
        void* operands[32] = {};
        bool complete = true;
        for (unsigned i = 0; i < 32 && complete; ++i) {
            if (!(leader.mask >> i & 1)) continue;
            complete = begin + i < end;
            if (!complete) break;
            const Thread& other = run.threads[begin + i];
            complete = other.state == Thread::kWarp && other.mask == leader.mask && other.site == leader.site;
            operands[i] = other.operand;
        }
        if (!complete) continue;
        const unsigned mask = leader.mask;
        if (leader.resolve != nullptr) leader.resolve(operands, mask);
        for (unsigned i = 0; i < 32; ++i)
            if (mask >> i & 1) run.threads[begin + i].state = Thread::kReady;
        any = true;
    }
    return any;
}

inline void describe(const Thread& thread, char* text, size_t size) {
    if (thread.state == Thread::kDone)
        snprintf(text, size, "thread %zu has left the kernel", index_of(thread));
    else
        snprintf(text, size, "thread %zu is at %s (%s:%d)", index_of(thread), thread.site.what, thread.site.file,
                 thread.site.line);
}

inline void complain(const char* rule, const Thread& one, const Thread& other) {
    char first[300], second[300];
    describe(one, first, sizeof first);
    describe(other, second, sizeof second);
    note("%s: %s, but %s (block %u,%u,%u)", rule, first, second, blockIdx.x, blockIdx.y, blockIdx.z);
}

inline void resume(Thread& thread) {
    const size_t index = index_of(thread);
    threadIdx.x = index % blockDim.x;
    threadIdx.y = index / blockDim.x % blockDim.y;
    threadIdx.z = index / blockDim.x / blockDim.y;
    run.current = &thread;
    to_thread(thread);
    run.current = nullptr;
}

// Runs a warp until every lane waits for its block or has left.
inline void run_warp(size_t begin, size_t end, bool reversed) {
    while (true) {
        for (size_t i = begin; i < end; ++i) {
            Thread& thread = run.threads[reversed ? begin + end - 1 - i : i];
            if (thread.state == Thread::kReady) resume(thread);
            if (run.error[0]) return;
        }
        if (release(begin, end)) continue;
        if (run.error[0]) return;
        for (size_t i = begin; i < end; ++i) {
            const Thread& thread = run.threads[i];
            if (thread.state != Thread::kWarp) continue;
            for (size_t j = begin; j < end; ++j) {
                const Thread& other = run.threads[j];
                const bool there = other.state == Thread::kWarp && other.mask == thread.mask && other.site == thread.site;
                if ((thread.mask >> (j - begin) & 1) && !there)
                    return complain("lanes of one mask must come to the same place", thread, other);
            }
            note("%s:%d: %s: mask 0x%08x names lanes that the block does not have", thread.site.file, thread.site.line,
                 thread.site.what, thread.mask);
            return;
        }
        return;
    }
}

inline void entry() {
    run.call(run.params);
    run.current->state = Thread::kDone;
    to_scheduler();
    abort();  // nobody resumes a thread that left
}

// Lets threads go on whose condition has come true; else one warp that goes on as late as it can. False: there is none.
inline bool go_on(size_t count, bool reversed) {
    bool any = false;
    for (size_t i = 0; i < count; ++i) {
        Thread& thread = run.threads[i];
        if (thread.state != Thread::kUntil || !thread.until(thread)) continue;
        thread.state = Thread::kReady;
        any = true;
    }
    if (any) return true;
    for (size_t i = 0; i < count; ++i) {
        const size_t at = reversed ? count - 1 - i : i, begin = at / 32 * 32;
        if (run.threads[at].state != Thread::kLate) continue;
        for (size_t j = begin; j < count && j < begin + 32; ++j)
            if (run.threads[j].state == Thread::kLate) run.threads[j].state = Thread::kReady;
        return true;
    }
    return false;
}

// At the end of a block: four warps together execute each product.
inline void check_warpgroups(size_t count) {
    for (size_t i = 0; i < count; ++i)
        if (run.threads[i].num_products != run.threads[i / 128 * 128].num_products)
            return note("all warps of a warpgroup must execute its products: thread %zu did %u, thread %zu %u", i,
                        run.threads[i].num_products, i / 128 * 128, run.threads[i / 128 * 128].num_products);
}

inline void run_block(size_t count, size_t shared_bytes, bool reversed) {
    run.shared = run.shared_end - (shared_bytes + 15) / 16 * 16;
    memset(run.shared, 0xff, run.shared_end - run.shared);
    if (__start_pagekv_shared != nullptr)
        memset(__start_pagekv_shared, 0xff, __stop_pagekv_shared - __start_pagekv_shared);
    for (size_t i = 0; i < count; ++i) {
        run.threads[i].state = Thread::kReady;
        run.threads[i].groups.assign(1, {});
        run.threads[i].products.clear();
        run.threads[i].product_group = run.threads[i].num_products = 0;
        run.threads[i].fenced = false;
        prepare(run.threads[i], run.stacks + i * kStride + kPage, entry);
    }
    const size_t warps = (count + 31) / 32;
    while (true) {
        for (size_t i = 0; i < warps && !run.error[0]; ++i) {
            const size_t warp = reversed ? warps - 1 - i : i;
            run_warp(warp * 32, warp * 32 + 32 < count ? warp * 32 + 32 : count, reversed);
        }
        if (run.error[0]) return;
        if (go_on(count, reversed)) continue;
        const Thread& first = run.threads[0];
        for (size_t i = 0; i < count; ++i) {
            const Thread& other = run.threads[i];
            if (other.state == Thread::kUntil) return complain("a wait that does not end", other, first);
            if (other.state != first.state || (first.state == Thread::kBarrier && !(other.site == first.site)))
                return complain("all threads must come to the same barrier", first, other);
        }
        if (first.state == Thread::kDone) return check_warpgroups(count);
        for (size_t i = 0; i < count; ++i) run.threads[i].state = Thread::kReady;
    }
}

// What a launch is given, as host_build.py lays it out.
struct Launch {
    const void* params;
    u_int64_t params_bytes, shared_bytes;
    u_int32_t grid[3], threads, reversed, seconds;
};

template <typename Params> const char* launch(void (*kernel)(Params), const Launch& launch) {
    static void (*the_kernel)(Params);
    the_kernel = kernel;
    run.error[0] = 0;
    if (launch.params_bytes != sizeof(Params))
        note("the structure has %zu bytes, was given %zu", sizeof(Params), static_cast<size_t>(launch.params_bytes));
    else if (launch.threads == 0 || launch.threads > kMaxThreads || launch.shared_bytes > kMaxShared)
        note("%u threads, %zu bytes of shared memory: no GPU has that", launch.threads,
             static_cast<size_t>(launch.shared_bytes));
    if (run.error[0]) return run.error;
    set_up(launch.threads);
    run.params = launch.params;
    run.call = [](const void* params) { the_kernel(*static_cast<const Params*>(params)); };
    run.owner = pthread_self();

    static char signal_stack[64 << 10];
    stack_t alternate = {}, old_alternate;
    alternate.ss_sp = signal_stack;
    alternate.ss_size = sizeof signal_stack;
    sigaltstack(&alternate, &old_alternate);
    struct sigaction action = {}, old[5];
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    const int numbers[5] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
    for (int i = 0; i < 5; ++i) sigaction(numbers[i], &action, &old[i]);
    const itimerval limit = {{0, 0}, {static_cast<time_t>(launch.seconds), 0}}, never = {};
    setitimer(ITIMER_VIRTUAL, &limit, nullptr);
#ifdef __SANITIZE_ADDRESS__
    __asan_set_error_report_callback(on_address_error);
    __asan_unpoison_memory_region(run.stacks, run.threads.size() * kStride);  // fibers that were left
    __asan_unpoison_memory_region(signal_stack, sizeof signal_stack);
#endif
    run.running = true;
    gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    blockDim = {launch.threads, 1, 1};
    const u_int64_t blocks = u_int64_t{gridDim.x} * gridDim.y * gridDim.z;
    for (u_int64_t i = 0; i < blocks && !run.error[0]; ++i) {
        const u_int64_t index = launch.reversed ? blocks - 1 - i : i;
        blockIdx.x = index % gridDim.x;
        blockIdx.y = index / gridDim.x % gridDim.y;
        blockIdx.z = index / gridDim.x / gridDim.y;
        run_block(launch.threads, launch.shared_bytes, launch.reversed);
    }
    run.running = false;
    setitimer(ITIMER_VIRTUAL, &never, nullptr);
    for (int i = 0; i < 5; ++i) sigaction(numbers[i], &old[i], nullptr);
    sigaltstack(&old_alternate, nullptr);
    tear_down();
    return run.error;
}

}  // namespace host_run

#include "host_builtins.h"
#include "host_sm90a.h"

// At the end of a kernel's text: what host_build.py calls. Returns what went wrong, or an empty string.
#define PAGEKV_HOST_KERNEL(name) \
    extern "C" const char* pagekv_host_launch(const host_run::Launch* launch) { return host_run::launch(name, *launch); } \
    extern "C" u_int64_t pagekv_host_copied() { return host_run::run.copied; }
