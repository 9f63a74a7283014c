// Runs CUDA kernels on the CPU, for tests: what a kernel's text needs to be compiled by g++, and what launches it.
//
// One thread block at a time, one fiber per CUDA thread, one fiber at a time. A warp runs until all its lanes wait, then the
// next warp does, so that warps are as far apart as barriers let them be; in a second run threads, warps and blocks go in
// reverse. What a GPU leaves undefined is made visible:
// - shared memory starts as 0xff bytes (NaN in every element type) and ends at a page that cannot be touched;
// - what cp.async copies is 0xff from its start to the wait of its thread;
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

namespace host_run {

constexpr size_t kStackBytes = 256 << 10, kPage = 4096, kStride = kStackBytes + kPage;
constexpr size_t kMaxThreads = 1024, kMaxShared = 228 << 10;

// Where a thread stopped: an operation of its warp, or a barrier of its block.
struct Site {
    const char* what = nullptr;
    const char* file = nullptr;
    int line = 0;
    bool operator==(const Site& other) const {
        return strcmp(what, other.what) == 0 && strcmp(file, other.file) == 0 && line == other.line;
    }
};
#define PAGEKV_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// What a warp operation does once all lanes of its mask are there: reads and writes their operands.
typedef void (*Resolve)(void** operands, unsigned mask);

struct AsyncCopy { char* to; char bytes[16]; };

struct Thread {
    enum State { kReady, kBarrier, kWarp, kDone } state = kDone;
    Site site;
    unsigned mask = 0;
    Resolve resolve = nullptr;
    void* operand = nullptr;
    void* stack_pointer = nullptr;
    ucontext_t context;
    std::vector<std::vector<AsyncCopy>> groups;  // of cp.async, the last one open
};

struct Run {
    std::vector<Thread> threads;
    Thread* current = nullptr;
    void (*call)(const void*) = nullptr;
    const void* params = nullptr;
    char* stacks = nullptr;
    char* shared_end = nullptr;  // the first byte of the page behind shared memory
    char* shared = nullptr;
    void* scheduler = nullptr;
    ucontext_t scheduler_context;
    pthread_t owner;
    volatile bool running = false;
    char error[4096] = "";
};
static Run run;

// --- switching between fibers: by hand where the way is known, because swapcontext costs a system call

#if defined(__x86_64__) && !defined(PAGEKV_HOST_UCONTEXT)
extern "C" __attribute__((visibility("hidden"))) void pagekv_host_switch(void** save, void* load);
asm(".text\n.hidden pagekv_host_switch\n.globl pagekv_host_switch\n.type pagekv_host_switch,@function\n"
    "pagekv_host_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size pagekv_host_switch,.-pagekv_host_switch\n");
inline void to_scheduler() { pagekv_host_switch(&run.current->stack_pointer, run.scheduler); }
inline void to_thread(Thread& thread) { pagekv_host_switch(&run.scheduler, thread.stack_pointer); }
inline void prepare(Thread& thread, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes) - 2;
    *top = reinterpret_cast<void*>(entry);
    thread.stack_pointer = top - 6;  // the registers that the switch takes from the stack
    memset(thread.stack_pointer, 0, 6 * sizeof(void*));
}
#else
inline void to_scheduler() { swapcontext(&run.current->context, &run.scheduler_context); }
inline void to_thread(Thread& thread) { swapcontext(&run.scheduler_context, &thread.context); }
inline void prepare(Thread& thread, char* stack, void (*entry)()) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stack;
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, entry, 0);
}
#endif

// --- errors

inline size_t index_of(const Thread& thread) { return &thread - run.threads.data(); }

__attribute__((format(printf, 1, 2))) inline void note(const char* format, ...) {
    if (run.error[0]) return;  // the first one is the cause
    va_list arguments;
    va_start(arguments, format);
    int used = vsnprintf(run.error, sizeof run.error, format, arguments);
    va_end(arguments);
    if (run.current != nullptr && used >= 0 && static_cast<size_t>(used) < sizeof run.error)
        snprintf(run.error + used, sizeof run.error - used, " (thread %zu of block %u,%u,%u)", index_of(*run.current),
                 blockIdx.x, blockIdx.y, blockIdx.z);
}

// Ends the launch: the fiber is left where it is.
#define PAGEKV_HOST_FAIL(...) (host_run::note(__VA_ARGS__), host_run::abandon())
inline void abandon() {
    if (run.current != nullptr) to_scheduler();
}

// Where in the library an instruction is, for host_build.py to find its line.
inline size_t offset_of(const void* instruction) {
    Dl_info library = {};
    dladdr(instruction, &library);
    return static_cast<const char*>(instruction) - static_cast<const char*>(library.dli_fbase);
}

