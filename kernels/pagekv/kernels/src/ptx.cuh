// PTX instructions of the kernels, each in one wrapper. Those of kernels for sm_90a are in ptx_sm90a.cuh.
//
// With PAGEKV_HOST the tests' emulation has them all, by the same names: it keeps the layouts of fragments, the moment when
// asynchronous copies arrive, and the rules that a warp must obey.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

constexpr u32 kFullWarp = 0xffffffffu;

// Returns `value` and hides from the compiler that it is the same. So an expression of it is computed where it stands, and
// not once before a loop, which would take more registers than there are.
__device__ __forceinline__ i32 opaque(i32 value) {
#ifndef PAGEKV_HOST
    asm volatile("" : "+r"(value));
#endif
    return value;
}

#ifndef PAGEKV_HOST
// Shared memory whose size is given at launch, as `unsigned char* name`, aligned to 16 bytes.
#define PAGEKV_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

__device__ __forceinline__ u32 shared_address(const void* shared) {
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

// --- asynchronous copies to shared memory

// Starts a copy of 16 bytes, both ends aligned to 16. Not valid: `global` is not read and 16 zero bytes arrive; the address
// must be aligned all the same, because PTX makes no exception for a source that is ignored.
// The destination holds neither old nor new bytes until a wait of this thread; other threads need a barrier after that.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
    // As a predicate, not as a size of 0: a size costs instructions that allow for those between 0 and 16.
    asm volatile(
        "{\n.reg .pred ignore;\nsetp.eq.u32 ignore, %2, 0;\n"
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignore;\n}" ::"r"(shared_address(shared)),
        "l"(global), "r"(static_cast<u32>(valid))
        : "memory");
}

// Closes the group of this thread's copies since the last commit; a group may be empty.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's newest groups are under way.
template <int pending> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// --- tensor cores. Comments say what lane l holds. A register has two 16-bit elements, the lower column in its lower half.

// Four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned to 16).
// registers[i]: matrix i, row l / 4, columns 2 * (l % 4) and the next.
__device__ __forceinline__ void ldmatrix_x4(u32 (&registers)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// ldmatrix_x4 with each matrix transposed: registers[i] holds rows 2 * (l % 4) and the next of column l / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&registers)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// d[16x8] += a[16x16] * b[16x8], products of 16-bit elements summed in float. With g = l / 4 and t = 2 * (l % 4):
//   a[0]: row g, columns t, t+1      a[1]: row g+8, columns t, t+1    a[2]: row g, columns t+8, t+9   a[3]: row g+8, t+8, t+9
//   b0: rows t, t+1 of column g      b1: rows t+8, t+9 of column g
//   d[0], d[1]: row g, columns t, t+1                                 d[2], d[3]: row g+8, columns t, t+1
template <typename T> __device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

struct f16;
struct bf16;

template <> __device__ __forceinline__ void mma_m16n8k16<f16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <> __device__ __forceinline__ void mma_m16n8k16<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- arithmetic

// 2^x to about two units in the last place; 2^-infinity is 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Bytes of a (0 to 3) and b (4 to 7) picked by the four lowest digits of `selector`.
__device__ __forceinline__ u32 byte_permute(u32 a, u32 b, u32 selector) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}

// Products of two pairs, each rounded once: a multiply-add with -0, which sm_80 has and which keeps signs of zeros.
__device__ __forceinline__ u32 bf16x2_multiply(u32 a, u32 b) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
    return result;
}

// --- conversions, to nearest, ties to even

__device__ __forceinline__ float f16_to_float(u16 bits) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    return result;
}

__device__ __forceinline__ u16 float_to_f16(float value) {
    u16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ u16 float_to_bf16(float value) {
    u16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

// Two at once; the instruction takes the upper half first.
__device__ __forceinline__ u32 floats_to_f16x2(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

__device__ __forceinline__ u32 floats_to_bf16x2(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// e4m3 is converted by the hardware from compute capability 8.9 on, and by integer operations (types.cuh) below.
#if __CUDA_ARCH__ >= 890
#define PAGEKV_E4M3_CVT

// One e4m3, saturated, in the low byte; the high byte is 0.
__device__ __forceinline__ u16 float_to_e4m3x2(float value) {
    u16 result;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(0.0f), "f"(value));
    return result;
}

// Two e4m3, exact.
__device__ __forceinline__ u32 e4m3x2_to_f16x2(u16 two) {
    u32 result;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(two));
    return result;
}
#endif
#endif
