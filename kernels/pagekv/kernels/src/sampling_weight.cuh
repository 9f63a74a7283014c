// Weights of tokens, 2^-y of their distance y to the likeliest: exact integers, the same on every GPU and in the emulation.
//
// Every rounding is explicit: products that are not part of an fmaf are __fmul_rn, which no compiler contracts with a sum.
#pragma once
#include "sample_params.cuh"

constexpr i32 kFractionBits = 22;                     // of a key
constexpr u32 kLastKey = 45u << kFractionBits;        // the first whose weight is 0
constexpr i32 kUnitBits = 44;                         // the weight of the likeliest token is 2^44: 2^19 of them fit 64 bits
constexpr float kRound = 0x1.8p23f;                   // added and taken away again: the nearest integer
constexpr u32 kRoundBits = 0x4b400000u;

// The distance of a logit to `best` in log2 of weights, (best - logit) * (scale + scale_low), in units of 2^-22 to nearest.
__device__ __forceinline__ u32 key_of(float logit, float best, float scale, float scale_low) {
    const float distance = best - logit;
    const float high = __fmul_rn(distance, scale);
    // The errors of rounding of the difference (Knuth's two-sum) and of the product.
    const float back = distance - best;
    const float error = (best - (distance - back)) - (logit + back);
    const float rest = fmaf(error, scale, fmaf(distance, scale_low, fmaf(distance, scale, -high)));
    const float whole = high + kRound;
    const float part = fmaf((high - (whole - kRound)) + rest, static_cast<float>(1 << kFractionBits), kRound);
    // In unsigned arithmetic, which may wrap: if `high` is too large or NaN, the key has no meaning and is not used.
    const u32 key = ((__float_as_uint(whole) - kRoundBits) << kFractionBits) + (__float_as_uint(part) - kRoundBits);
    if (logit == best) return 0u;  // both may be infinite
    // Rounding may give a key just below 0.
    return high < 45.0f ? min(static_cast<u32>(max(static_cast<i32>(key), 0)), kLastKey) : kLastKey;
}

// 2^-y in units of 2^-44, to about 2^-23.8 of itself.
__device__ __forceinline__ u64 weight(u32 key) {
    const u32 up = (key + (1u << kFractionBits) - 1u) >> kFractionBits;
    // 2^-y = 2^(up - y) / 2^up: the first factor is in [1, 2), and so its mantissa is its integer.
    const float x = __uint_as_float(0x3f800000u | ((up << kFractionBits) - key) << 1) - 1.0f;
    float power = fmaf(0x1.b49554p-13f, x, 0x1.4cb7bp-10f);
    power = fmaf(power, x, 0x1.3c487cp-7f);
    power = fmaf(power, x, 0x1.c69f98p-5f);
    power = fmaf(power, x, 0x1.ebfc3ep-3f);
    power = fmaf(power, x, 0x1.62e43p-1f);
    power = fmaf(power, x, 1.0f);
    const u32 mantissa = (__float_as_uint(power) & 0x7fffffu) | 0x800000u;
    return static_cast<u64>(mantissa) << (kUnitBits - 23) >> up;
}
