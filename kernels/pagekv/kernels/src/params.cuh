// Parameter structures: one per kernel, passed by value as its only argument. params.py mirrors them field by field.
//
// Plain old data with natural alignment: 8-byte fields first, then 4-byte fields. Pointers are device addresses; a null
// pointer means what its field says. Strides count elements, not bytes. Every size was checked on the host.
//
// T: rows (tokens) of the step. S: its sequences. H: query heads. G: KV heads. D: head size.
// Pool: [num_blocks, num_layers, 2, block_size, G, D]; block_stride = num_layers * 2 * kv_stride,
// kv_stride = block_size * G * D (from a block's keys of a layer to its values of that layer).
#pragma once
#include "types.cuh"

// K and V of the step's new tokens into their slots; with `norm_weight` and `rope` set, keys and queries are normed and rotated
// on the way.
struct CacheWriteParams {
    const void* key;         // [T, G, D], rows key_stride apart
    const void* value;       // [T, G, D], rows value_stride apart
    void* query;             // [T, H, D], rows query_stride apart, changed in place; null: queries stay as they are
    void* pool;
    const i32* slots;        // [T] block * block_size + offset; negative: the row is skipped
    const float* rope;       // [positions, rotary_dim]: cosines, then sines, of each position; null: nothing is rotated
    const i32* positions;    // [T] row of `rope`
    const float* kv_scales;  // fp8 only: [2, G], of keys and of values: value = stored * scale; null: 1
    const float* norm_weight;  // [H + G, D] of queries and of keys; null: nothing is normed
    i64 block_stride;
    i64 kv_stride;
    i64 key_stride;
    i64 value_stride;
    i64 query_stride;
    i32 num_heads;           // H
    i32 num_kv_heads;        // G
    i32 block_size_log2;
    i32 layer;
    i32 rotary_dim;          // even, at most D: the first rotary_dim elements of a head, in pairs (i, i + rotary_dim / 2)
    float norm_eps;
};

// Factor of the stored keys (`part` 0) or values (1) of a KV head.
template <class Params> __device__ __forceinline__ float kv_scale(const Params& p, i32 part, i32 kv_head) {
    return PAGEKV_KV_DTYPE == 3 && p.kv_scales != nullptr ? p.kv_scales[part * p.num_kv_heads + kv_head] : 1.0f;
}

// Whole blocks, all layers: destination := source. No block is a destination and part of another pair.
struct BlockCopyParams {
    void* pool;
    const i32* pairs;  // [grid in x, 2]: source block, destination block
    i64 block_bytes;   // multiple of 16
};

// Work items (splits of one row's keys) times KV heads, all query heads of a KV head's group at a time: decode_plan.py.
struct DecodeParams {
    const void* query;          // [T, H, D], rows query_stride apart
    void* out;                  // [T, H, D], rows out_stride apart
    const void* pool;
    const i32* block_tables;    // [S, table_stride]
    const i32* items;           // [num_items, 4]: row, sequence, split, merge (-1: none).
                                // pagekv_decode_wide: first member, sequence, split, members
    const i32* item_contexts;   // [num_items] visible keys of the item's row, those of this step included; pagekv_decode_wide: null
    u32* dealt;                 // [2]: works drawn, zero before and after the kernel; number of items, the rest is padding
    const float* kv_scales;     // as CacheWriteParams
    const float* sinks;         // [H] a logit beside those of the keys, without a value; null: none
    const i32* members;         // pagekv_decode_wide: [members, 4]: row, sequence, merge, visible keys; else null
    const i32* merges;          // [merges, 4]: row, first partial, partials, split of the first partial
    u32* merge_counters;        // [merges, G, head groups] zeros, and zeros again after the kernel; null: merge kernel
    float* partial_out;         // [partials, H, D] sums of weighted values
    float* partial_state;       // [partials, H, 2]: maximum logit and sum of weights, base 2
    i64 block_stride;
    i64 kv_stride;
    i64 query_stride;
    i64 out_stride;
    i32 num_items;
    i32 num_heads;              // H
    i32 num_kv_heads;           // G
    i32 block_size_log2;
    i32 table_stride;
    i32 layer;
    i32 window;                 // keys in (q - window, q]; 0: all
    float scale;
    float soft_cap;             // 0: none
};

// Partial results of rows that were split, merged in position order.
struct MergeParams {
    void* out;                   // [T, H, D], rows out_stride apart
    const float* partial_out;    // as DecodeParams
    const float* partial_state;
    const float* sinks;
    const i32* items;            // [grid in x, 4]: DecodeParams::merges; row < 0: nothing to do
    i64 out_stride;
    i32 num_heads;
};

// One thread block: one tile of a sequence's query rows for one KV head.
struct PrefillParams {
    const void* query;          // [T, H, D], rows query_stride apart
    void* out;                  // [T, H, D], rows out_stride apart
    const void* pool;
    const i32* block_tables;    // [S, table_stride]
    const i32* context_lens;    // [S]
    const float* kv_scales;     // as CacheWriteParams
    const float* sinks;         // as DecodeParams
    const i32* query_start;     // [S + 1] first row of each sequence; its last query sees context_lens[s] keys
    const i32* items;           // [items, 4]: sequence (< 0: nothing to do), first row, rows, split; see prefill_plan.py
    const i32* merges;          // [T, 4], by row of the step: MergeParams::items; read for items of a split alone
    float* partial_out;         // as DecodeParams
    float* partial_state;
    i64 block_stride;
    i64 kv_stride;
    i64 query_stride;
    i64 out_stride;
    i32 num_heads;
    i32 num_kv_heads;
    i32 block_size_log2;
    i32 table_stride;
    i32 layer;
    i32 window;
    float scale;
    float soft_cap;
};
