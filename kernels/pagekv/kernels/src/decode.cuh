// What every form of the decode kernel has in common: constants, shared memory, the work item, and where results go.
// decode.cu is the kernel; its head says how the work is laid out.
#pragma once
#include "attention.cuh"
#include "partials.cuh"

constexpr int SPLIT_TOKENS = 256;  // work_plan.py has the same; a row's keys are cut at its multiples
constexpr int TILE = KV_ROW_BYTES <= 256 ? 64 : KV_ROW_BYTES <= 512 ? 32 : 16;
constexpr int TILE_BYTES = TILE * KV_ROW_STRIDE;
constexpr int MAX_STAGES = 65536 / (2 * TILE * KV_ROW_BYTES);
constexpr int STAGES = MAX_STAGES > 4 ? 4 : MAX_STAGES;  // a ring of about 64 KiB, so that three blocks share an SM
static_assert(STAGES >= 2 && SPLIT_TOKENS % TILE == 0, "one tile in flight while one is used");

// Dynamic shared memory: pool offsets of the split's blocks, then the ring of tiles (keys, values), then what a form adds.
constexpr int OFFSETS_BYTES = SPLIT_TOKENS * 8;
constexpr int RING_BYTES = STAGES * 2 * TILE_BYTES;

// One split of one row's keys, for the query heads of one KV head that this thread block serves.
struct Work {
    i32 row;         // of query and out
    i32 sequence;
    i32 split;
    i32 merge;       // -1: the row has no other split
    i32 kv_head;
    i32 first_head;  // first query head
    i32 heads;       // at most `rows`
    i32 head_group;  // which part of the KV head's query heads, where they are more than `rows`
    i32 head_groups;

    // False: there is no such work, nor any with a higher index.
    __device__ __forceinline__ bool load(const DecodeParams& p, i32 index, i32 rows) {
        const i32 group = p.num_heads / p.num_kv_heads;
        head_groups = (group + rows - 1) / rows;
        const i32 heads_of_item = p.num_kv_heads * head_groups;
        const i32 item = index / heads_of_item;
        if (item >= p.num_items) return false;
        const Bytes16 words = ((const Bytes16*)p.items)[item];
        row = (i32)words.word[0];
        sequence = (i32)words.word[1];
        split = (i32)words.word[2];
        merge = (i32)words.word[3];
        kv_head = index % heads_of_item / head_groups;
        head_group = index % head_groups;
        first_head = kv_head * group + head_group * rows;
        heads = min(rows, group - head_group * rows);
        return row >= 0;
    }
};

// Keys of a split that its row sees, and the tiles that hold them.
struct Span {
    i32 first, last;            // positions [first, last)
    i32 first_tile, last_tile;  // in units of TILE from position 0
    i32 first_block;            // logical block of offsets[0]

    __device__ __forceinline__ static Span of(const Logits& logits, const PagedRows& rows, i32 split, i32 context) {
        Span span;
        const i32 begin = split * SPLIT_TOKENS;
        span.first = max(begin, logits.first_visible(context - 1));
        span.last = max(span.first, min(begin + SPLIT_TOKENS, context));
        span.first_tile = span.first / TILE;
        span.last_tile = (span.last + TILE - 1) / TILE;
        span.first_block = rows.logical_block(begin);
        return span;
    }
};

// The split's part of the block table into shared memory. Which of its blocks are visible is not yet known, so that the
// context length and the block ids arrive together; offsets made of ids past the context are never used.
template <int THREADS>
__device__ __forceinline__ void load_split_offsets(const DecodeParams& p, const PagedRows& rows, const Work& work,
                                                   i64* offsets) {
    const i32 first = rows.logical_block(work.split * SPLIT_TOKENS);
    const i32 last = min(rows.logical_block((work.split + 1) * SPLIT_TOKENS - 1) + 1, p.table_stride);
    load_block_offsets<THREADS>(rows, p.block_tables + (i64)work.sequence * p.table_stride, first, last, offsets);
}

// Keeps STAGES - 1 tiles on their way. `step(tile, keys, values)` works on a tile of the span once it is there;
// `begin()` runs when the copies that were started before this function are there. A tile's stage is filled again only
// after a barrier that every warp passes when it is done with it.
template <int THREADS, class Begin, class Step>
__device__ __forceinline__ void for_each_tile(const PagedRows& rows, const i64* offsets, const Span& span, u8* ring,
                                              Begin begin, Step step) {
    auto start = [&](i32 tile, i32 stage) {
        if (tile < span.last_tile) {
            u8* keys = ring + stage * 2 * TILE_BYTES;
            load_tile<TILE, THREADS>(rows, offsets, span.first_block, tile * TILE, span.first, span.last, keys,
                                     keys + TILE_BYTES);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) start(span.first_tile + stage, stage);
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    begin();
    i32 stage = 0;
    for (i32 tile = span.first_tile; tile < span.last_tile; ++tile) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        start(tile + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        const u8* keys = ring + stage * 2 * TILE_BYTES;
        step(tile, keys, keys + TILE_BYTES);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    cp_async_wait<0>();
    __syncthreads();  // the ring is free
}

// Stores four dims of a head: into the output where the row has one split, else as a partial result.
__device__ __forceinline__ void store_result(const DecodeParams& p, const Work& work, i32 head, i32 dim,
                                             const Softmax& state, const float (&out)[4]) {
    if (work.merge < 0) {
        store_output((Element*)p.out + work.row * p.out_stride + head * HEAD_SIZE + dim, out, normaliser(state.sum));
        return;
    }
    const Merge merge = Merge::load(p.merges, work.merge);
    const i64 at = (i64)(merge.first_partial + work.split - merge.first_split) * p.num_heads + head;
    *(float4*)(p.partial_out + at * HEAD_SIZE + dim) = make_float4(out[0], out[1], out[2], out[3]);
    if (dim == 0) *(float2*)(p.partial_state + at * 2) = make_float2(state.maximum, state.sum);
}

// After all of a block's store_result: the block that finishes a row's last split merges them, so that no second kernel
// has to start. Which block that is changes no bit (partials.cuh). The counter is left at zero for the next layer. `shared`: one word.
template <int THREADS>
__device__ __forceinline__ void merge_if_last(const DecodeParams& p, const Work& work, u32* shared) {
    if (work.merge < 0 || p.arrivals == nullptr) return;
    const Merge merge = Merge::load(p.merges, work.merge);
    u32* arrivals = p.arrivals + (work.merge * p.num_kv_heads + work.kv_head) * work.head_groups + work.head_group;
    __threadfence();  // this thread's partial results, before the count that announces them
    __syncthreads();
    if (threadIdx.x == 0) *shared = atomicAdd(arrivals, 1u);
    __syncthreads();
    if (*shared != (u32)merge.partials - 1) return;
    __threadfence();
    if (threadIdx.x == 0) *arrivals = 0;
    constexpr int PIECES = HEAD_SIZE / 4;
    for (i32 i = (i32)threadIdx.x; i < work.heads * PIECES; i += THREADS)
        merge_alone(p, merge, work.first_head + i / PIECES, i % PIECES * 4);
}
