// Attention of rows that are one generated token each, over paged keys and values (split-KV flash decoding).
//
// Floor. Every visible key and value is read once: 2 * context * kv_heads * HEAD_SIZE * bytes per row, at memory speed;
// nothing else counts. To keep a memory of B bytes/s with a latency of t busy, B * t bytes must be on their way: 4.8 TB/s
// and a loaded microsecond are 36 KB on each of an H200's 132 SMs. Three thread blocks share an SM (72 KB of shared memory
// each) and each keeps a tile of 64 tokens on its way, 32 KB of bf16 at head size 128, while it works on another. With fp8
// keys of up to 128 bytes four do, each with 16 KB on its way or more. Tiles stay on their way from one item to the next
// (decode_walk.cuh).
//
// Shapes: params.cuh. Any group size (query heads a KV head), block sizes of powers of two, any strides between rows.
// Work: one (row, split, KV head); a split is 256 keys, more of long rows (decode_plan.py). All query heads of the KV head are
// in one thread block, so that keys and values are read once. Splits that several rows share, and
// groups of more than BLOCK_ROWS heads, are the work of decode_wide.cu; with f32 such a group takes several neighbouring
// thread blocks instead, which find the keys in L2.
// Grid: as many thread blocks as run at a time, or one for each (item, KV head) where these are fewer. Work is dealt as
// blocks ask for it, KV head fastest, because the KV heads of a token are neighbours in memory and should be read at the
// same time. Any grid size serves any amount of work, and how much there is stands in memory, so that captured graphs need no
// exact size.
// Threads: all copy tiles; decode_mma.cuh (16-bit and fp8) and decode_fma.cuh (f32) say how warps share the computation.
// Shared memory: block ids, 256 keys at a time (an id is read once; paging costs a multiply-add a row), then a ring
// of STAGES tiles filled by cp.async, 16 bytes a copy, neighbouring threads on neighbouring chunks of a row; rows are
// padded against bank conflicts (attention.cuh).
//
// Batch invariance. Keys are cut at absolute multiples of a length that follows from the row's own context, and walked in tiles
// at absolute multiples of TILE from position 0; the group size decides which warp has which tokens; partial results are merged
// in position order; a tile that is wholly masked is an exact no-op. So the bits of a row's result are a function of its own
// query, keys and values (and of window and scales) alone: not of the other rows, the order of the work, the grid, the physical
// blocks, the block size, or the kernel that has the split. Both decode kernels and the merge are compiled without contraction
// to multiply-adds, so that the text alone says where a result is rounded.
//
// The mapping of the first PagedAttention kernel (thread group: query x key; warp: query x block; thread block: query x
// sequence) is replaced: it reads keys and values once for each query head and leaves most of a GPU idle when there are
// fewer sequences than SMs.
constexpr bool WIDE = false;
#if PAGEKV_DTYPE == 0
#include "decode_fma.cuh"
#else
#include "decode_mma.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) pagekv_decode(const DecodeParams p) {
    PAGEKV_DYNAMIC_SHARED(shared);
    decode(p, shared);
}
