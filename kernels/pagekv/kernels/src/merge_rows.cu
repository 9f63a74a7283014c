// Merges the partial results of rows whose keys were split, where rows are many and their splits few: of prompts, behind
// prefill.cu, and of decodes among them.
//
// Floor: reads (HEAD_SIZE + 2) * 4 bytes of each split and head, and writes one row. Enough rows fill the GPU, so a thread
// has four dims of a head, for which STRANDS reads are under way, and nothing is exchanged; merge.cu serves few rows of
// many splits, with a warp for 16 dims.
// Grid: [merge items, parts of a row]. Threads: THREADS, neighbours on neighbouring dims. No shared memory.
// Rule: as merge.cu, with the same bits.
#include "partials.cuh"

constexpr int THREADS = 256;

// With fewer registers than two thread blocks on a multiprocessor allow, sm_100 and sm_120 would spill.
extern "C" __global__ void __launch_bounds__(THREADS, 2) pagekv_merge_rows(const MergeParams p) {
    const Merge merge = Merge::load(p.items, (i32)blockIdx.x);
    if (merge.row < 0) return;
    constexpr int PIECES = HEAD_SIZE / 4;
    const i32 piece = (i32)blockIdx.y * THREADS + (i32)threadIdx.x, head = piece / PIECES;
    if (head < p.num_heads) merge_alone(p, merge, head, piece % PIECES * 4);
}
