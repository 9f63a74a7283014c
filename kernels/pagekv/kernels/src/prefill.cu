// Attention of many query rows, causal, over keys and values in the block pool: prompts, chunks of prompts behind
// tokens that are cached already, and single tokens, in one launch.
//
// Query i of a sequence with n queries and c visible tokens stands at position c - n + i and sees the keys up to its own,
// itself included, less those that a sliding window has left. Its keys and values were written before.
//
// A thread block takes one item (sequence, first row; see prefill_plan.py) and one KV head: TILE_ROWS rows, where a row is
// a (query, head of the group) pair, so that K and V are read once for all heads that share them. Items come heaviest
// first and KV heads of an item are neighbours, so that the last blocks to start are light.
//
// The rule that makes a row's bits its own. Tiles of keys begin at multiples of TILE_KEYS from position 0 and are walked
// in order of position. Within a tile every row of a fragment goes through the same instructions, whichever row it is,
// and all that depends on other rows is which tiles are walked at all. A tile in which a row sees nothing leaves that row
// as it was, bit by bit: its weights are 2^-inf = 0, its maximum stays and its factor is 2^0 = 1. So outputs depend on
// nothing but the row's own query and the keys and values it sees: not on chunks, batch, physical blocks or block size.
#if PAGEKV_DTYPE == 0
#include "prefill_fma.cuh"
#else
#include "prefill_mma.cuh"
#endif

// Two thread blocks on a multiprocessor: while one exponentiates, the other keeps the tensor cores busy.
extern "C" __global__ void __launch_bounds__(THREADS, 2) pagekv_prefill(const PrefillParams p) {
    PAGEKV_DYNAMIC_SHARED(shared);
    const i32 kv_head = (i32)blockIdx.x % p.num_kv_heads;
    const i32* const item = p.items + (i64)((i32)blockIdx.x / p.num_kv_heads) * 4;
    const i32 sequence = item[0];
    if (sequence < 0) return;

    QueryRows rows;
    rows.token = p.query_start[sequence];
    rows.group = p.num_heads / p.num_kv_heads;
    rows.head = kv_head * rows.group;
    rows.first = item[1];
    const i32 queries = p.query_start[sequence + 1] - rows.token;
    rows.past = p.context_lens[sequence] - queries;
    rows.count = min(TILE_ROWS, queries * rows.group - rows.first);
    if (rows.count <= 0) return;

    const Logits logits = Logits::of(p.scale, p.soft_cap, p.window, p.k_scale * STORED_SCALE);
    KeyStream stream;
    stream.rows = PagedRows::of(p, kv_head);
    stream.table = p.block_tables + (i64)sequence * p.table_stride;
    stream.shared = shared;
    stream.first_key = logits.first_visible(rows.position(0));
    stream.end_key = rows.position(rows.count - 1) + 1;
    stream.start();
    Row* const table = (Row*)(shared + ROWS);
    put_row(rows, p.alibi_slopes, table);
    __syncthreads();
    load_queries(rows, table, p.query, p.query_stride, shared);  // in one group with the first half
#pragma unroll
    for (int half = 0; half < STAGES - 1; ++half) stream.issue(2 * stream.first_tile() + half, half);

    // A warp without rows only helps to load.
    const i32 warp_rows = min(rows.count - (i32)threadIdx.x / 32 * WARP_ROWS, WARP_ROWS);
    WarpRows warp;
    warp.start(logits, shared);
    for (i32 tile = stream.first_tile(); tile < stream.end_tile(); ++tile) {
        const u8* const keys = stream.next(2 * tile);
        if (tile == stream.first_tile()) warp.keep_query();
        const i32 first_key = tile * TILE_KEYS;
        bool seen = false;
        if (warp_rows > 0) {
            const i32 first = warp.rows[0].position, last = warp.rows[warp_rows - 1].position;
            // Whether any row of the warp sees any key of the tile; if not, leaving it out changes no bit.
            seen = first_key <= last && first_key + TILE_KEYS > logits.first_visible(first);
            // Whether any row does not see all of them.
            const bool masked = first_key + TILE_KEYS - 1 > first || first_key < logits.first_visible(last);
            if (seen) warp.weigh(logits, keys, first_key, masked);
        }
        const u8* const values = stream.next(2 * tile + 1);
        stream.look_ahead(tile);
        if (seen) warp.add(values);
    }
    cp_async_wait<0>();
    if (stream.end_key <= 0) __syncthreads();  // no tile: keeps the queries' copies apart from what store writes over them
    if (warp_rows > 0) warp.store(rows, shared, p.out, p.out_stride, p.v_scale * STORED_SCALE);
}
