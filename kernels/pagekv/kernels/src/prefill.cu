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
// Batch invariance. Tiles of keys begin at multiples of TILE_KEYS from position 0 and are walked in order of position.
// Within a tile every row of a fragment goes through the same instructions, and other rows decide only which tiles are
// walked at all. A tile in which a row sees nothing leaves that row unchanged, bit by bit: its weights are 2^-inf = 0, its
// maximum stays and its factor is 2^0 = 1. So outputs depend on nothing but the row's own query and the keys and values
// that it sees: not on chunks, batch, physical blocks or block size.
constexpr bool SPLIT = false;
#include "prefill_walk.cuh"

// Two thread blocks on a multiprocessor: while one exponentiates, the other keeps the tensor cores busy.
extern "C" __global__ void __launch_bounds__(THREADS, 2) pagekv_prefill(const PrefillParams p) {
    PAGEKV_DYNAMIC_SHARED(shared);
    walk_keys(p, shared);
}
