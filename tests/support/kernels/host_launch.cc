// The run of a launch: fibers, memory, the order of threads, and all that ends it (errors of the emulation, signals,
// AddressSanitizer). See host_cuda.h.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>

#include <cstdarg>
#include <cstdio>

#include "host_fibers.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace host_run {

Run run;
char* shared = nullptr;
char* shared_end = nullptr;
u_int64_t copied = 0;

constexpr size_t kStackBytes = 256 << 10, kPage = 4096, kStride = kStackBytes + kPage;

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
void prepare(Thread& thread, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes) - 2;
    *top = reinterpret_cast<void*>(entry);
    thread.stack_pointer = top - 6;  // the registers that the switch takes from the stack
    memset(thread.stack_pointer, 0, 6 * sizeof(void*));
}
#else
inline void to_scheduler() { swapcontext(&run.current->context, &run.scheduler_context); }
inline void to_thread(Thread& thread) { swapcontext(&run.scheduler_context, &thread.context); }
void prepare(Thread& thread, char* stack, void (*entry)()) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stack;
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, entry, 0);
}
#endif

// --- errors

void note(const char* format, ...) {
    if (run.error[0]) return;  // the first one is the cause
    va_list arguments;
    va_start(arguments, format);
    int used = vsnprintf(run.error, sizeof run.error, format, arguments);
    va_end(arguments);
    if (run.current != nullptr && used >= 0 && static_cast<size_t>(used) < sizeof run.error)
        snprintf(run.error + used, sizeof run.error - used, " (thread %zu of block %u,%u,%u)", index_of(*run.current),
                 blockIdx.x, blockIdx.y, blockIdx.z);
}

void abandon() {
    if (run.current != nullptr) to_scheduler();
}

// Where in the library an instruction is, for host_build.py to find its line.
size_t offset_of(const void* instruction) {
    Dl_info library = {};
    dladdr(instruction, &library);
    return static_cast<const char*>(instruction) - static_cast<const char*>(library.dli_fbase);
}

// Signals on the fiber's own behalf: a trap of the undefined-behaviour checks, a wrong address, the time limit.
void on_signal(int number, siginfo_t* info, void* context) {
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
void on_address_error(const char* report) {
    const char* first = strstr(report, "ERROR: ");
    note("%.1500s", first ? first : report);
}

void bad_access(const char* what, const void* address, size_t bytes, const void* caller) {
    PAGEKV_HOST_FAIL("AddressSanitizer: %s of %zu bytes at %p, which is not the launch's, at offset 0x%zx", what, bytes,
                     address, offset_of(caller) - 1);
}
#endif

// --- memory

char* reserve(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    return static_cast<char*>(memory);
}

// Below every stack is a page that cannot be touched. One set for all libraries of a process: a stack is two mappings, of
// which a process has 65,530, and libraries stay loaded.
char* make_stacks() {
    char* stacks = reserve(kMaxThreads * kStride);
    for (size_t i = 0; i < kMaxThreads; ++i) mprotect(stacks + i * kStride, kPage, PROT_NONE);
    return stacks;
}

// Around shared memory is a page that cannot be touched, too.
void set_up(size_t threads) {
    if (shared_end == nullptr) {
        char* begin = reserve(kPage + kMaxShared + kPage);
        mprotect(begin, kPage, PROT_NONE);
        mprotect(begin + kPage + kMaxShared, kPage, PROT_NONE);
        shared_end = begin + kPage + kMaxShared;
    }
    if (run.threads.size() < threads) run.threads.resize(threads);
}

// --- waiting

void wait(Thread::State state, const Site& site) {
    Thread& self = *run.current;
    self.state = state;
    self.site = site;
    to_scheduler();
}

void wait_for_block(const Site& site) { wait(Thread::kBarrier, site); }

unsigned lane() { return index_of(*run.current) % 32; }

void warp_operation(const Site& site, unsigned mask, void* operand, Resolve resolve) {
    Thread& self = *run.current;
    if (!(mask >> lane() & 1))
        PAGEKV_HOST_FAIL("%s:%d: %s: lane %u is not in its own mask 0x%08x", site.file, site.line, site.what, lane(), mask);
    self.mask = mask;
    self.operand = operand;
    self.resolve = resolve;
    wait(Thread::kWarp, site);
}

// Lets every complete group of waiting lanes go on. False: none was complete.
bool release(size_t begin, size_t end) {
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

void describe(const Thread& thread, char* text, size_t size) {
    if (thread.state == Thread::kDone)
        snprintf(text, size, "thread %zu has left the kernel", index_of(thread));
    else
        snprintf(text, size, "thread %zu is at %s (%s:%d)", index_of(thread), thread.site.what, thread.site.file,
                 thread.site.line);
}

void complain(const char* rule, const Thread& one, const Thread& other) {
    char first[300], second[300];
    describe(one, first, sizeof first);
    describe(other, second, sizeof second);
    note("%s: %s, but %s (block %u,%u,%u)", rule, first, second, blockIdx.x, blockIdx.y, blockIdx.z);
}

void resume(Thread& thread) {
    const size_t index = index_of(thread);
    threadIdx.x = index % blockDim.x;
    threadIdx.y = index / blockDim.x % blockDim.y;
    threadIdx.z = index / blockDim.x / blockDim.y;
    run.current = &thread;
    to_thread(thread);
    run.current = nullptr;
}

// Runs a warp until every lane waits for its block or has left.
void run_warp(size_t begin, size_t end, bool reversed) {
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

void entry() {
    run.call(run.params);
    run.current->state = Thread::kDone;
    to_scheduler();
    abort();  // nobody resumes a thread that left
}

// Lets threads go on whose condition has come true; else one warp that goes on as late as it can. False: there is none.
bool go_on(size_t count, bool reversed) {
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
void check_warpgroups(size_t count) {
    for (size_t i = 0; i < count; ++i)
        if (run.threads[i].num_products != run.threads[i / 128 * 128].num_products)
            return note("all warps of a warpgroup must execute its products: thread %zu did %u, thread %zu %u", i,
                        run.threads[i].num_products, i / 128 * 128, run.threads[i / 128 * 128].num_products);
}

void run_block(size_t count, size_t shared_bytes, bool reversed) {
    shared = shared_end - (shared_bytes + 15) / 16 * 16;
    memset(shared, 0xff, shared_end - shared);
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

const char* launch(void (*call)(const void*), size_t params_bytes, const Launch& launch) {
    run.error[0] = 0;
    if (launch.params_bytes != params_bytes)
        note("the structure has %zu bytes, was given %zu", params_bytes, static_cast<size_t>(launch.params_bytes));
    else if (launch.threads == 0 || launch.threads > kMaxThreads || launch.shared_bytes > kMaxShared)
        note("%u threads, %zu bytes of shared memory: no GPU has that", launch.threads,
             static_cast<size_t>(launch.shared_bytes));
    if (run.error[0]) return run.error;
    set_up(launch.threads);
    run.params = launch.params;
    run.stacks = launch.stacks;
    run.call = call;
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
    __asan_unpoison_memory_region(run.stacks, launch.threads * kStride);  // fibers that were left
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
