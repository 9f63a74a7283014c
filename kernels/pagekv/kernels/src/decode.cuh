// Common parts of both decode kernels (decode.cu, decode_wide.cu) and of their two forms (decode_mma.cuh, decode_fma.cuh):
// sizes, shared memory, the work item, and where results go. The head of decode.cu says how the work is laid out.
#pragma once
#include "attention.cuh"
#include "partials.cuh"

constexpr int LEAST_SPLIT_LOG2 = 8;  // as in decode_plan.py: a row's keys are cut at multiples of 256 keys, 512, 1024 or 2048
constexpr int SEGMENT = 256;         // keys whose blocks are looked up at a time
constexpr int TILE = KV_ROW_BYTES <= 256 ? 64 : KV_ROW_BYTES <= 512 ? 32 : 16;
constexpr int TILE_BYTES = TILE * KV_ROW_STRIDE;
// With a ring of about 64 KiB three blocks share an SM. fp8 needs a fourth to keep the memory busy: its tiles take more
// instructions and have half the bytes.
constexpr bool FOUR_BLOCKS = !WIDE && FP8_KV && HEAD_SIZE <= 128;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr bool SMALL_SM = true;  // 100 KB of shared memory: half as many thread blocks fit, so a thread may have more registers
#else
constexpr bool SMALL_SM = false;
#endif
constexpr int RING_SPACE = WIDE || KV_ROW_BYTES > 128 ? 65536 : HEAD_SIZE <= 64 ? 49152 : 40960;  // without the padding of rows
constexpr int MAX_STAGES = RING_SPACE / (2 * TILE * KV_ROW_BYTES);
constexpr int STAGES = MAX_STAGES > 4 ? 4 : MAX_STAGES;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;
constexpr int SEGMENT_TILES = SEGMENT / TILE;
static_assert(STAGES >= 2 && SEGMENT % TILE == 0, "one tile in flight while one is used");
static_assert(STAGES <= SEGMENT_TILES, "tiles on their way are of two segments at most");

// A row of the batch, among those that a work item computes.
struct alignas(16) Member {
    i32 row;       // of query and out
    i32 sequence;  // not read
    i32 merge;     // -1: the row has no other split
    i32 context;   // visible keys
};

// A work item as a thread block keeps it in shared memory: one record for the item at hand, one for the next.
struct alignas(16) Record {
    i32 item[4];    // DecodeParams::items
    i32 context;    // DecodeParams::item_contexts
    i32 kv_head;
    i32 head_group;
    i32 following;  // index of the thread block's work after this one; from Launch::all_work on: none
};

// The part that all work of a launch has in common.
struct alignas(16) Launch {
    u64 keys;         // address of the key row of KV head 0 in slot 0 of block 0
    i32 all_work;     // number of (item, KV head, head group) triples
    i32 group;        // query heads of a KV head
    i32 head_groups;  // parts of a KV head's query heads, where these are more than a thread block has rows
    u32 block_rows;   // rows of keys or values from a block of the pool to the next
};

// Dynamic shared memory: block ids of two segments, two records, the launch, a flag for each member, members of
// both records (WIDE), the ring of tiles (keys, values), then what each form adds.
constexpr int MOST_MEMBERS = WIDE ? 64 : 0;
constexpr int RECORDS = 2 * SEGMENT * 4;
constexpr int LAUNCH = RECORDS + 2 * sizeof(Record);
constexpr int MERGED_FLAGS = LAUNCH + sizeof(Launch);
constexpr int MEMBERS = MERGED_FLAGS + (WIDE ? MOST_MEMBERS * 4 : 16);
constexpr int RING = MEMBERS + 2 * MOST_MEMBERS * sizeof(Member);
constexpr int RING_BYTES = STAGES * STAGE_BYTES;

// One split of keys and the query heads of one KV head, for one row or (WIDE) for members whose blocks there are the same.
struct Work {
    i32 split;       // in units of its own length, from position 0
    i32 split_log2;  // of its length in keys
    i32 sequence;    // its block table names the split's blocks
    i32 kv_head;
    i32 first_head;  // first query head
    i32 heads;       // query heads of each member
    i32 head_group;  // part of the KV head's query heads, where these are more than a thread block has rows
    i32 head_groups;
    i32 members;
    Member own;           // the only member; WIDE: the item's words
    const Member* table;  // WIDE: the members, in shared memory

    // `rows`: the most that a thread block has.
    __device__ __forceinline__ static Work of(const Launch& launch, const Record& record, const Member* table, i32 rows) {
        Work work;
        work.sequence = record.item[1];
        work.split = record.item[2] & 0xffffff;
        work.split_log2 = LEAST_SPLIT_LOG2 + (i32)((u32)record.item[2] >> 24);
        work.own = {record.item[0], record.item[1], record.item[3], record.context};
        work.table = table;
        work.members = WIDE ? record.item[3] : 1;
        work.kv_head = record.kv_head;
        work.head_group = record.head_group;
        work.head_groups = launch.head_groups;
        work.first_head = work.kv_head * launch.group + work.head_group * rows;
        work.heads = min(rows, launch.group - work.head_group * rows);
        return work;
    }

    __device__ __forceinline__ i32 first_member() const { return own.row; }  // WIDE
    __device__ __forceinline__ i32 first_key() const { return split << split_log2; }
    __device__ __forceinline__ i32 end_key() const { return (split + 1) << split_log2; }
    __device__ __forceinline__ bool one_segment() const { return split_log2 == LEAST_SPLIT_LOG2; }

