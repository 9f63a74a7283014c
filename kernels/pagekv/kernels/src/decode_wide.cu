// Decode with wide thread blocks: of one split, the keys and values are read once for all rows that share it, and for all
// heads of a group wider than a row tile. decode.cu says how rows, splits and tiles are laid out; only differences follow.
//
// Floor. The keys of a prefix that several rows share are read once for all rows that a thread block has room for, and not
// once for each. Of 64 (row, head) pairs, the most there are, these are 16 rows at 4 heads a KV head and 8 rows at 8.
//
// Work: one (split, KV head) of a run of members, rows whose block tables name the same blocks there. Row r of the thread
// block is head r % heads of member r / heads. Splits are whole for every member; a sliding window may hide keys from some.
// Threads: as many warps for each row tile of 16 as decode.cu has in all, with the same shares of every tile of keys.
// Shared memory: as decode.cu; then the queries, which have no room in registers, and the members.
// Grid: as decode.cu.
//
// Batch invariance. A row's warps do the instructions that they would do in decode.cu; rows of a matrix product do not
// touch each other. Keys that a window hides from one member alone have weight 0 there, an exact no-op for finite values.
constexpr bool WIDE = true;
#if PAGEKV_DTYPE == 0
#include "decode_fma.cuh"
#else
#include "decode_mma.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) pagekv_decode_wide(const DecodeParams p) {
    PAGEKV_DYNAMIC_SHARED(shared);
    decode(p, shared);
}
