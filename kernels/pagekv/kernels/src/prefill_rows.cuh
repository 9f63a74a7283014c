// Prefill: the query rows of a thread block's item, the keys that they see, and where their partial results go.
#pragma once
#include "partials.cuh"

constexpr int ROW_BYTES = HEAD_SIZE * ELEMENT_BYTES;

// The query rows of a tile. Row r of a sequence and KV head is query r / group, head r % group of the group, so that
// all heads that share keys and values meet them in one tile.
struct QueryRows {
    i32 token;     // first row of the sequence in the packed batch
    i32 head;      // first query head of the group
    i32 group;     // query heads of one KV head
    i32 past;      // position of the sequence's first query
    i32 first;     // the tile's first row
    i32 count;     // rows of the item, at least 1

    // The rows of this thread block's item (sequence, first row, number of rows, split; prefill_plan.py) and KV head;
    // sequence < 0: there is nothing to do.
    __device__ __forceinline__ static QueryRows of(const PrefillParams& p, i32& sequence) {
        const i32 kv_head = (i32)blockIdx.x % p.num_kv_heads;
        const i32* const item = p.items + (i64)((i32)blockIdx.x / p.num_kv_heads) * 4;
        QueryRows rows = {};
        sequence = item[0];
        if (sequence < 0) return rows;
        rows.token = p.query_start[sequence];
        rows.group = p.num_heads / p.num_kv_heads;
        rows.head = kv_head * rows.group;
        rows.first = item[1];
        const i32 queries = p.query_start[sequence + 1] - rows.token;
        rows.past = p.context_lens[sequence] - queries;
        rows.count = item[2];
        return rows;
    }

    __device__ __forceinline__ i32 position(i32 row) const { return past + (first + row) / group; }

    // Query head of a row at `position`.
    __device__ __forceinline__ i32 head_of(i32 row, i32 position) const {
        return head + first + row - (position - past) * group;
    }

    // Bytes to a row at `position` in a tensor [T, H, D] with `stride` elements from one token to the next.
    __device__ __forceinline__ i64 offset(i32 row, i32 position, i64 stride) const {
        const i32 query = position - past;
        return ((token + query) * stride + (i64)(head + first + row - query * group) * HEAD_SIZE) * ELEMENT_BYTES;
    }
};

// The keys of this thread block's item, by position: a split of those that its rows see, or all of them.
struct Split {
    i32 index;  // in units of its own length, from position 0
    i32 log2;   // of its length in keys, a multiple of a tile's; 0: all keys

    __device__ __forceinline__ static Split of(const PrefillParams& p) {
        const u32 word = (u32)p.items[(i64)((i32)blockIdx.x / p.num_kv_heads) * 4 + 3];
        return {(i32)(word & 0xffffffu), (i32)(word >> 24)};
    }

    __device__ __forceinline__ bool all() const { return log2 == 0; }
    __device__ __forceinline__ i32 first_key() const { return index << log2; }
    __device__ __forceinline__ i32 end_key() const { return (index + 1) << log2; }
};

// Where partial results of a split go.
struct PartialRows {
    const PrefillParams& p;
    i32 split;

    // Index of the partial result of row `row`, at `position`, among all (partial, head) pairs; negative: the row has none,
    // because it does not exist or because its position sees nothing of the split.
    __device__ __forceinline__ i64 place(const QueryRows& all, i32 row, i32 position) const {
        if (row >= all.count) return -1;
        const Merge merge = Merge::load(p.merges, all.token + position - all.past);
        const i32 partial = split - merge.first_split;
        if (partial < 0 || partial >= merge.partials) return -1;
        return (i64)(merge.first_partial + partial) * p.num_heads + all.head_of(row, position);
    }
};

// Puts the positions of the tile's rows into shared memory, because registers are few and divisions slow. Rows that do not
// exist have the last row's position; TOGETHER rows of which none exists have -1, which sees no key.
template <int TILE_ROWS, int TOGETHER>
__device__ __forceinline__ void put_position(const QueryRows& rows, i32* positions) {
    const i32 row = (i32)threadIdx.x, last = min(row, rows.count - 1);
    if (row >= TILE_ROWS) return;
    const i32 position = rows.position(last);
    positions[row] = row / TOGETHER * TOGETHER < rows.count ? position : -1;
}

// The keys that a thread block walks, and the factors of their scores and values. In shared memory where registers are few.
struct alignas(8) Keys {
    i64 first_slot;  // address of the KV head's key in slot 0 of block 0
    const i32* table;
    i32 first;       // keys outside [first, end) are not looked up: zeros take their place
    i32 end;
    float factor;    // of a score, in the exponent
    float value_factor;
};
