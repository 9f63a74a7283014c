// The attention of pagekv_prefill (prefill.cu) with the matrix instructions that sm_90a alone has: a whole warpgroup
// multiplies, and reads keys and values from shared memory itself. 16-bit types with KV memory of the same type, heads of
// 64 and 128. Items, tiles of rows, splits and partial results are those of the other kernel, and so is what is said there
// of batch invariance, with tiles of 128 keys.
//
// One thread block has a multiprocessor: a warpgroup that copies, and two that compute 64 rows each. While one of these
// exponentiates, the other can keep the tensor cores busy. Pages may be too short for copies of boxes (TMA), so a thread
// looks up the address of a key and warps copy rows by cp.async; a fence hands them to the products.
#include "prefill_wgmma.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) pagekv_prefill_wgmma(const PrefillParams p) {
    PAGEKV_SWIZZLED_SHARED(shared);
    i32 sequence;
    const QueryRows rows = QueryRows::of(p, sequence);
    if (sequence < 0) return;

    const Logits logits = Logits::of(p.scale, p.soft_cap, p.window, 1.0f);
    i32 first_key = logits.first_visible(rows.position(0)), end_key = rows.position(rows.count - 1) + 1;
    const Split split = Split::of(p);
    if (!split.all()) {
        first_key = max(first_key, split.first_key());  // beyond end_key: the window has left the split, no tiles
        end_key = min(end_key, split.end_key());
    }
    const i32 first_tile = first_key / TILE_KEYS, end_tile = (end_key + TILE_KEYS - 1) / TILE_KEYS;
    const i32* const table = p.block_tables + (i64)sequence * p.table_stride;
    const Keys keys = {(i64)first_slot(p, (i32)blockIdx.x % p.num_kv_heads), table, first_key, end_key, logits.scale, 1.0f};
    Barriers& barriers = *(Barriers*)(shared + BARRIERS);
    put_position<TILE_ROWS, GROUP_ROWS>(rows, (i32*)(shared + POSITIONS));
    if (threadIdx.x == 0) barriers.start();
    __syncthreads();

    const i32 group = (i32)threadIdx.x / GROUP_THREADS - 1;  // -1: copies
    if (group < 0) {
        fewer_registers<COPYING_REGISTERS>();
        Copier{p, keys, shared}.run(barriers, first_tile, end_tile);
        return;
    }
    more_registers<COMPUTING_REGISTERS>();
    const i32 first_row = group * GROUP_ROWS;
    const i32* const positions = (const i32*)(shared + POSITIONS);
    GroupRows::load_queries(rows, positions, p, shared, first_row);
    mbarrier_arrive(&barriers.queries[group]);
    GroupRows mine;
    mine.start(shared, first_row);
    mbarrier_wait(&barriers.queries[group], 0);

    const i32 oldest = positions[first_row], newest = positions[first_row + GROUP_ROWS - 1];  // of the warpgroup's rows
    Turn turn = {0};
    for (i32 tile = first_tile; tile < end_tile; ++tile) {
        const i32 begin = tile * TILE_KEYS;
        // Whether any row of the warpgroup sees any key of the tile; if not, leaving the tile out changes no bit.
        const bool seen = begin <= newest && begin + TILE_KEYS > logits.first_visible(oldest);
        float score[1][TILE_KEYS / 8][4];
        mbarrier_wait(&barriers.full[turn.slot()], turn.parity());
        if (seen) mine.multiply(shared + RING + turn.slot() * TILE_BYTES, score);
        barriers.release(turn.slot());
        ++turn.count;
        if (seen) {
            // Whether any row of the warp does not see all keys of the tile.
            const bool masked = begin + TILE_KEYS - 1 > mine.positions[0] || begin < logits.first_visible(mine.positions[15]);
            mine.weigh(logits, PAGEKV_FEATURES ? 1.0f : keys.factor, score, begin, masked);
        }
        mbarrier_wait(&barriers.full[turn.slot()], turn.parity());
        if (seen) mine.add(shared + RING + turn.slot() * TILE_BYTES);
        barriers.release(turn.slot());
        ++turn.count;
    }
    if (!split.all()) {
        mine.store_partials(rows, PartialRows{p, split.index}, keys);
    } else {
        // Results leave by way of the warp's own query rows, once no warp's products read these.
        mbarrier_arrive(&barriers.queries[group]);
        mbarrier_wait(&barriers.queries[group], 1);
        mine.store(rows, shared, p.out, p.out_stride, 1.0f, p.sinks);
    }
}
