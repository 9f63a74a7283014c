// The work of one thread block of both prefill kernels, prefill.cu (keys of a row in one walk) and prefill_split.cu (one
// split of them), which define SPLIT first.
#pragma once
#if PAGEKV_DTYPE == 0
#include "prefill_fma.cuh"
#else
#include "prefill_mma.cuh"
#endif

// The split of this thread block's item, by position.
struct Split {
    i32 index;  // in units of its own length, from position 0
    i32 log2;   // of its length in keys, a multiple of TILE_KEYS

    __device__ __forceinline__ static Split of(const PrefillParams& p) {
        const u32 word = (u32)p.items[(i64)((i32)blockIdx.x / p.num_kv_heads) * 4 + 3];
        return {(i32)(word & 0xffffffu), (i32)(word >> 24)};
    }

    __device__ __forceinline__ i32 first_key() const { return index << log2; }
    __device__ __forceinline__ i32 end_key() const { return (index + 1) << log2; }
};

// `Params`: of either kernel.
template <class Params> __device__ __forceinline__ void walk_keys(const Params& p, u8* shared) {
    i32 sequence;
    const QueryRows rows = QueryRows::of(p, sequence);
    if (sequence < 0 || rows.count <= 0) return;

    const Logits logits = Logits::of(p.scale, p.soft_cap, p.window, kv_scale(p, 0, (i32)blockIdx.x % p.num_kv_heads) * STORED_SCALE);
    i32 first_key = logits.first_visible(rows.position(0)), end_key = rows.position(rows.count - 1) + 1;
    if constexpr (SPLIT) {
        const Split split = Split::of(p);
        first_key = max(first_key, split.first_key());  // beyond end_key: the window has left the split, no tiles
        end_key = min(end_key, split.end_key());
    }
    // Split fp8 keys of 128 spill a register on sm_120 (NVRTC 12.9) unless the first tile stays in one.
    const i32 first_tile = SPLIT ? opaque(first_key / TILE_KEYS) : first_key / TILE_KEYS;
    KeyStream stream = {p, shared, 0, -1};
    i32* const positions = (i32*)(shared + POSITIONS);
    put_position(rows, positions);
    if (threadIdx.x == 0) {
        const PagedRows paged = PagedRows::of(p, rows.head / rows.group);
        const i32* const block_table = p.block_tables + (i64)sequence * p.table_stride;
        *(Keys*)(shared + KEYS) = {(i64)paged.keys, block_table, first_key, end_key, logits.scale,
                                   kv_scale(p, 1, rows.head / rows.group) * STORED_SCALE};
    }
    __syncthreads();
    load_queries(rows, positions, p.query, p.query_stride, shared);  // in one group with the first half
    stream.start(first_tile);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < STAGES - 1; ++half) stream.issue(2 * first_tile + half, half);

    WarpRows warp;
    warp.start(shared);
    for (i32 tile = first_tile; tile < stream.keys().end_tile(); ++tile) {
        const u8* const keys = stream.next(2 * tile);
        if (tile == first_tile) warp.keep_query();
        const i32 begin = tile * TILE_KEYS, first = warp.positions[0], last = warp.positions[WARP_ROWS - 1];
        // Whether any row of the warp sees any key of the tile; if not, leaving the tile out changes no bit.
        const bool seen = begin <= last && begin + TILE_KEYS > logits.first_visible(first);
        // Whether any row does not see all keys of the tile.
        const bool masked = begin + TILE_KEYS - 1 > first || begin < logits.first_visible(last);
        if (seen) warp.weigh(logits, PAGEKV_FEATURES ? 1.0f : stream.keys().factor, keys, begin, masked);
        const u8* const values = stream.next(2 * tile + 1);
        stream.look_ahead(tile);
        if (seen) warp.add(values);
    }
    cp_async_wait<0>();
    // The query rows once more from memory, so that no register holds them all the time.
    if constexpr (SPLIT) {
        warp.store_partials(QueryRows::of(p, sequence), PartialRows{p, Split::of(p).index}, stream.keys());
    } else {
        // Without tiles there was no barrier: keeps the queries' copies apart from the results that `store` writes over them.
        if (stream.keys().end_tile() <= first_tile) __syncthreads();
        warp.store(QueryRows::of(p, sequence), shared, p.out, p.out_stride, stream.keys().value_factor, p.sinks);
    }
}
