// The running launch as a kernel sees it: places, errors, waiting, shared memory. Included by host_cuda.h. Behind it are
// host_launch.cc and host_operations.cc, which are compiled once for all kernels.
#pragma once

// All else in a library is its own: several are loaded at a time.
#define PAGEKV_HOST_EXPORT __attribute__((visibility("default")))

extern "C" char __start_pagekv_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_pagekv_shared[] __attribute__((weak, visibility("hidden")));

namespace host_run {

constexpr size_t kMaxThreads = 1024, kMaxShared = 228 << 10;

// Where a thread stopped: an operation of its warp, or a barrier of its block.
struct Site {
    const char* what = nullptr;
    const char* file = nullptr;
    int line = 0;
    // Mostly one literal; the same text may be at two addresses.
    static bool same(const char* one, const char* other) { return one == other || strcmp(one, other) == 0; }
    bool operator==(const Site& other) const {
        return line == other.line && same(what, other.what) && same(file, other.file);
    }
};
// Of functions that touch a kernel's memory: a wrong address is then at the kernel's line, however little is optimised.
#define PAGEKV_HOST_INLINE __attribute__((always_inline)) inline
#define PAGEKV_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// What a warp operation does once all lanes of its mask are there: reads and writes their operands.
typedef void (*Resolve)(void** operands, unsigned mask);

// The first one is the cause; later ones are dropped.
__attribute__((format(printf, 1, 2))) void note(const char* format, ...);
// Ends the launch: the fiber is left where it is.
void abandon();
#define PAGEKV_HOST_FAIL(...) (host_run::note(__VA_ARGS__), host_run::abandon())

// Waits for all threads of the block.
void wait_for_block(const Site& site);
// Waits for the lanes of a mask, of which the last one resolves all operands.
void warp_operation(const Site& site, unsigned mask, void* operand, Resolve resolve);
unsigned lane();

extern char* shared;      // dynamic shared memory of the block
extern char* shared_end;  // the first byte of the page behind it
extern u_int64_t copied;  // bytes that cp.async has read, of all launches

// What a launch is given, as host_build.py lays it out.
struct Launch {
    const void* params;
    char* stacks;  // make_stacks()
    u_int64_t params_bytes, shared_bytes;
    u_int32_t grid[3], threads, reversed, seconds;
};

// Stacks for launches of any kernel, one launch at a time.
char* make_stacks();

// `call`: the kernel, given a structure of `params_bytes`. Returns what went wrong, or an empty string.
const char* launch(void (*call)(const void*), size_t params_bytes, const Launch& launch);

template <typename Params> const char* launch(void (*kernel)(Params), const Launch& given) {
    static void (*the_kernel)(Params);
    the_kernel = kernel;
    return launch([](const void* params) { the_kernel(*static_cast<const Params*>(params)); }, sizeof(Params), given);
}

}  // namespace host_run
