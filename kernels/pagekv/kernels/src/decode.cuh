// Common parts of both forms of the decode kernel: constants, shared memory, the work item, and where results go. The
// kernel is decode.cu; the head of that file says how the work is laid out.
#pragma once
#include "attention.cuh"
#include "partials.cuh"

constexpr int LEAST_SPLIT_LOG2 = 8;  // as in decode_plan.py: a row's keys are cut at multiples of 256 keys, 512, 1024 or 2048
constexpr int SEGMENT = 256;         // keys whose blocks are looked up at a time
constexpr int TILE = KV_ROW_BYTES <= 256 ? 64 : KV_ROW_BYTES <= 512 ? 32 : 16;
constexpr int TILE_BYTES = TILE * KV_ROW_STRIDE;
// Nothing of a block is on its way while it ends an item and begins the next one. The other blocks of its SM fill that
// time: two where 256 keys and values are 80 KiB or more, three where they are 64 KiB or less. With a ring of about 64 KiB three
// blocks share an SM. Four have 56 KiB each: beside a ring of 48 KiB there is no room for queries.
constexpr bool SHORT_ROWS = !WIDE && KV_ROW_BYTES <= 128;
constexpr int RING_SPACE = !SHORT_ROWS ? 65536 : HEAD_SIZE <= 64 ? 49152 : 40960;  // without the padding of rows
constexpr int MAX_STAGES = RING_SPACE / (2 * TILE * KV_ROW_BYTES);
constexpr int STAGES = MAX_STAGES > 4 ? 4 : MAX_STAGES;
constexpr int SEGMENT_TILES = SEGMENT / TILE;
static_assert(STAGES >= 2 && SEGMENT % TILE == 0, "one tile in flight while one is used");
static_assert(STAGES <= SEGMENT_TILES, "tiles on their way are of two segments at most");

// Dynamic shared memory: row indices of the blocks of two segments, members (WIDE), the ring of tiles (keys, values), then memory
// of each form.
constexpr int MOST_MEMBERS = WIDE ? 64 : 0;
constexpr int ROW_INDEX_BYTES = 2 * SEGMENT * 4;
constexpr int RING = ROW_INDEX_BYTES + MOST_MEMBERS * 16;  // a member's words, and one that says whether it is merged now
constexpr int RING_BYTES = STAGES * 2 * TILE_BYTES;

// A row of the batch that has a part in the work.
struct Member {
    i32 row;      // of query and out
    i32 context;  // visible keys
    i32 merge;    // -1: the row has no other split
};

// One split, for the query heads of one KV head: of one row, or (WIDE) of a run of members that share its blocks.
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
    i32 first_member;       // WIDE: in DecodeParams::members
    Member own;             // else: the only member; its context is loaded later
    const Member* table;    // WIDE: the members, in shared memory

    // False: there is no such work, nor any with a higher index.
    __device__ __forceinline__ bool load(const DecodeParams& p, i32 index, i32 rows) {
        const i32 group = p.num_heads / p.num_kv_heads;
        head_groups = (group + rows - 1) / rows;
        const i32 heads_of_item = p.num_kv_heads * head_groups;
        const i32 item = index / heads_of_item;
        if (item >= p.num_items) return false;
        const Bytes16 words = ((const Bytes16*)p.items)[item];
        sequence = (i32)words.word[1];
        split = (i32)(words.word[2] & 0xffffffu);
        split_log2 = LEAST_SPLIT_LOG2 + (i32)(words.word[2] >> 24);
        if constexpr (WIDE) {
            first_member = (i32)words.word[0];
            members = (i32)words.word[3];
        } else {
            own = {(i32)words.word[0], 0, (i32)words.word[3]};
            members = 1;
        }
        kv_head = index % heads_of_item / head_groups;
        head_group = index % head_groups;
        first_head = kv_head * group + head_group * rows;
        heads = min(rows, group - head_group * rows);
        return (i32)words.word[0] >= 0;
    }

    __device__ __forceinline__ i32 first_key() const { return split << split_log2; }
    __device__ __forceinline__ i32 end_key() const { return (split + 1) << split_log2; }
    __device__ __forceinline__ bool one_segment() const { return split_log2 == LEAST_SPLIT_LOG2; }

    // Fetches contexts; in a WIDE kernel all members, into `shared`, after which there is a barrier.
    __device__ __forceinline__ void load_members(const DecodeParams& p, Member* shared) {
        if constexpr (WIDE) {
            table = shared;
            if ((i32)threadIdx.x < members) {
                const Bytes16 words = ((const Bytes16*)p.members)[first_member + (i32)threadIdx.x];
                shared[threadIdx.x] = {(i32)words.word[0], p.context_lens[words.word[1]], (i32)words.word[2]};
            }
            __syncthreads();  // the members are there
        } else {
            own.context = p.context_lens[sequence];
        }
    }

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

    // By rows with `shortest` to `longest` keys: all that any of them sees.
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
        // Splits of several members are whole, so that only a window makes a difference between them.
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
        return span;
    }

    // What the thread block's row `row` sees.
    __device__ __forceinline__ Visible of_row(const Logits& logits, const Work& work, i32 row) const {
        // Members' splits are whole, so without a window all see the same; rows that do not exist are never stored.
        if constexpr (!WIDE || !PAGEKV_FEATURES) return {first, last};
        if (row >= work.rows()) return {first, first};
        const i32 context = work.member(work.member_of(row)).context;
        return Visible::of(logits, work, context, context);
    }
};

