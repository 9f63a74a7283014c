// Fibers, one per CUDA thread of a block: the state of a launch, for host_launch.cc and host_operations.cc.
#pragma once
#include <pthread.h>
#include <ucontext.h>

#include <vector>

#include "host_cuda.h"

namespace host_run {

struct AsyncCopy { char* to; char bytes[16]; };

// A lane's part of a product of its warpgroup that is under way (host_sm90a.h).
struct Product : host_ptx::WarpgroupProduct {
    Site site;
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
    void* scheduler = nullptr;
    ucontext_t scheduler_context;
    pthread_t owner;
    volatile bool running = false;
    char error[4096] = "";
};
extern Run run;

void wait(Thread::State state, const Site& site);
inline size_t index_of(const Thread& thread) { return &thread - run.threads.data(); }

}  // namespace host_run
