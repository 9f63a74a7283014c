// Parts that decode and prefill share: softmax in base 2, features of the logits, and where keys lie in the pool.
//
// Softmax. A partial result over some keys is (maximum, sum, out): the largest logit, the sum of 2^(logit - maximum), and
// the sum of 2^(logit - maximum) * value. Logits are kept in base 2 (multiplied by log2 e), because the hardware's
// exponential is 2^x. No keys: (-inf, 0, 0). Partial results are merged over the common maximum, and merging one of no
// keys changes no bit: its weight is exactly 0 and every other weight exactly what it was.
//
// Logits. logit = soft_cap(dot * scale), then masked: keys after the query and keys that a sliding window has left are
// -inf. Masks come last, so nothing that a masked slot holds reaches the result.
//
// Pool. [num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]. A token's key row of one KV head is head_size
// neighbouring elements; the rows of its other KV heads follow. Slots at and past the context length hold no token of the
// sequence, and maybe NaN. Such slots are never read: their rows in shared memory are zeros.
//
// Shared memory. A tile is TILE token rows, KV_ROW_STRIDE bytes apart: the row rounded up to an odd number of 16-byte
// chunks, so that eight consecutive rows lie in different banks and neither ldmatrix nor a column of loads has conflicts.
#pragma once
#include "params.cuh"
#include "ptx.cuh"
#include "types.cuh"

constexpr int HEAD_SIZE = PAGEKV_HEAD_SIZE;
constexpr bool FP32 = PAGEKV_DTYPE == 0;
constexpr bool FP8_KV = PAGEKV_KV_DTYPE == 3;
constexpr int ELEMENT_BYTES = FP32 ? 4 : 2;
constexpr int KV_ELEMENT_BYTES = FP8_KV ? 1 : ELEMENT_BYTES;

constexpr int CHUNK_BYTES = 16;  // of one cp.async
__host__ __device__ constexpr int padded_row(int bytes) { return ((bytes / CHUNK_BYTES) | 1) * CHUNK_BYTES; }
constexpr int KV_ROW_BYTES = HEAD_SIZE * KV_ELEMENT_BYTES;
constexpr int KV_ROW_STRIDE = padded_row(KV_ROW_BYTES);

constexpr float LOG2_E = 1.4426950408889634f;

// ---- softmax state ----

struct Softmax {
    float maximum;  // base 2; -inf: no key seen
    float sum;
};

__device__ __forceinline__ Softmax no_keys() { return {-infinity(), 0.0f}; }

// The number to subtract from logits with this maximum: with no key seen, logits of -inf must give weight 0, not NaN.
__device__ __forceinline__ float reference(float maximum) { return maximum == -infinity() ? 0.0f : maximum; }

// Factor that brings a partial result from its own maximum to the common one, at least as large.
__device__ __forceinline__ float weight(float maximum, float common) { return exp2_approx(maximum - reference(common)); }

// 1 / sum, and 0 where no key was seen: the output of a row without keys is 0.
__device__ __forceinline__ float normaliser(float sum) { return sum > 0.0f ? 1.0f / sum : 0.0f; }

// The same where a head has a sink, a logit that takes part in the softmax and has no value (`sinks` by head; null: none):
// over the maximum that includes the sink, its weight is one more term of the sum.
__device__ __forceinline__ float normaliser(const Softmax& state, const float* sinks, i32 head) {
    if (sinks == nullptr) return normaliser(state.sum);
    const float sink = sinks[head] * LOG2_E, common = fmaxf(state.maximum, sink);
    const float w = weight(state.maximum, common), sum = fmaf(w, state.sum, weight(sink, common));
    return sum > 0.0f ? w / sum : 0.0f;
}

// ---- logits ----

struct Logits {
    float scale;       // softmax scale; without PAGEKV_FEATURES times log2 e
    float soft_cap;    // 0: none
    i32 window;        // 0: none

    // `stored_scale`: factor of a dot product over stored keys (fp8; else 1).
    __device__ __forceinline__ static Logits of(float scale, float soft_cap, i32 window, float stored_scale) {
        float of_dot = scale * stored_scale;
        return {PAGEKV_FEATURES ? of_dot : of_dot * LOG2_E, soft_cap, window};
    }

    // soft_cap * tanh(x / soft_cap), with a cap.
    __device__ __forceinline__ float capped(float x) const {
        // tanh(y) = 1 - 2 / (1 + e^(2y)), exact at both ends: e^(2y) reaches inf or 0.
        // Fast divisions, within two units of the last place and 0 beyond 2^126: exact ones would be calls in a loop.
        float e = exp2_approx(__fdividef(x, soft_cap) * (2.0f * LOG2_E));
        return soft_cap * (1.0f - __fdividef(2.0f, 1.0f + e));
    }

    // Base-2 logit of a dot product.
    __device__ __forceinline__ float base2(float dot) const {
        float x = dot * scale;
        if constexpr (!PAGEKV_FEATURES) return x;
        if (soft_cap != 0.0f) x = capped(x);
        return x * LOG2_E;
    }

    // First position that the query at `position` sees.
    __device__ __forceinline__ i32 first_visible(i32 position) const {
        return PAGEKV_FEATURES && window > 0 && position >= window ? position - window + 1 : 0;
    }
};

// ---- pool addresses ----

// Address of a KV head's key in slot 0 of block 0, in the layer of the parameters.
template <class Params> __device__ __forceinline__ const u8* first_slot(const Params& p, i32 kv_head) {
    return (const u8*)p.pool + (i64)p.layer * 2 * p.kv_stride * KV_ELEMENT_BYTES + (i64)kv_head * KV_ROW_BYTES;
}