// Addresses of the split's rows. Rows are `token_bytes` apart inside a block, and a block is a whole number of rows, so a
// 32-bit row index addresses any token: an address costs a load from shared memory, an add and a multiply-add, whatever
// the block size.
struct RowAddresses {
    u64 keys;           // address of the key row of index 0
    u64 values;         // bytes from a key row to its value row
    u32 token_bytes;
    u32 block_rows;     // row indices from a block to the next
    i32 block_size_log2;
    u32* first_rows;    // shared, [2 * SEGMENT]: row index of slot 0 of each block, those of a segment over those of the last but one

    __device__ __forceinline__ static RowAddresses of(const PagedRows& rows, u32* shared) {
        RowAddresses addresses;
        addresses.keys = (u64)rows.keys;
        addresses.values = (u64)rows.values;
        addresses.token_bytes = (u32)rows.token_bytes;
        addresses.block_rows = (u32)(rows.block_bytes / CHUNK_BYTES) / (u32)(rows.token_bytes / CHUNK_BYTES);
        addresses.block_size_log2 = rows.block_size_log2;
        addresses.first_rows = shared;
        return addresses;
    }

    // Looks up the blocks of a segment and of the next one.
    template <int THREADS>
    __device__ __forceinline__ void load_two(const DecodeParams& p, const Work& work, i32 segment) const {
        load<THREADS>(p, work, segment);
        load<THREADS>(p, work, segment + 1);
    }

    // Looks up the blocks of a segment. Row indices made of ids past the context are never read from. Where there is no id the index is that of slot 0 of
    // block 0, so that copies that ignore their source have an address in the pool.
    template <int THREADS>
    __device__ __forceinline__ void load(const DecodeParams& p, const Work& work, i32 segment) const {
        const i32 first = segment * SEGMENT >> block_size_log2, blocks = SEGMENT >> block_size_log2;
        const i32 last = min(first + blocks, p.table_stride);
        const i32* table = p.block_tables + (i64)work.sequence * p.table_stride;
        u32* const to = first_rows + (segment % 2 ? blocks : 0);
#pragma unroll
        for (int round = 0; round < (SEGMENT + THREADS - 1) / THREADS; ++round) {
            const i32 i = round * THREADS + (i32)threadIdx.x;
            if (i >= blocks) break;
            to[i] = (u32)(first + i < last ? max(table[first + i], 0) : 0) * block_rows;
        }
    }

