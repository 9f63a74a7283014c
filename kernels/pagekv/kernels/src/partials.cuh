// Partial results of a row's splits and their merge, for the kernels of decode, prefill and merge.
//
// A split's partial result of a head is its softmax state and its output relative to that state's maximum, f32. Partial i
// belongs to strand i % STRANDS. Over the common maximum, each strand is summed in order of position and the strands are
// added as a balanced tree: an order that follows from the number of partial results alone, so that neither the merging
// kernel nor the moment changes a bit. A split without visible keys is an exact no-op.
#pragma once
#include "attention.cuh"

constexpr int STRANDS = 8;

struct Merge {
    i32 row;  // of out; negative: nothing to do
    i32 first_partial;
    i32 partials;
    i32 first_split;  // split of the first partial

    __device__ __forceinline__ static Merge load(const i32* merges, i32 index) {
        const Bytes16 words = ((const Bytes16*)merges)[index];
        return {(i32)words.word[0], (i32)words.word[1], (i32)words.word[2], (i32)words.word[3]};
    }
};

// Four dims of a head, and its sum of weights.
struct Merged {
    float sum;
    float out[4];

    __device__ __forceinline__ void clear() { sum = out[0] = out[1] = out[2] = out[3] = 0.0f; }

    __device__ __forceinline__ void add(float w, float part_sum, float4 part) {
        sum = fmaf(w, part_sum, sum);
        out[0] = fmaf(w, part.x, out[0]);
        out[1] = fmaf(w, part.y, out[1]);
        out[2] = fmaf(w, part.z, out[2]);
        out[3] = fmaf(w, part.w, out[3]);
    }

    __device__ __forceinline__ void add(const Merged& other) {
        sum += other.sum;
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] += other.out[i];
    }

    __device__ __forceinline__ void add_strand(int distance) {
        sum += __shfl_xor_sync(kFullWarp, sum, distance);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] += __shfl_xor_sync(kFullWarp, out[i], distance);
    }
};

__device__ __forceinline__ void store_output(Element* out, const float (&values)[4], float factor) {
#if PAGEKV_DTYPE == 0
    *(float4*)out = make_float4(values[0] * factor, values[1] * factor, values[2] * factor, values[3] * factor);
#else
    Bytes8 packed;
    packed.word[0] = pack2<Element>(values[0] * factor, values[1] * factor);
    packed.word[1] = pack2<Element>(values[2] * factor, values[3] * factor);
    *(Bytes8*)out = packed;
#endif
}

// The partial results of four dims of one head of one row. `Params`: of the decode or the merge kernel.
struct Parts {
    const float2* states;
    const float4* outs;
    i64 next_state, next_out;  // from a partial to the next

    template <class Params>
    __device__ __forceinline__ static Parts of(const Params& p, const Merge& merge, i32 head, i32 dim) {
        const i64 first = (i64)merge.first_partial * p.num_heads + head;
        return {(const float2*)p.partial_state + first, (const float4*)(p.partial_out + first * HEAD_SIZE + dim),
                p.num_heads, (i64)p.num_heads * (HEAD_SIZE / 4)};
    }

    __device__ __forceinline__ void add(i32 partial, float maximum, Merged& to) const {
        const float2 state = states[partial * next_state];
        to.add(weight(state.x, maximum), state.y, outs[partial * next_out]);
    }
};

template <class Params>
__device__ __forceinline__ void store_merged(const Params& p, const Merge& merge, i32 head, i32 dim, float maximum,
                                             const Merged& m) {
    const float factor = normaliser({maximum, m.sum}, p.sinks, head);
    store_output((Element*)p.out + merge.row * p.out_stride + head * HEAD_SIZE + dim, m.out, factor);
}

// Merges dims [dim, dim + 4) of a head by one thread, and stores them.
template <class Params>
__device__ __forceinline__ void merge_alone(const Params& p, const Merge& merge, i32 head, i32 dim) {
    const Parts parts = Parts::of(p, merge, head, dim);
    float maximum = -infinity();
#pragma unroll 8
    for (i32 i = 0; i < merge.partials; ++i) maximum = fmaxf(maximum, parts.states[i * parts.next_state].x);
    Merged strands[STRANDS];
#pragma unroll
    for (int s = 0; s < STRANDS; ++s) strands[s].clear();
    for (i32 i = 0; i < merge.partials; i += STRANDS)
#pragma unroll
        for (int s = 0; s < STRANDS; ++s)
            if (i + s < merge.partials) parts.add(i + s, maximum, strands[s]);
#pragma unroll
    for (int distance = 1; distance < STRANDS; distance *= 2)
#pragma unroll
        for (int s = 0; s < STRANDS; s += 2 * distance) strands[s].add(strands[s + distance]);
    store_merged(p, merge, head, dim, maximum, strands[0]);
}

// `merge_alone` by STRANDS lanes of a warp, `apart` lanes from each other; this lane is `strand`. All lanes take part.
template <class Params>
__device__ __forceinline__ void merge_together(const Params& p, const Merge& merge, i32 head, i32 dim, i32 strand,
                                               int apart) {
    const Parts parts = Parts::of(p, merge, head, dim);
    float maximum = -infinity();
#pragma unroll 4
    for (i32 i = strand; i < merge.partials; i += STRANDS)
        maximum = fmaxf(maximum, parts.states[i * parts.next_state].x);
    for (int distance = 1; distance < STRANDS; distance *= 2)
        maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, distance * apart));
    Merged merged;
    merged.clear();
#pragma unroll 4
    for (i32 i = strand; i < merge.partials; i += STRANDS) parts.add(i, maximum, merged);
    for (int distance = 1; distance < STRANDS; distance *= 2) merged.add_strand(distance * apart);
    if (strand == 0) store_merged(p, merge, head, dim, maximum, merged);
}
