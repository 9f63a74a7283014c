// Attention of many query rows, causal, over keys and values in the block pool: prompts, chunks of prompts behind
// tokens that are cached already, and single tokens, in one launch.
//
// Query i of a sequence with n queries and c visible tokens stands at position c - n + i and sees the keys up to that
// position, its own included, less the keys that a sliding window has left. All of them were written before.
//
// A thread block takes one item (rows of a sequence; see prefill_plan.py) and one KV head: up to TILE_ROWS rows, where a
// row is a (query, head of the group) pair, so that K and V are read once for all heads that share them. Items come
// heaviest first and KV heads of an item are neighbours, so that the last blocks to start are light.
//
// Splits. Rows that see many keys come in several items, a split of their keys in each, and leave a partial result of every
// head; pagekv_merge_rows follows and merges these. Items of the same split are neighbours, which find its keys in L2. Rows
// that see nothing of the split by their position have no partial result of it. Short chunks behind long contexts have too
// few tiles for a GPU: 32 queries of four heads a KV head are one tile, whose keys a single thread block would walk alone.
// Floor: (HEAD_SIZE + 2) * 4 bytes of each row, head and split, written and read once. A tile of 128 rows over 2,048 keys, the
// shortest split, is 134 MFLOP: 0.45 us at 300 TFLOP/s, in which an H200 moves 1.9 MB. Its partial results are 133 KB, both
// ways counted.
//
// Batch invariance. Tiles of keys begin at multiples of TILE_KEYS from position 0 and are walked in order of position.
// Within a tile every row of a fragment goes through the same instructions, and other rows decide only which tiles are
// walked at all. A tile in which a row sees nothing leaves that row unchanged, bit by bit: its weights are 2^-inf = 0, its
// maximum stays and its factor is 2^0 = 1. Whether a row's keys are split, and where, follows from their number alone; cuts
// are absolute multiples of the length, and partial results are merged in an order that their number decides. So outputs
// depend on nothing but the row's own query and the keys and values that it sees: not on chunks, batch, physical blocks or
// block size.
#if PAGEKV_DTYPE == 0
#include "prefill_fma.cuh"
#else
#include "prefill_mma.cuh"
#endif

// Two thread blocks on a multiprocessor: while one exponentiates, the other keeps the tensor cores busy.
extern "C" __global__ void __launch_bounds__(THREADS, 2) pagekv_prefill(const PrefillParams p) {
    PAGEKV_DYNAMIC_SHARED(shared);
    i32 sequence;
    const QueryRows rows = QueryRows::of(p, sequence);
    // Every item has rows, and rows.head / rows.group is the KV head. Without this comparison, or with the KV head in one
    // variable, the compiler of CUDA 12 spills for sm_120.
    if (sequence < 0 || rows.count <= 0) return;

    const Logits logits = Logits::of(p.scale, p.soft_cap, p.window, kv_scale(p, 0, (i32)blockIdx.x % p.num_kv_heads) * STORED_SCALE);
    i32 first_key = logits.first_visible(rows.position(0)), end_key = rows.position(rows.count - 1) + 1;
    const Split split = Split::of(p);
    if (!split.all()) {
        first_key = max(first_key, split.first_key());  // beyond end_key: the window has left the split, no tiles
        end_key = min(end_key, split.end_key());
    }
    const i32 first_tile = first_key / TILE_KEYS;
    KeyStream stream = {p, shared, 0, -1};
    i32* const positions = (i32*)(shared + POSITIONS);
    put_position<TILE_ROWS, WARP_ROWS>(rows, positions);
    if (threadIdx.x == 0) {
        *(Keys*)(shared + KEYS) = {(i64)first_slot(p, rows.head / rows.group), p.block_tables + (i64)sequence * p.table_stride,
                                   first_key, end_key, logits.scale, kv_scale(p, 1, rows.head / rows.group) * STORED_SCALE};
    }
    __syncthreads();
    load_queries(rows, positions, p.query, p.query_stride, shared);  // in one group with the first half
    stream.start(first_tile);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < STAGES - 1; ++half) stream.issue(2 * first_tile + half, half);

    WarpRows warp;
    warp.start(shared);
    for (i32 tile = first_tile; tile < stream.end_tile(); ++tile) {
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
    if (!Split::of(p).all()) {
        warp.store_partials(QueryRows::of(p, sequence), PartialRows{p, Split::of(p).index}, stream.keys());
    } else {
        // Without tiles there was no barrier: keeps the queries' copies apart from the results that `store` writes over them.
        if (stream.end_tile() <= first_tile) __syncthreads();
        warp.store(QueryRows::of(p, sequence), shared, p.out, p.out_stride, stream.keys().value_factor, p.sinks);
    }
}
