// Element types and their conversions, for device code compiled without any standard header.
//
// Storage types are plain bits; arithmetic happens in float. Conversions are PTX instructions (ptx.cuh); where a GPU has
// none for fp8 they are integer operations that give the same bytes.
#pragma once
#include "ptx.cuh"

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct e4m3 { u8 bits; };  // 1 sign, 4 exponent, 3 mantissa bits, bias 7; largest 448; 0x7f and 0xff are NaN, no infinity

// Type of an element by its code: PAGEKV_DTYPE, PAGEKV_KV_DTYPE.
template <int code> struct ElementOf;
template <> struct ElementOf<0> { typedef float type; };
template <> struct ElementOf<1> { typedef f16 type; };
template <> struct ElementOf<2> { typedef bf16 type; };
template <> struct ElementOf<3> { typedef e4m3 type; };

#ifdef PAGEKV_DTYPE
typedef ElementOf<PAGEKV_DTYPE>::type Element;       // queries, new keys and values, outputs
typedef ElementOf<PAGEKV_KV_DTYPE>::type KvElement;  // the block pool
#endif

struct alignas(16) Bytes16 { u32 word[4]; };  // the operand of one vector load or store
struct alignas(8) Bytes8 { u32 word[2]; };

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(f16 value) { return f16_to_float(value.bits); }
__device__ __forceinline__ float to_float(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }

// Exact. Subnormals go through an integer, because a float built with a zero exponent would be flushed under -ftz.
__device__ __forceinline__ float to_float(e4m3 value) {
    const u32 magnitude = value.bits & 0x7fu;
    if (magnitude == 0x7fu) return __uint_as_float(0x7fffffffu);
    const float rest = magnitude < 8u ? static_cast<float>(magnitude) * 0x1p-9f
                                      : __uint_as_float((magnitude << 20) + (120u << 23));
    return (value.bits & 0x80u) ? -rest : rest;
}

// Nearest e4m3, ties to even; larger values become 448 (never infinity, which e4m3 lacks); NaN stays NaN.
__device__ __forceinline__ e4m3 float_to_e4m3(float value) {
    const u32 bits = __float_as_uint(value);
    const u32 sign = (bits >> 24) & 0x80u;
    const u32 magnitude = bits & 0x7fffffffu;
    u32 result;
    if (magnitude > 0x7f800000u) {
        result = 0x7fu;
#ifdef PAGEKV_E4M3_CVT
    } else {
        result = float_to_e4m3x2(value);
    }
#else
    } else if (magnitude >= 0x43e00000u) {  // 448
        result = 0x7eu;
    } else if (magnitude >= 0x3c800000u) {  // 2^-6, the smallest normal e4m3: round away 20 mantissa bits
        result = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    } else {
        // Subnormals are multiples of 2^-9. Added to 2^14, whose last place is 2^-9, the sum is rounded to one.
        result = __float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000u;
    }
#endif
    return e4m3{static_cast<u8>(sign | result)};
}

template <typename T> __device__ __forceinline__ T from_float(float value);
template <> __device__ __forceinline__ float from_float<float>(float value) { return value; }
template <> __device__ __forceinline__ f16 from_float<f16>(float value) { return f16{float_to_f16(value)}; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float value) { return bf16{float_to_bf16(value)}; }
template <> __device__ __forceinline__ e4m3 from_float<e4m3>(float value) { return float_to_e4m3(value); }

// Two floats rounded to T, `low` in the low half of the register.
template <typename T> __device__ __forceinline__ u32 pack2(float low, float high);
template <> __device__ __forceinline__ u32 pack2<f16>(float low, float high) { return floats_to_f16x2(low, high); }
template <> __device__ __forceinline__ u32 pack2<bf16>(float low, float high) { return floats_to_bf16x2(low, high); }

// Four e4m3, in their order in memory, as two registers of two T each, divided by E4m3Widening<T>::scale. The caller
// multiplies by that factor where it costs nothing: in the softmax scale, or in the outputs. It is a power of two, so this
// changes no bit of a result. NaN stays NaN only where the hardware converts.
//
// f16: the hardware converts where it can. Otherwise the bits are shifted into place, which makes the exponent 8 too small;
// subnormals of e4m3 become subnormals of f16 exactly.
// bf16: shifting makes the exponent 120 too small. The factor is multiplied in here, because sums of such small products
// would leave float's range. The hardware converts to f16 only, and going through f16 would take as many instructions.
template <typename T> struct E4m3Widening;
#ifdef PAGEKV_E4M3_CVT
template <> struct E4m3Widening<f16> { static constexpr float scale = 1.0f; };
#else
template <> struct E4m3Widening<f16> { static constexpr float scale = 256.0f; };
#endif
template <> struct E4m3Widening<bf16> { static constexpr float scale = 1.0f; };

template <typename T> __device__ __forceinline__ void widen_e4m3x4(u32 four, u32& first, u32& second);
template <> __device__ __forceinline__ void widen_e4m3x4<f16>(u32 four, u32& first, u32& second) {
#ifdef PAGEKV_E4M3_CVT
    first = e4m3x2_to_f16x2(static_cast<u16>(four));
    second = e4m3x2_to_f16x2(static_cast<u16>(four >> 16));
#else
    const u32 low = byte_permute(four, 0u, 0x1404u);   // bytes 0 and 1, each in the upper byte of a half
    const u32 high = byte_permute(four, 0u, 0x3424u);  // bytes 2 and 3
    first = (low & 0x80008000u) | ((low & 0x7f007f00u) >> 1);
    second = (high & 0x80008000u) | ((high & 0x7f007f00u) >> 1);
#endif
}
template <> __device__ __forceinline__ void widen_e4m3x4<bf16>(u32 four, u32& first, u32& second) {
    const u32 low = byte_permute(four, 0u, 0x1404u);
    const u32 high = byte_permute(four, 0u, 0x3424u);
    const u32 two_to_the_120 = 0x7b807b80u;
    first = bf16x2_multiply((low & 0x80008000u) | ((low & 0x7f007f00u) >> 4), two_to_the_120);
    second = bf16x2_multiply((high & 0x80008000u) | ((high & 0x7f007f00u) >> 4), two_to_the_120);
}
