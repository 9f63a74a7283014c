// CUDA's built-in functions and the PTX wrappers of ptx.cuh, for kernels that run on the CPU (see host_cuda.h).
#pragma once

// --- barriers

inline void __syncthreads(PAGEKV_HERE) { host_run::wait_for_block({"__syncthreads", file, line}); }
inline void __syncwarp(unsigned mask = 0xffffffffu, PAGEKV_HERE) {
    host_run::warp_operation({"__syncwarp", file, line}, mask, nullptr, nullptr);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// --- shuffles and votes

namespace host_run {

struct Shuffle { u_int64_t value, result; unsigned source; };

void resolve_shuffle(void** operands, unsigned mask);

template <typename T> T shuffle(const Site& site, unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
    Shuffle operand = {0, 0, source};
    memcpy(&operand.value, &value, sizeof(T));
    warp_operation(site, mask, &operand, resolve_shuffle);
    memcpy(&value, &operand.result, sizeof(T));
    return value;
}

struct Vote { bool predicate; unsigned ballot; };

void resolve_vote(void** operands, unsigned mask);

inline unsigned vote(const Site& site, unsigned mask, bool predicate) {
    Vote operand = {predicate, 0};
    warp_operation(site, mask, &operand, resolve_vote);
    return operand.ballot;
}

}  // namespace host_run

template <typename T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, PAGEKV_HERE) {
    const unsigned lane = host_run::lane();
    return host_run::shuffle({"__shfl_sync", file, line}, mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, PAGEKV_HERE) {
    const unsigned lane = host_run::lane(), source = lane ^ lanes;
    return host_run::shuffle({"__shfl_xor_sync", file, line}, mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, PAGEKV_HERE) {
    const unsigned lane = host_run::lane(), source = lane + lanes;
    return host_run::shuffle({"__shfl_down_sync", file, line}, mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, PAGEKV_HERE) {
    const unsigned lane = host_run::lane(), first = lane & ~(width - 1);
    return host_run::shuffle({"__shfl_up_sync", file, line}, mask, value, lane < first + lanes ? lane : lane - lanes);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate, PAGEKV_HERE) {
    return host_run::vote({"__ballot_sync", file, line}, mask, predicate);
}
inline int __any_sync(unsigned mask, bool predicate, PAGEKV_HERE) {
    return host_run::vote({"__any_sync", file, line}, mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, bool predicate, PAGEKV_HERE) {
    return host_run::vote({"__all_sync", file, line}, mask, predicate) == mask;
}

// --- arithmetic

template <typename To, typename From> To host_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
inline unsigned __float_as_uint(float value) { return host_bits<unsigned>(value); }
inline long long __double_as_longlong(double value) { return host_bits<long long>(value); }
inline int __float_as_int(float value) { return host_bits<int>(value); }
inline float __uint_as_float(unsigned value) { return host_bits<float>(value); }
inline float __int_as_float(int value) { return host_bits<float>(value); }
inline float __fmul_rn(float a, float b) { return a * b; }  // -ffp-contract=off
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned __int128>(a) * b >> 64;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(value); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
template <typename T> PAGEKV_HOST_INLINE T __ldg(const T* address) { return *address; }
template <typename T> PAGEKV_HOST_INLINE T atomicAdd(T* address, T value) {  // fibers are never interrupted
    const T old = *address;
    *address += value;
    return old;
}

// --- PTX: what ptx.cuh has on a GPU

#define PAGEKV_DYNAMIC_SHARED(name) unsigned char* const name = reinterpret_cast<unsigned char*>(host_run::shared)

struct f16;
struct bf16;

namespace host_ptx {

using host_run::Site;

inline float f16_to_float(unsigned short bits) {
    const unsigned magnitude = bits & 0x7fffu;
    // As a float 2^112 times too small, subnormals included; infinity and NaN get the whole exponent.
    float value = host_bits<float>(magnitude << 13) * 0x1p112f;
    if (magnitude >= 0x7c00u) value = host_bits<float>(magnitude << 13 | 0x7f800000u);
    return bits & 0x8000u ? -value : value;
}

// Keeps `kept` of a mantissa's upper bits, to nearest, ties to even.
inline unsigned round_mantissa(unsigned bits, int dropped) {
    return (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
}

inline unsigned short float_to_f16(float value) {
    const unsigned bits = host_bits<unsigned>(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;  // what the instruction makes of every NaN
    if (magnitude >= 0x47800000u) return sign | 0x7c00u;
    if (magnitude >= 0x38800000u) return sign | (round_mantissa(magnitude, 13) - (112u << 10));
    // Subnormals are multiples of 2^-24, the last place of floats at 0.5.
    return sign | (host_bits<unsigned>(host_bits<float>(magnitude) + 0.5f) - 0x3f000000u);
}

inline unsigned short float_to_bf16(float value) {
    const unsigned bits = host_bits<unsigned>(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : round_mantissa(bits, 16);
}

inline unsigned floats_to_f16x2(float low, float high) {
    return float_to_f16(low) | static_cast<unsigned>(float_to_f16(high)) << 16;
}

inline unsigned floats_to_bf16x2(float low, float high) {
    return float_to_bf16(low) | static_cast<unsigned>(float_to_bf16(high)) << 16;
}

// PAGEKV_E4M3_CVT: what the hardware's conversions of e4m3 do; the kernels have integer operations besides.
inline unsigned short e4m3_to_f16(unsigned char bits) {
    const unsigned magnitude = bits & 0x7f, sign = (bits & 0x80u) << 8;
    if (magnitude == 0x7f) return 0x7fff;
    const float value = magnitude < 8 ? ldexpf(magnitude, -9) : ldexpf(8 + magnitude % 8, static_cast<int>(magnitude / 8) - 10);
    return sign | float_to_f16(value);
}

inline unsigned e4m3x2_to_f16x2(unsigned short two) {
    return e4m3_to_f16(two & 0xff) | static_cast<unsigned>(e4m3_to_f16(two >> 8)) << 16;
}

inline unsigned short float_to_e4m3x2(float value) {
    const float magnitude = fabsf(value);
    if (value != value) return 0x7f;
    // The nearest of all codes, the even one of two that are equally near.
    unsigned best = 0;
    for (unsigned code = 1; code < 0x7f; ++code) {
        const double distance = fabs(f16_to_float(e4m3_to_f16(code)) - static_cast<double>(magnitude));
        const double before = fabs(f16_to_float(e4m3_to_f16(best)) - static_cast<double>(magnitude));
        if (distance < before || (distance == before && code % 2 == 0)) best = code;
    }
    return best | (host_bits<unsigned>(value) >> 24 & 0x80u);
}

inline float bf16_to_float(unsigned short bits) { return host_bits<float>(static_cast<unsigned>(bits) << 16); }

inline float exp2_approx(float x) { return exp2f(x); }

inline unsigned byte_permute(unsigned a, unsigned b, unsigned selector) {
    const u_int64_t both = u_int64_t{b} << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> (selector >> (4 * i) & 7) * 8 & 0xff) << 8 * i;
    return result;
}

inline unsigned bf16x2_multiply(unsigned a, unsigned b) {
    return floats_to_bf16x2(bf16_to_float(a) * bf16_to_float(b), bf16_to_float(a >> 16) * bf16_to_float(b >> 16));
}

// --- shared memory

// Fails where 16 bytes are not in shared memory or not aligned.
void check_shared(const Site& site, const void* address);
// The copy of 16 bytes, which arrive with a wait.
void start_copy(void* shared, const char (&bytes)[16]);
// Waits until at most so many groups of copies are pending.
void wait_for_copies(int pending);
void cp_async_commit();

PAGEKV_HOST_INLINE void cp_async_16(void* shared, const void* global, bool valid = true, PAGEKV_HERE) {
    check_shared({"cp.async", file, line}, shared);
    if (reinterpret_cast<uintptr_t>(global) % 16)  // ignored or not
        PAGEKV_HOST_FAIL("%s:%d: cp.async: source not aligned to 16 bytes: %p", file, line, global);
    char bytes[16] = {};
    if (valid) {
        memcpy(bytes, global, 16);
        host_run::copied += 16;
    }
    memset(shared, 0xff, 16);
    start_copy(shared, bytes);
}

template <int pending> void cp_async_wait() { wait_for_copies(pending); }

// --- tensor cores

struct LoadMatrix { unsigned (*registers)[4]; const void* row; bool transposed; };

void resolve_ldmatrix(void** operands, unsigned mask);

inline void load_matrices(unsigned (&registers)[4], const void* row, bool transposed, const Site& site) {
    check_shared(site, row);
    LoadMatrix operand = {&registers, row, transposed};
    host_run::warp_operation(site, 0xffffffffu, &operand, resolve_ldmatrix);
}

inline void ldmatrix_x4(unsigned (&registers)[4], const void* row, PAGEKV_HERE) {
    load_matrices(registers, row, false, {"ldmatrix", file, line});
}

inline void ldmatrix_x4_trans(unsigned (&registers)[4], const void* row, PAGEKV_HERE) {
    load_matrices(registers, row, true, {"ldmatrix.trans", file, line});
}

struct Mma { float* d; const unsigned* a; unsigned b[2]; bool is_bf16; };
void resolve_mma(void** operands, unsigned mask);

template <typename T> constexpr bool kIsBf16 = false;
template <> constexpr bool kIsBf16<bf16> = true;

template <typename T>
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, PAGEKV_HERE) {
    constexpr bool is_bf16 = kIsBf16<T>;
    Mma operand = {d, a, {b0, b1}, is_bf16};
    host_run::warp_operation({is_bf16 ? "mma.bf16" : "mma.f16", file, line}, 0xffffffffu, &operand, resolve_mma);
}

}  // namespace host_ptx

using namespace host_ptx;
