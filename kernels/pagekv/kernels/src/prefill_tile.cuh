// Prefill: sizes of its tiles, which query rows a tile has, and how keys and values get into shared memory.
//
// One thread block works on TILE_ROWS query rows of one KV head and walks that head's keys in tiles of TILE_KEYS. Keys and
// values of a tile are two halves of one stream (keys of tile 0, values of tile 0, keys of tile 1, ...) that goes
// through a ring of STAGES slots: while one half is used, the next STAGES - 1 are on their way.
#pragma once
#include "attention.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;

// prefill_plan.py has the same figures. Tensor cores: 32 rows of a warp use each fragment of K and V twice, which halves
// what shared memory has to deliver; with heads of 256 there are registers for 16 rows only.
constexpr int WARP_ROWS = FP32 ? (HEAD_SIZE > 128 ? 4 : 8) : (HEAD_SIZE > 128 ? 16 : 32);
constexpr int TILE_ROWS = WARPS * WARP_ROWS;
constexpr int TILE_KEYS = FP32 || HEAD_SIZE > 128 ? 32 : 64;
constexpr int STAGES = FP32 ? 2 : 3;

constexpr int ROW_BYTES = HEAD_SIZE * ELEMENT_BYTES;
constexpr int ROW_STRIDE = padded_row(ROW_BYTES);
// fp8 waits in the ring as it is and is widened into one more tile, once for all warps.
constexpr int SLOT_STRIDE = FP8_KV ? KV_ROW_BYTES : ROW_STRIDE;
constexpr int SLOT_BYTES = TILE_KEYS * SLOT_STRIDE;

// Shared memory: query rows, ring, widened tile, two tables of key addresses, a table of rows, weights (fp32 only).
constexpr int RING = TILE_ROWS * ROW_STRIDE;
constexpr int WIDE = RING + STAGES * SLOT_BYTES;
constexpr int ADDRESSES = WIDE + (FP8_KV ? TILE_KEYS * ROW_STRIDE : 0);
constexpr int ROWS = ADDRESSES + 2 * TILE_KEYS * 8;
constexpr int WEIGHTS = ROWS + TILE_ROWS * 8;

// The query rows of a tile. Row r of a sequence and KV head is query r / group, head r % group of the group, so that all
// heads that share keys and values meet them in one tile.
struct QueryRows {
    i32 token;     // first row of the sequence in the packed batch
    i32 head;      // first query head of the group
    i32 group;     // query heads of one KV head
    i32 past;      // position of the sequence's first query
    i32 first;     // the tile's first row
    i32 count;     // rows of the tile that exist, 1 to TILE_ROWS

    __device__ __forceinline__ i32 position(i32 row) const { return past + (first + row) / group; }

    // Of a row at `position` in a tensor [T, H, D] with `stride` elements from one token to the next, in bytes.
    __device__ __forceinline__ i64 offset(i32 row, i32 position, i64 stride) const {
        const i32 query = position - past;
        return ((token + query) * stride + (i64)(head + first + row - query * group) * HEAD_SIZE) * ELEMENT_BYTES;
    }
};

// What depends on a row alone. Kept in shared memory, because registers are short and divisions long.
struct alignas(8) Row {
    i32 position;
    float slope;
};
static_assert(TILE_ROWS <= THREADS, "a thread for each row");

__device__ __forceinline__ void put_row(const QueryRows& rows, const float* slopes, Row* table) {
    const i32 row = (i32)threadIdx.x;
    if (row >= TILE_ROWS) return;
    const i32 position = rows.position(row);
    float slope = 0.0f;
    if (PAGEKV_FEATURES && slopes != nullptr && row < rows.count) {
        slope = slopes[rows.head + rows.first + row - (position - rows.past) * rows.group];
    }
    table[row] = {position, slope};
}

// How threads share the copies of rows of CHUNKS chunks: PER_ROW neighbours take neighbouring chunks of one row. A power
// of two, so that a thread's rows and chunks are its first ones plus constants.
template <int CHUNKS> struct Copies {
    static constexpr int PER_ROW = (CHUNKS & -CHUNKS) < THREADS ? (CHUNKS & -CHUNKS) : THREADS;
    static constexpr int ROWS_AT_ONCE = THREADS / PER_ROW;

    static __device__ __forceinline__ i32 first_row() { return (i32)threadIdx.x / PER_ROW; }
    static __device__ __forceinline__ i32 first_byte() { return (i32)threadIdx.x % PER_ROW * CHUNK_BYTES; }
};

// Starts copying the tile's queries to shared memory; rows that do not exist become zeros.
__device__ __forceinline__ void load_queries(const QueryRows& rows, const Row* table, const void* query, i64 stride,
                                             u8* shared) {
    using Mine = Copies<ROW_BYTES / CHUNK_BYTES>;
#pragma unroll 4
    for (i32 row = Mine::first_row(); row < TILE_ROWS; row += Mine::ROWS_AT_ONCE) {
        const bool exists = row < rows.count;
        const u8* const from = (const u8*)query + (exists ? rows.offset(row, table[row].position, stride) : 0);
#pragma unroll
        for (int byte = 0; byte < ROW_BYTES; byte += Mine::PER_ROW * CHUNK_BYTES) {
            const i32 at = byte + Mine::first_byte();
            cp_async_16(shared + row * ROW_STRIDE + at, from + at, exists);
        }
    }
}