// Signals on the fiber's own behalf: a trap of the undefined-behaviour checks, a wrong address, the time limit.
inline void on_signal(int number, siginfo_t* info, void* context) {
    if (number == SIGVTALRM && !(run.running && pthread_equal(pthread_self(), run.owner))) {
        if (run.running) pthread_kill(run.owner, number);  // any thread of the process may be interrupted
        return;
    }
    if (!run.running || run.current == nullptr || !pthread_equal(pthread_self(), run.owner)) {
        signal(number, SIG_DFL);  // not a kernel's fault: fails again, for good
        return;
    }
    if (number == SIGVTALRM) {
        note("the launch takes too long: a loop that does not end?");
    } else {
        uintptr_t at = 0;
#if defined(__x86_64__)
        at = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
#endif
        const char* what = number == SIGILL ? "undefined behaviour (overflow, shift, misaligned access or array bound)"
                           : number == SIGFPE ? "division by zero"
                                              : "access to a wrong address";
        note("%s, address %p, at offset 0x%zx", what, info->si_addr,
             offset_of(reinterpret_cast<void*>(at)));
    }
    to_scheduler();
}

#ifdef __SANITIZE_ADDRESS__
// What the library's interceptors (memcpy) report.
inline void on_address_error(const char* report) {
    const char* first = strstr(report, "ERROR: ");
    note("%.1500s", first ? first : report);
}

inline void bad_access(const char* what, const void* address, size_t bytes, const void* caller) {
    PAGEKV_HOST_FAIL("AddressSanitizer: %s of %zu bytes at %p, which is not the launch's, at offset 0x%zx", what, bytes,
                     address, offset_of(caller) - 1);
}
#endif

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

inline void run_block(size_t count, size_t shared_bytes, bool reversed) {
    run.shared = run.shared_end - (shared_bytes + 15) / 16 * 16;
    memset(run.shared, 0xff, run.shared_end - run.shared);
    if (__start_pagekv_shared != nullptr)
        memset(__start_pagekv_shared, 0xff, __stop_pagekv_shared - __start_pagekv_shared);
    for (size_t i = 0; i < count; ++i) {
        run.threads[i].state = Thread::kReady;
        run.threads[i].groups.assign(1, {});
        prepare(run.threads[i], run.stacks + i * kStride + kPage, entry);
    }
    const size_t warps = (count + 31) / 32;
    while (true) {
        for (size_t i = 0; i < warps && !run.error[0]; ++i) {
            const size_t warp = reversed ? warps - 1 - i : i;
            run_warp(warp * 32, warp * 32 + 32 < count ? warp * 32 + 32 : count, reversed);
        }
        if (run.error[0]) return;
        const Thread& first = run.threads[0];
        for (size_t i = 1; i < count; ++i) {
            const Thread& other = run.threads[i];
            if (other.state != first.state || (first.state == Thread::kBarrier && !(other.site == first.site)))
                return complain("all threads must come to the same barrier", first, other);
        }
        if (first.state == Thread::kDone) return;
        for (size_t i = 0; i < count; ++i) run.threads[i].state = Thread::kReady;
    }
}

inline char* reserve(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    return static_cast<char*>(memory);
}

// Below every stack, and around shared memory, is a page that cannot be touched.
inline void set_up(size_t threads) {
    if (run.shared_end == nullptr) {
        char* shared = reserve(kPage + kMaxShared + kPage);
        mprotect(shared, kPage, PROT_NONE);
        mprotect(shared + kPage + kMaxShared, kPage, PROT_NONE);
        run.shared_end = shared + kPage + kMaxShared;
    }
    if (run.threads.size() >= threads) return;
    if (run.stacks != nullptr) munmap(run.stacks, run.threads.size() * kStride);
    run.threads.resize(threads);
    run.stacks = reserve(threads * kStride);
    for (size_t i = 0; i < threads; ++i) mprotect(run.stacks + i * kStride, kPage, PROT_NONE);
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
    return run.error;
}

}  // namespace host_run

#ifdef __SANITIZE_ADDRESS__
// In place of the library's functions of these names, which would let a kernel go on and write where it must not.
#define PAGEKV_HOST_REPORT(kind, bytes) \
    extern "C" __attribute__((visibility("hidden"))) void __asan_report_##kind##bytes##_noabort(void* address) { \
        host_run::bad_access(#kind, address, bytes, __builtin_return_address(0)); \
    }
#define PAGEKV_HOST_REPORTS(kind) \
    PAGEKV_HOST_REPORT(kind, 1) PAGEKV_HOST_REPORT(kind, 2) PAGEKV_HOST_REPORT(kind, 4) PAGEKV_HOST_REPORT(kind, 8) \
    PAGEKV_HOST_REPORT(kind, 16) \
    extern "C" __attribute__((visibility("hidden"))) void __asan_report_##kind##_n_noabort(void* address, size_t bytes) { \
        host_run::bad_access(#kind, address, bytes, __builtin_return_address(0)); \
    }
PAGEKV_HOST_REPORTS(load)
PAGEKV_HOST_REPORTS(store)
#endif

#include "host_builtins.h"

// At the end of a kernel's text: what host_build.py calls. Returns what went wrong, or an empty string.
#define PAGEKV_HOST_KERNEL(name) \
    extern "C" const char* pagekv_host_launch(const host_run::Launch* launch) { return host_run::launch(name, *launch); }
