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
#include <sys/types.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

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

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

#include "host_run.h"

#include "host_builtins.h"
#include "host_sm90a.h"

// At the end of a kernel's text: what host_build.py calls. Returns what went wrong, or an empty string.
#define PAGEKV_HOST_KERNEL(name) \
    extern "C" PAGEKV_HOST_EXPORT const char* pagekv_host_launch(const host_run::Launch* given) { \
        return host_run::launch(name, *given); \
    } \
    extern "C" PAGEKV_HOST_EXPORT char* pagekv_host_stacks() { return host_run::make_stacks(); } \
    extern "C" PAGEKV_HOST_EXPORT u_int64_t pagekv_host_copied() { return host_run::copied; }
