// Fibers, one per CUDA thread of a block, and what ends a launch: errors of the emulation, signals, AddressSanitizer.
// Included by host_cuda.h, which see.
#pragma once

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

// A lane's part of a product of its warpgroup that is under way (host_sm90a.h).
struct Product {
    Site site;
    float* d;
    unsigned columns;
    const unsigned* a_registers;  // null: a is in shared memory
    u_int64_t a, b;               // descriptors
    bool b_by_columns, add, is_bf16;
    unsigned group;
    std::vector<float> before;  // what d held; empty for all but the first product of the same d
};

struct Thread {
    // kUntil: waits until `until` is true. kLate: goes on once no other thread can.
    enum State { kReady, kBarrier, kWarp, kUntil, kLate, kDone } state = kDone;
    Site site;
    unsigned mask = 0;
    Resolve resolve = nullptr;
    void* operand = nullptr;
    void* stack_pointer = nullptr;
    ucontext_t context;
    std::vector<std::vector<AsyncCopy>> groups;  // of cp.async, the last one open
    bool (*until)(const Thread&) = nullptr;
    const u_int64_t* barrier = nullptr;
    unsigned parity = 0;
    std::vector<Product> products;
    unsigned product_group = 0;  // the open one
    unsigned num_products = 0;
    bool fenced = false;
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
    u_int64_t copied = 0;  // bytes that cp.async has read, of all launches
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

// --- memory

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

// Stacks are two mappings each, of which a process has 65,530, and libraries stay loaded: many threads give theirs back.
constexpr size_t kKeptThreads = 256;
inline void tear_down() {
    if (run.threads.size() <= kKeptThreads) return;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(run.stacks, run.threads.size() * kStride);  // fibers that were left
#endif
    munmap(run.stacks, run.threads.size() * kStride);
    run.stacks = nullptr;
    run.threads.clear();
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
