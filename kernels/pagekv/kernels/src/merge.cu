// Merges the partial results of rows whose keys were split, where the decode kernel left that to be done.
//
// Floor: reads (HEAD_SIZE + 2) * 4 bytes of each split and head, most of them still in L2, and writes one row. For rows of
// few splits a launch costs more than that, so the decode kernel's last block merges them; with many splits the number of
// reads under way at once decides.
// Grid: [merge items, query heads]. Threads: HEAD_SIZE * 2. A warp has 16 dims: four lanes have four dims each, and eight
// such sets of lanes have a strand each (partials.cuh). No shared memory.
// Rule: the result is a function of the row's own partial results, bit for bit, and the decode kernel's merge gives the
// same bits.
#include "partials.cuh"

extern "C" __global__ void __launch_bounds__(HEAD_SIZE * 2) pagekv_merge(const MergeParams p) {
    const Merge merge = Merge::load(p.items, (i32)blockIdx.x);
    if (merge.row < 0) return;
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    merge_together(p, merge, (i32)blockIdx.y, warp * 16 + lane % 4 * 4, lane / 4, 4);
}