    __device__ __forceinline__ const Member& member(i32 index) const {
        if constexpr (WIDE)
            return table[index];
        else
            return own;
    }

    // Rows of the thread block: (member, head) pairs.
    __device__ __forceinline__ i32 rows() const { return WIDE ? members * heads : heads; }
    __device__ __forceinline__ i32 member_of(i32 row) const { return WIDE ? row / heads : 0; }
    __device__ __forceinline__ i32 head_of(i32 row) const { return WIDE ? row % heads : row; }
};

// Keys of a split that are seen: positions [first, last).
struct Visible {
    i32 first, last;

    // The keys that any row sees, among rows whose contexts have `shortest` to `longest` keys.
    __device__ __forceinline__ static Visible of(const Logits& logits, const Work& work, i32 shortest, i32 longest) {
        const i32 begin = work.first_key(), end = work.end_key();
        Visible seen;
        seen.first = min(max(begin, logits.first_visible(shortest - 1)), end);  // end: wholly before the window, no tiles
        seen.last = max(seen.first, min(end, longest));
        return seen;
    }
};

// Keys of the split that any member sees, and the tiles that hold them.
struct Span {
    i32 first, last;            // positions [first, last)
    i32 first_tile, last_tile;  // in units of TILE from position 0

    __device__ __forceinline__ static Span of(const Logits& logits, const Work& work) {
        i32 shortest = work.member(0).context, longest = shortest;
        // A split of several members is whole for each, so only a window makes a difference between them.
        for (i32 i = 1; PAGEKV_FEATURES && i < work.members; ++i) {
            shortest = min(shortest, work.member(i).context);
            longest = max(longest, work.member(i).context);
        }
        const Visible seen = Visible::of(logits, work, shortest, longest);
        Span span;
        span.first = seen.first;
        span.last = seen.last;
        span.first_tile = span.first / TILE;
        span.last_tile = (span.last + TILE - 1) / TILE;
        // A longer split is walked from the beginning of a segment, so that the next segment can be looked up on the way. WIDE:
        // of its first segment, because block ids are looked up before the members are known.
        if (!work.one_segment() && span.first < span.last)
            span.first_tile = WIDE ? work.first_key() / TILE : span.first_tile / SEGMENT_TILES * SEGMENT_TILES;
        return span;
    }

    // The keys that row `row` of the thread block sees.
    __device__ __forceinline__ Visible of_row(const Logits& logits, const Work& work, i32 row) const {
        // Members' splits are whole, so without a window all see the same; rows that do not exist are never stored.
        if constexpr (!WIDE || !PAGEKV_FEATURES) return {first, last};
        if (row >= work.rows()) return {first, first};
        const i32 context = work.member(work.member_of(row)).context;
        return Visible::of(logits, work, context, context);
    }
};

// Stores four dims of a head of a member: into the output where the row has one split, else as a partial result.
__device__ __forceinline__ void store_result(const DecodeParams& p, const Work& work, const Member& member, i32 head,
                                             i32 dim, const Softmax& state, const float (&out)[4]) {
    if (member.merge < 0) {
        const float factor = normaliser(state, PAGEKV_FEATURES ? p.sinks : nullptr, head);
        store_output((Element*)p.out + member.row * p.out_stride + head * HEAD_SIZE + dim, out, factor);
        return;
    }
    const Merge merge = Merge::load(p.merges, member.merge);
    const i64 at = (i64)(merge.first_partial + work.split - merge.first_split) * p.num_heads + head;
    *(float4*)(p.partial_out + at * HEAD_SIZE + dim) = make_float4(out[0], out[1], out[2], out[3]);
    if (dim == 0) *(float2*)(p.partial_state + at * 2) = make_float2(state.maximum, state.sum);
}

constexpr u32 MERGED_HERE = 1;

// Called after all `store_result` of a thread block. The thread block that finishes a row's last split merges the row's
// partial results, so no second kernel has to start. It changes no bit which thread block that is (partials.cuh). Counters
// are left at zero for the next layer. `flags`: in shared memory, a word for each member.
template <int THREADS>
__device__ __forceinline__ void merge_if_last(const DecodeParams& p, const Work& work, u32* flags) {
    if (p.merge_counters == nullptr || (!WIDE && work.own.merge < 0)) return;
    __syncthreads();
    if ((i32)threadIdx.x < work.members) {
        const i32 index = work.member((i32)threadIdx.x).merge;
        bool last = false;
        if (index >= 0) {
            u32* counter = p.merge_counters + (index * p.num_kv_heads + work.kv_head) * work.head_groups + work.head_group;
            __threadfence();  // the block's partial results before the count that announces them (the barrier passes them on)
            last = atomicAdd(counter, 1u) == (u32)Merge::load(p.merges, index).partials - 1;
            __threadfence();  // and the count before reads of the other blocks' results
            if (last) *counter = 0;
        }
        flags[threadIdx.x] = last ? MERGED_HERE : 0;
    }
    __syncthreads();
    constexpr int PIECES = HEAD_SIZE / 4;
    for (i32 m = 0; m < work.members; ++m) {
        if (flags[m] != MERGED_HERE) continue;
        const Merge merge = Merge::load(p.merges, work.member(m).merge);
        for (i32 i = (i32)threadIdx.x; i < work.heads * PIECES; i += THREADS)
            merge_alone(p, merge, work.first_head + i / PIECES, i % PIECES * 4);
    }
}
