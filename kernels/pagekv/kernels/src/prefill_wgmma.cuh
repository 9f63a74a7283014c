// Prefill by warpgroups: sizes and shared memory, the warpgroup that copies keys and values, and the work of one warp of a
// warpgroup that computes.
//
// Shared memory holds tiles of 128 rows (queries, keys or values) in panels of 64 elements: a row of a panel is 128 bytes,
// whose 16-byte chunk c lies at c ^ (row % 8). This is the swizzle of 128 bytes that products of a warpgroup read, and
// copies of whole rows meet every bank once.
#pragma once
#include "prefill_softmax.cuh"
#include "ptx_sm90a.cuh"

static_assert(!FP32 && !FP8_KV && (HEAD_SIZE == 64 || HEAD_SIZE == 128), "variants.py has the same list");

constexpr int GROUP_THREADS = 128;  // of a warpgroup
constexpr int GROUPS = 2;           // that compute
constexpr int THREADS = (1 + GROUPS) * GROUP_THREADS;
constexpr int GROUP_ROWS = 64;
constexpr int TILE_ROWS = GROUPS * GROUP_ROWS;  // prefill_plan.py has the same for these variants
constexpr int TILE_KEYS = 128;
constexpr int SLOTS = 4;  // two of keys and two of values

constexpr int PANEL_ROW_BYTES = 128;
constexpr int EIGHT_ROWS = 8 * PANEL_ROW_BYTES;
constexpr int PANEL_BYTES = 128 * PANEL_ROW_BYTES;
constexpr int PANELS = HEAD_SIZE / 64;
constexpr int TILE_BYTES = PANELS * PANEL_BYTES;
static_assert(TILE_ROWS == 128 && TILE_KEYS == 128, "a panel has as many rows");

// Queries, ring, positions of rows, barriers.
constexpr int RING = TILE_BYTES;
constexpr int POSITIONS = RING + SLOTS * TILE_BYTES;
constexpr int BARRIERS = POSITIONS + TILE_ROWS * 4;

// 168 registers a thread, 64,512 of 65,536 in all, are dealt anew: 40 * 128 + 232 * 256.
constexpr int COPYING_REGISTERS = 40, COMPUTING_REGISTERS = 232;

struct SwizzledRow {
    static constexpr int STRIDE = PANEL_ROW_BYTES;
    static __device__ __forceinline__ i32 chunk(i32 row, i32 chunk) {
        return chunk / 8 * PANEL_BYTES + (chunk ^ row) % 8 * CHUNK_BYTES;
    }
};

// Byte of chunk `chunk` of a row in a tile.
__device__ __forceinline__ i32 place_of(i32 row, i32 chunk) { return row * SwizzledRow::STRIDE + SwizzledRow::chunk(row, chunk); }

struct Barriers {
    u64 full[SLOTS];      // the copies of a tile have arrived; every copying thread says so
    u64 empty[SLOTS];     // a tile may be overwritten; a lane of every computing warp says so
    u64 queries[GROUPS];  // first phase: a warpgroup's queries have arrived; second: its products are done; its threads say so

    __device__ __forceinline__ void start() {
        for (int slot = 0; slot < SLOTS; ++slot) {
            mbarrier_init(&full[slot], GROUP_THREADS);
            mbarrier_init(&empty[slot], GROUPS * GROUP_THREADS / 32);
        }
        for (int group = 0; group < GROUPS; ++group) mbarrier_init(&queries[group], GROUP_THREADS);
        mbarrier_init_fence();
    }

    // Called by all lanes of a computing warp. __syncwarp, because a lane that has not yet seen the slot full could miss that
    // phase and wait for a later one.
    __device__ __forceinline__ void release(u32 slot) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty[slot]);
    }
};

// A place in the stream of tiles (keys of the first tile, its values, keys of the next, ...), and its slot of the ring.
struct Turn {
    u32 count;

    __device__ __forceinline__ u32 slot() const { return count % SLOTS; }
    __device__ __forceinline__ u32 parity() const { return count / SLOTS % 2; }  // of the slot's phase
};

// ---- the warpgroup that copies

struct Copier {
    // As KeyStream::NOWHERE (prefill_tile.cuh): nothing is read, and zeros take the key's place.
    static constexpr i64 NOWHERE = 1;
    static constexpr int CHUNKS = ROW_BYTES / CHUNK_BYTES;
    static constexpr int ROWS_AT_ONCE = 32 / CHUNKS;  // of a warp

    const PrefillParams& p;
    const Keys& keys;
    u8* shared;

    // The table's entry for this thread's key of a tile; negative: none.
    __device__ __forceinline__ i32 block_of_thread(i32 tile) const {
        const i32 key = tile * TILE_KEYS + (i32)threadIdx.x;
        return key >= keys.first && key < keys.end ? keys.table[key >> p.block_size_log2] : -1;
    }

