// The walk of a thread block through its work items, and the copies of tiles. A thread block starts copying the first
// tiles of its next item before it ends the one at hand, so copies are under way also while it merges and stores results.
//
// An item is walked in slots. A slot computes one tile, and starts the copy of the tile that is due STAGES - 1 slots later.
// The last slots also prepare the next item. If there is one, an item of few tiles gets empty slots behind them, so that it
// has STAGES + 1 slots. Counted backwards from the last slot, which is slot 1:
//   slot STAGES + 1  reads the next item's words, and draws the index of the work after it
//   slot STAGES      reads the next item's first block ids (WIDE: and its members)
//   slot STAGES - 1  starts the copy of the next item's first tile
// A slot issues these reads before its computation, and stores what they return in shared memory after it, so that no warp
// waits for them. The barrier at the end of the slot makes it visible to all warps.
//
// A stage of the ring is filled again only after a barrier that every warp reaches when it has used the stage. The stage of
// an item's last slot stays free for the merge of the warps' results.
#pragma once
#include "decode.cuh"

// The keys and values that are copied: those of one item.
struct Source {
    i32 kv_head;
    i32 first, last;  // positions [first, last); rows outside become zeros
    i32 tile;         // the next tile to be copied, if it begins before `last`
    i32 flip;         // SEGMENT if odd segments have the first half of the block ids, else 0

    // The half of the block ids that a segment has: 0 or SEGMENT, in positions.
    __device__ __forceinline__ i32 place(i32 segment) const { return (segment * SEGMENT ^ flip) & SEGMENT; }
};