// The keys and values that a tile of queries sees, as a stream of halves: keys of tile t (at positions from t * TILE_KEYS)
// are half 2 t, its values half 2 t + 1.
//
// Paging adds no wait: the block table is read two tiles ahead and addresses are made one tile ahead, a key by a thread,
// so that loads find them in shared memory.
struct KeyStream {
    static constexpr i64 NOWHERE = 1;  // odd, as no address of a key is: zeros take its place, and nothing is read

    PagedRows rows;
    const i32* table;
    u8* shared;
    i32 first_key;   // keys outside [first_key, end_key) are not looked up: zeros take their place
    i32 end_key;
    i32 slot;        // of the oldest half not used yet
    i32 next_block;  // of this thread's key, the table's entry two tiles ahead; negative: none

    __device__ __forceinline__ i32 first_tile() const { return first_key / TILE_KEYS; }
    __device__ __forceinline__ i32 end_tile() const { return (end_key + TILE_KEYS - 1) / TILE_KEYS; }
    __device__ __forceinline__ i64* addresses(i32 tile) const {
        return (i64*)(shared + ADDRESSES) + (tile & 1) * TILE_KEYS;
    }
    __device__ __forceinline__ i32 block_of_thread(i32 tile) const {
        const i32 key = tile * TILE_KEYS + (i32)threadIdx.x;
        return key >= first_key && key < end_key ? table[rows.logical_block(key)] : -1;
    }
    __device__ __forceinline__ void put_address(i32 tile, i32 block) const {
        const i32 key = tile * TILE_KEYS + (i32)threadIdx.x;
        addresses(tile)[threadIdx.x] =
            block < 0 ? NOWHERE : (i64)rows.keys + rows.block_offset(block) + rows.slot_offset(key);
    }

    // Addresses of the first two tiles. To be followed by a barrier.
    __device__ __forceinline__ void start() {
        slot = 0;
        if ((i32)threadIdx.x >= TILE_KEYS) return;
        for (i32 tile = first_tile(); tile < first_tile() + 2; ++tile) put_address(tile, block_of_thread(tile));
        next_block = block_of_thread(first_tile() + 2);
    }

    // Addresses of tile + 2, over those of `tile`, whose loads have all been issued. They are read behind the next barrier.
    __device__ __forceinline__ void look_ahead(i32 tile) {
        if ((i32)threadIdx.x >= TILE_KEYS) return;
        put_address(tile + 2, next_block);
        next_block = block_of_thread(tile + 3);
    }

    // Starts the loads of a half, as one group of copies (empty past the last).
    __device__ __forceinline__ void issue(i32 half, i32 into) const {
        using Mine = Copies<KV_ROW_BYTES / CHUNK_BYTES>;
        if (half < 2 * end_tile() && (Mine::ROWS_AT_ONCE <= TILE_KEYS || Mine::first_row() < TILE_KEYS)) {
            const i64* const from = addresses(half / 2) + Mine::first_row();
            const i64 offset = (half % 2 ? rows.values : 0) + Mine::first_byte();
            u8* const to = shared + RING + into * SLOT_BYTES + Mine::first_row() * SLOT_STRIDE + Mine::first_byte();
#pragma unroll
            for (int row = 0; row < TILE_KEYS; row += Mine::ROWS_AT_ONCE) {
                const i64 address = from[row];
#pragma unroll
                for (int byte = 0; byte < KV_ROW_BYTES; byte += Mine::PER_ROW * CHUNK_BYTES) {
                    cp_async_16(to + row * SLOT_STRIDE + byte, (const u8*)(address + offset) + byte, (address & 1) == 0);
                }
            }
        }
        cp_async_commit();
    }

    // Waits for `half`, the oldest not used yet, and issues the one that takes the place of the half used before it.
    // Returns the half's tile, rows ROW_STRIDE bytes apart, in the type of the queries.
    __device__ __forceinline__ const u8* next(i32 half) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        issue(half + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        u8* const tile = shared + RING + slot * SLOT_BYTES;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
#if PAGEKV_KV_DTYPE == 3
        widen(tile);
        __syncthreads();
        return shared + WIDE;
#else
        return tile;
#endif
    }

#if PAGEKV_KV_DTYPE == 3
    // fp8 to the type of the queries.
    __device__ __forceinline__ void widen(const u8* tile) const {
        constexpr int CHUNKS = ROW_BYTES / CHUNK_BYTES;
        static_assert(TILE_KEYS * CHUNKS % THREADS == 0, "every round is full");
#pragma unroll
        for (int round = 0; round < TILE_KEYS * CHUNKS / THREADS; ++round) {
            const i32 index = round * THREADS + (i32)threadIdx.x;
            const Bytes8 narrow = ((const Bytes8*)tile)[index];
            Bytes16 wide;
            widen_e4m3x4<Element>(narrow.word[0], wide.word[0], wide.word[1]);
            widen_e4m3x4<Element>(narrow.word[1], wide.word[2], wide.word[3]);
            *(Bytes16*)(shared + WIDE + index / CHUNKS * ROW_STRIDE + index % CHUNKS * CHUNK_BYTES) = wide;
        }
    }
#endif
};

// What products over widened fp8 must be multiplied by, beside the layer's scale.
#if PAGEKV_KV_DTYPE == 3
constexpr float STORED_SCALE = E4m3Widening<Element>::scale;
#else
constexpr float STORED_SCALE = 1.0f;
#endif
