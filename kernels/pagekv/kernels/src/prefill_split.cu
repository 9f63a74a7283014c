// Prefill of rows that see so many keys that these are split: one split of the rows of a tile. prefill.cu says how rows and
// keys are laid out; only differences follow.
//
// Floor. As prefill.cu, and a partial result of each row, head and split, (HEAD_SIZE + 2) * 4 bytes, written and read once.
// A tile of 128 rows over 2,048 keys, the shortest split, is 134 MFLOP: 0.45 us at 300 TFLOP/s, in which an H200 moves
// 1.9 MB. Its partial results are 133 KB, both ways counted. Short chunks behind long contexts have too few tiles for a
// GPU: 32 queries of four heads a KV head are one tile, whose keys a single thread block would walk alone.
//
// Work: one (rows, split, KV head). The splits of a tile are different items; items of the same split are neighbours, which
// find its keys in L2. Rows that see nothing of the split by their position have no partial result of it.
// pagekv_merge_rows follows and merges the partial results of each row.
//
// Batch invariance. Which kernel has a row, and where its keys are cut, follow from the row's own number of visible keys;
// cuts are absolute multiples of the length. Partial results are merged in an order that their number decides.
constexpr bool SPLIT = true;
#include "prefill_walk.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2) pagekv_prefill_split(const PrefillSplitParams p) {
    PAGEKV_DYNAMIC_SHARED(shared);
    walk_keys(p, shared);
}