template <int THREADS, int BLOCK_ROWS> struct Walk {
    const DecodeParams& p;
    u8* const shared;
    u8* const ring;
    Source source;
    i32 ended;  // number of items before the one at hand; its parity selects the record and the members
    i32 stage;  // of the slot at hand

    static_assert(MOST_MEMBERS == 0 || BLOCK_ROWS * 4 <= THREADS, "a thread for each word of the members");

    __device__ __forceinline__ Walk(const DecodeParams& p, u8* shared)
        : p(p), shared(shared), ring(shared + RING), ended(0), stage(0) {}

    __device__ __forceinline__ i32* block_ids() const { return (i32*)shared; }
    __device__ __forceinline__ Record& record(i32 which) const {
        return ((Record*)(shared + RECORDS))[which & 1];
    }
    __device__ __forceinline__ Launch& launch() const { return *(Launch*)(shared + LAUNCH); }
    __device__ __forceinline__ Member* members(i32 which) const {
        return (Member*)(shared + MEMBERS) + (which & 1) * MOST_MEMBERS;
    }

    __device__ __forceinline__ Work work_of(i32 which) const {
        return Work::of(launch(), record(which), members(which), BLOCK_ROWS);
    }
    __device__ __forceinline__ Work work() const { return work_of(ended); }
    __device__ __forceinline__ Work next_work() const { return work_of(ended + 1); }
    __device__ __forceinline__ bool more() const { return record(ended).following < launch().all_work; }
    // During a slot: the stage of the slot before. After an item's last slot: the stage of that slot.
    __device__ __forceinline__ u8* free_stage() const {
        return ring + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE_BYTES;
    }

    // ---- the first item

    // Returns false if the thread block has no work; else `work` becomes its first. The record is visible after the next
    // barrier, WIDE members on return.
    __device__ __forceinline__ bool begin(Work& work) const {
        Launch all;
        all.keys = (u64)first_slot(p, 0);
        all.group = p.num_heads / p.num_kv_heads;
        all.head_groups = (all.group + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const i32 heads_of_item = p.num_kv_heads * all.head_groups;
        const i32 item = min((i32)blockIdx.x / heads_of_item, p.num_items - 1), head = (i32)blockIdx.x % heads_of_item;
        const Bytes16 words = ((const Bytes16*)p.items)[item];
        const i32 context = WIDE ? 0 : p.item_contexts[item];
        all.all_work = (i32)p.dealt[1] * heads_of_item;
        all.block_rows = (u32)(p.block_stride / HEAD_SIZE) / (u32)p.num_kv_heads;
        if ((i32)blockIdx.x >= all.all_work) return false;
        const Record first = {{(i32)words.word[0], (i32)words.word[1], (i32)words.word[2], (i32)words.word[3]}, context,
                              head / all.head_groups, head % all.head_groups, (i32)(blockIdx.x + gridDim.x)};
        work = Work::of(all, first, members(0), BLOCK_ROWS);
        if (threadIdx.x == 0) {
            record(0) = first;
            launch() = all;
        }
        if constexpr (WIDE) {
            const i32 thread = (i32)threadIdx.x;
            if (thread < work.members * 4) ((i32*)members(0))[thread] = p.members[work.first_member() * 4 + thread];
            __syncthreads();  // the members are there
        }
        return true;
    }

    // Looks up the block ids of the first segment; they are visible after the next barrier.
    __device__ __forceinline__ void look_up_first(const Work& work, const Span& span) {
        i32 ids[ID_ROUNDS];
        source = source_of(work, span, 0);
        const i32 segment = span.first_tile / SEGMENT_TILES;
        ask_ids(work.sequence, segment, ids);
        keep_ids(source.place(segment), ids);
    }

    // Starts copying the first tiles. Copies that were started before belong to the first tile's group.
    __device__ __forceinline__ void start() {
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) copy_tile(ring + i * STAGE_BYTES);
    }

    // ---- an item

    // Walks the item at hand: calls `begin()` when its queries have arrived, then `step(tile, keys, values)` for each tile.
    template <class Begin, class Step>
    __device__ __forceinline__ void over(const Logits& logits, const Span& span, Begin begin, Step step) {
        const bool more = this->more();
        i32 left = span.last_tile - span.first_tile;  // slots
        if (more) left = max(left, STAGES + 1);
        // The queries of a later item are the newest group of copies, behind its first tiles.
        if (ended > 0)
            cp_async_wait<0>();
        else
            cp_async_wait<STAGES - 2>();
        __syncthreads();  // what the item before had in shared memory is done with
        begin();
        for (i32 tile = span.first_tile; left > 0; ++tile, --left) {
            if (more && left == STAGES - 1) turn_to_next(logits, span);
            copy_tile(free_stage());
            // At the first tile of a segment, all copies of the segment before have been started. So the segment after this one
            // may have its half of the block ids; the first copy that uses them starts after a further barrier.
            const bool own_ids = tile % SEGMENT_TILES == 0 && (tile + SEGMENT_TILES) * TILE < span.last;
            const bool next_words = more && left == STAGES + 1, next_ids = more && left == STAGES;
            i32 word = 0, ids[ID_ROUNDS];
            if (next_words) word = ask_words();
            if (own_ids) ask_ids(record(ended).item[1], tile / SEGMENT_TILES + 1, ids);
            if (next_ids) ask_next(logits, ids, word);
            if (tile * TILE < span.last) {
                const u8* keys = ring + stage * STAGE_BYTES;
                step(tile, keys, keys + TILE_BYTES);
            }
            if (next_words) keep_words(word);
            if (own_ids) keep_ids(source.place(tile / SEGMENT_TILES + 1), ids);
            if (next_ids) keep_ids(next_place(span), ids);
            if (WIDE && next_ids) keep_members(word);
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            if (left > 1) cp_async_wait<STAGES - 2>();  // else the next tile is another item's
            __syncthreads();  // the tile used is done with, the next one is there
        }
    }

    __device__ __forceinline__ void go_on() { ++ended; }

    // ---- block ids

    static constexpr int ID_ROUNDS = (SEGMENT + THREADS - 1) / THREADS;

    // Reads this thread's block ids of a segment. Places behind the end of the table count as block 0, and `keep_ids` does
    // the same for blocks that were given back (negative). Nothing is read from these, but even a copy that ignores its
    // source has an address in the pool then.
    __device__ __forceinline__ void ask_ids(i32 sequence, i32 segment, i32 (&ids)[ID_ROUNDS]) const {
        const i32 first = segment * SEGMENT >> p.block_size_log2, blocks = SEGMENT >> p.block_size_log2;
        const i32 last = min(first + blocks, p.table_stride);
        const i32* table = p.block_tables + (i64)sequence * p.table_stride;
#pragma unroll
        for (int round = 0; round < ID_ROUNDS; ++round) {
            const i32 i = round * THREADS + (i32)threadIdx.x;
            ids[round] = i < blocks && first + i < last ? table[first + i] : 0;
        }
    }

    __device__ __forceinline__ void keep_ids(i32 place, const i32 (&ids)[ID_ROUNDS]) const {
        const i32 blocks = SEGMENT >> p.block_size_log2;
        i32* to = block_ids() + (place >> p.block_size_log2);
#pragma unroll
        for (int round = 0; round < ID_ROUNDS; ++round) {
            const i32 i = round * THREADS + (i32)threadIdx.x;
            if (i < blocks) to[i] = max(ids[round], 0);
        }
    }

    // ---- the next item

    // Reads this thread's word of the next item's record: eight threads have one each.
    __device__ __forceinline__ i32 ask_words() const {
        const i32 thread = (i32)threadIdx.x;
        if (thread >= (i32)(sizeof(Record) / 4)) return 0;
        const i32 heads_of_item = p.num_kv_heads * launch().head_groups, index = record(ended).following;
        const i32 item = index / heads_of_item, head = index % heads_of_item;
        if (thread < 4) return p.items[item * 4 + thread];
        if (thread == 4) return WIDE ? 0 : p.item_contexts[item];
        if (thread == 5) return head / launch().head_groups;
        if (thread == 6) return head % launch().head_groups;
        return draw();
    }

    // A thread block's place in the grid gives its first two works, so a launch without further work does not use the
    // counter. In each work that is not its last, a thread block draws the work after the next one. So a launch draws
    // all_work - gridDim.x numbers, and the thread block that draws the last of them sets the counter back to zero for the
    // next launch (`keep_words`). If a launch that failed left another value, the upload of the next step overwrites it.
    __device__ __forceinline__ i32 draw() const {
        return launch().all_work > 2 * (i32)gridDim.x ? (i32)atomicAdd(p.dealt, 1u) : NONE_DRAWN;
    }
    static constexpr i32 NONE_DRAWN = 0x3fffffff;  // beyond all work

    __device__ __forceinline__ void keep_words(i32 word) const {
        const i32 thread = (i32)threadIdx.x, blocks = (i32)gridDim.x;
        if (thread >= (i32)(sizeof(Record) / 4)) return;
        if (thread == 7) {
            if (word == launch().all_work - blocks - 1) *p.dealt = 0;
            word += 2 * blocks;
        }
        ((i32*)&record(ended + 1))[thread] = word;
    }

    // Reads the next item's first block ids and (WIDE) this thread's word of its members.
    __device__ __forceinline__ void ask_next(const Logits& logits, i32 (&ids)[ID_ROUNDS], i32& word) const {
        const Work next = next_work();
        i32 segment = next.first_key() / SEGMENT;
        if constexpr (!WIDE) segment = Span::of(logits, next).first_tile / SEGMENT_TILES;
        ask_ids(next.sequence, segment, ids);
        if (WIDE && (i32)threadIdx.x < next.members * 4)
            word = p.members[next.first_member() * 4 + (i32)threadIdx.x];
    }

    // The half of the block ids for the next item's first segment: the half that the last segment of the item at hand, whose
    // `span` is given, does not have.
    __device__ __forceinline__ i32 next_place(const Span& span) const {
        return source.place((span.last - 1) / SEGMENT) ^ SEGMENT;
    }

    __device__ __forceinline__ void keep_members(i32 word) const {
        if ((i32)threadIdx.x < next_work().members * 4) ((i32*)members(ended + 1))[threadIdx.x] = word;
    }

    __device__ __forceinline__ void turn_to_next(const Logits& logits, const Span& span) {
        const Work next = next_work();
        source = source_of(next, Span::of(logits, next), next_place(span));
    }

    // ---- copies

    // `place`: the half of the block ids that the first segment has.
    __device__ __forceinline__ Source source_of(const Work& work, const Span& span, i32 place) const {
        const i32 segment = span.first_tile / SEGMENT_TILES;
        return {work.kv_head, span.first, span.last, span.first_tile,
                (segment * SEGMENT ^ place) & SEGMENT};
    }

    // Starts copying the source's next tile, if there is one, into a stage, and closes a group of copies in any case.
    __device__ __forceinline__ void copy_tile(u8* target) {
        constexpr int CHUNKS = KV_ROW_BYTES / CHUNK_BYTES;
        constexpr int ROUNDS = (TILE * CHUNKS + THREADS - 1) / THREADS;
        if (source.tile * TILE < source.last) {
            const i32 slots = (1 << p.block_size_log2) - 1;
            const i32 first_token = (i32)threadIdx.x / CHUNKS, first_chunk = (i32)threadIdx.x % CHUNKS;
            const u32 block_rows = launch().block_rows, token_bytes = (u32)(p.num_kv_heads * KV_ROW_BYTES);
            const u64 to_values = (u64)(p.kv_stride * KV_ELEMENT_BYTES);
            const u64 keys = launch().keys + (u32)(source.kv_head * KV_ROW_BYTES);
            u32 row[ROUNDS];
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const i32 position = source.tile * TILE + token_of(round, first_token);
                const i32 place = (position ^ source.flip) & (2 * SEGMENT - 1);
                row[round] = (u32)block_ids()[place >> p.block_size_log2] * block_rows + (u32)(position & slots);
            }
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                if (TILE * CHUNKS % THREADS != 0 && round * THREADS + (i32)threadIdx.x >= TILE * CHUNKS) break;
                const i32 token = token_of(round, first_token);
                const i32 chunk = THREADS % CHUNKS == 0 ? first_chunk : (round * THREADS + (i32)threadIdx.x) % CHUNKS;
                const bool valid = (u32)(source.tile * TILE + token - source.first) < (u32)(source.last - source.first);
                const u64 from = keys + (u64)row[round] * token_bytes + chunk * CHUNK_BYTES;
                u8* to = target + token * KV_ROW_STRIDE + chunk * CHUNK_BYTES;
                cp_async_16(to, (const void*)from, valid);
                cp_async_16(to + TILE_BYTES, (const void*)(from + to_values), valid);
            }
            ++source.tile;
        }
        cp_async_commit();
    }

    // Token of the tile whose chunk this thread copies in a round; the tile's last token where none is left.
    __device__ __forceinline__ static i32 token_of(int round, i32 first_token) {
        constexpr int CHUNKS = KV_ROW_BYTES / CHUNK_BYTES;
        if (THREADS % CHUNKS == 0) return round * (THREADS / CHUNKS) + first_token;
        return min((round * THREADS + (i32)threadIdx.x) / CHUNKS, TILE - 1);
    }
};