    __device__ __forceinline__ i64 address_of_thread(i32 tile, i32 block) const {
        if (block < 0) return (i64)p.pool + NOWHERE;
        const i32 slot_in_block = (tile * TILE_KEYS + (i32)threadIdx.x) & ((1 << p.block_size_log2) - 1);
        const i64 elements = block * p.block_stride + (i64)slot_in_block * (p.num_kv_heads * HEAD_SIZE);
        return keys.first_slot + elements * KV_ELEMENT_BYTES;
    }

    // Copies the rows of a warp's keys, of which each lane has the address of one, into a tile.
    __device__ __forceinline__ void copy(i64 address, i64 offset, u8* to) const {
        const i32 lane = (i32)threadIdx.x % 32, first = (i32)threadIdx.x / 32 * 32, chunk = lane % CHUNKS;
        offset += chunk * CHUNK_BYTES;
#pragma unroll 4
        for (int i = 0; i < 32; i += ROWS_AT_ONCE) {
            const i32 row = i + lane / CHUNKS;
            const i64 from = __shfl_sync(kFullWarp, address, row);
            cp_async_16(to + place_of(first + row, chunk), (const u8*)((from & ~NOWHERE) + offset), (from & NOWHERE) == 0);
        }
        cp_async_commit();
    }

    // A tile becomes full when the next one's copies are on their way.
    __device__ __forceinline__ void run(Barriers& barriers, i32 first_tile, i32 end_tile) const {
        Turn turn = {0};
        i32 block = block_of_thread(first_tile);
        for (i32 tile = first_tile; tile < end_tile; ++tile) {
            const i64 address = address_of_thread(tile, block);
            block = block_of_thread(tile + 1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                mbarrier_wait(&barriers.empty[turn.slot()], turn.parity() ^ 1);
                copy(address, half * p.kv_stride * KV_ELEMENT_BYTES, shared + RING + turn.slot() * TILE_BYTES);
                if (turn.count > 0) {
                    cp_async_wait<1>();
                    proxy_fence();
                    mbarrier_arrive(&barriers.full[(turn.count - 1) % SLOTS]);
                }
                ++turn.count;
            }
        }
        cp_async_wait<0>();
        proxy_fence();
        if (turn.count > 0) mbarrier_arrive(&barriers.full[(turn.count - 1) % SLOTS]);
    }
};

// ---- a warpgroup that computes

struct GroupRows : SoftmaxRows<1, TILE_KEYS, SwizzledRow> {
    const u8* queries;  // of the warpgroup

    // Copies the warpgroup's queries; rows that do not exist become zeros.
    static __device__ __forceinline__ void load_queries(const QueryRows& rows, const i32* positions, const PrefillParams& p,
                                                        u8* shared, i32 first_row) {
        constexpr int CHUNKS = ROW_BYTES / CHUNK_BYTES;
        const i32 thread = (i32)threadIdx.x % GROUP_THREADS, chunk = thread % CHUNKS;
#pragma unroll 4
        for (i32 i = 0; i < GROUP_ROWS; i += GROUP_THREADS / CHUNKS) {
            const i32 row = first_row + i + thread / CHUNKS;
            const bool exists = row < rows.count;
            const u8* const from = (const u8*)p.query + (exists ? rows.offset(row, positions[row], p.query_stride) : 0);
            cp_async_16(shared + place_of(row, chunk), from + chunk * CHUNK_BYTES, exists);
        }
        cp_async_commit();
        cp_async_wait<0>();
        proxy_fence();
    }

    __device__ __forceinline__ void start(u8* shared, i32 first_row) {
        row_of_warp = first_row + (i32)threadIdx.x % GROUP_THREADS / 32 * 16;
        positions = (const i32*)(shared + POSITIONS) + row_of_warp;
        queries = shared + first_row * PANEL_ROW_BYTES;
        clear();
    }

    // Dot products with the keys of a tile.
    __device__ __forceinline__ void multiply(const u8* keys, float (&score)[1][TILE_KEYS / 8][4]) const {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_SIZE / 16; ++step) {
            const i32 at = step / 4 * PANEL_BYTES + step % 4 * 32;  // 16 elements further within rows of a panel
            wgmma_m64n128k16<Element>(score[0], swizzled_operand(queries + at, 0, EIGHT_ROWS),
                                      swizzled_operand(keys + at, 0, EIGHT_ROWS), step > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
    }

    // Adds a tile's values under the weights.
    __device__ __forceinline__ void add(const u8* values) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE_KEYS / 16; ++k)
            wgmma_m64k16<Element>(out[0], weight[0][k], swizzled_operand(values + k * 2 * EIGHT_ROWS, PANEL_BYTES, EIGHT_ROWS));
        wgmma_commit();
        wgmma_wait<0>();
    }
};