    // Starts copying the keys and values of a tile into shared memory; rows outside the span become zeros.
    template <int THREADS> __device__ __forceinline__ void copy_tile(const Span& span, i32 tile, u8* target) const {
        constexpr int CHUNKS = KV_ROW_BYTES / CHUNK_BYTES;
        constexpr int ROUNDS = (TILE * CHUNKS + THREADS - 1) / THREADS;
        const i32 slots = (1 << block_size_log2) - 1;
        const i32 first_token = (i32)threadIdx.x / CHUNKS, first_chunk = (i32)threadIdx.x % CHUNKS;
        u32 row[ROUNDS];
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const i32 position = tile * TILE + token_of<THREADS>(round, first_token);
            row[round] = first_rows[(position & (2 * SEGMENT - 1)) >> block_size_log2] + (position & slots);
        }
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if (TILE * CHUNKS % THREADS != 0 && round * THREADS + (i32)threadIdx.x >= TILE * CHUNKS) break;
            const i32 token = token_of<THREADS>(round, first_token);
            const i32 chunk = THREADS % CHUNKS == 0 ? first_chunk : (round * THREADS + (i32)threadIdx.x) % CHUNKS;
            const bool valid = (u32)(tile * TILE + token - span.first) < (u32)(span.last - span.first);
            const u64 source = keys + (u64)row[round] * token_bytes + chunk * CHUNK_BYTES;
            u8* to = target + token * KV_ROW_STRIDE + chunk * CHUNK_BYTES;
            cp_async_16(to, (const void*)source, valid);
            cp_async_16(to + TILE_BYTES, (const void*)(source + values), valid);
        }
    }

    // Token of the tile whose chunk this thread copies in a round; the tile's last token where none is left.
    template <int THREADS> __device__ __forceinline__ static i32 token_of(int round, i32 first_token) {
        constexpr int CHUNKS = KV_ROW_BYTES / CHUNK_BYTES;
        if (THREADS % CHUNKS == 0) return round * (THREADS / CHUNKS) + first_token;
        return min((round * THREADS + (i32)threadIdx.x) / CHUNKS, TILE - 1);
    }
};

// Keeps STAGES - 1 tiles on their way. `step(tile, keys, values)` works on a tile of the span once it has arrived;
// `begin()` runs when the copies that were started before this call have arrived. A tile's stage is filled again only
// after a barrier that every warp passes when it is done with the tile.
template <int THREADS, class Begin, class Step>
__device__ __forceinline__ void for_each_tile(const DecodeParams& p, const Work& work, const RowAddresses& rows,
                                              const Span& span, u8* ring, Begin begin, Step step) {
    auto start = [&](i32 tile, i32 stage) {
        if (tile < span.last_tile) rows.copy_tile<THREADS>(span, tile, ring + stage * 2 * TILE_BYTES);
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
        // A segment begins, and copies of the one before have all been started: its place is free for the next one, whose
        // first copy starts behind a further barrier.
        if (tile % SEGMENT_TILES == 0 && tile > span.first_tile && tile + SEGMENT_TILES < span.last_tile)
            rows.load<THREADS>(p, work, tile / SEGMENT_TILES + 1);
        const u8* keys = ring + stage * 2 * TILE_BYTES;
        step(tile, keys, keys + TILE_BYTES);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    cp_async_wait<0>();
    __syncthreads();  // the ring is free
}

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

// After all of a block's store_result: the block that finishes a row's last split merges the row's partial results, so
// that no second kernel has to start. The choice of the block changes no bit (partials.cuh). Counters are left at zero for
// the next layer. `shared`: a word for each member.
template <int THREADS>
__device__ __forceinline__ void merge_if_last(const DecodeParams& p, const Work& work, u32* shared) {
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
        shared[threadIdx.x] = last ? MERGED_HERE : 0;
    }
    __syncthreads();
    constexpr int PIECES = HEAD_SIZE / 4;
    for (i32 m = 0; m < work.members; ++m) {
        if (shared[m] != MERGED_HERE) continue;
        const Merge merge = Merge::load(p.merges, work.member(m).merge);
        for (i32 i = (i32)threadIdx.x; i < work.heads * PIECES; i += THREADS)
            merge_alone(p, merge, work.first_head + i / PIECES, i % PIECES * 4);
    }
}
