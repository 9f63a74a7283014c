// Prefill: sizes of tiles, and the way of queries, keys and values into shared memory.
//
// One thread block works on TILE_ROWS query rows of one KV head and walks that head's keys in tiles of TILE_KEYS. Keys
// and values of a tile are two halves of one stream (keys of tile 0, values of tile 0, keys of tile 1, ...) that goes
// through a ring of STAGES slots: while one half is used, the next STAGES - 1 are on their way.
#pragma once
#include "prefill_rows.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;

// prefill_plan.py has the same figures. Tensor cores: 32 rows of a warp use each fragment of K and V twice, which
// halves what shared memory has to deliver; with heads of 256 there are registers for 16 rows only.
constexpr int WARP_ROWS = FP32 ? (HEAD_SIZE > 128 ? 4 : 8) : (HEAD_SIZE > 128 ? 16 : 32);
constexpr int TILE_ROWS = WARPS * WARP_ROWS;
constexpr int TILE_KEYS = FP32 || HEAD_SIZE > 128 ? 32 : 64;
constexpr int STAGES = FP32 ? 2 : 3;

constexpr int ROW_STRIDE = padded_row(ROW_BYTES);
// The ring holds fp8 as it is. It is widened into one of two further tiles, once for all warps.
constexpr int SLOT_STRIDE = FP8_KV ? KV_ROW_BYTES : ROW_STRIDE;
constexpr int SLOT_BYTES = TILE_KEYS * SLOT_STRIDE;

// Shared memory: query rows, ring, two widened tiles, two tables of key addresses, keys, positions of rows, weights
// (fp32 only).
constexpr int RING = TILE_ROWS * ROW_STRIDE;
constexpr int WIDE = RING + STAGES * SLOT_BYTES;
constexpr int ADDRESSES = WIDE + (FP8_KV ? 2 * TILE_KEYS * ROW_STRIDE : 0);
constexpr int KEYS = ADDRESSES + 2 * TILE_KEYS * 8;
constexpr int POSITIONS = KEYS + 32;
constexpr int WEIGHTS = POSITIONS + TILE_ROWS * 4;

static_assert(TILE_ROWS <= THREADS, "a thread for each row");

// The threads' shares in copies of rows of CHUNKS chunks: PER_ROW neighbours take neighbouring chunks of one row. A
// power of two, so that a thread's rows and chunks are its first ones plus constants.
template <int CHUNKS> struct Copies {
    static constexpr int PER_ROW = (CHUNKS & -CHUNKS) < THREADS ? (CHUNKS & -CHUNKS) : THREADS;
    static constexpr int ROWS_AT_ONCE = THREADS / PER_ROW;

    static __device__ __forceinline__ i32 first_row() { return (i32)threadIdx.x / PER_ROW; }
    static __device__ __forceinline__ i32 first_byte() { return (i32)threadIdx.x % PER_ROW * CHUNK_BYTES; }
};

// Starts copying the tile's queries to shared memory; rows that do not exist become zeros.
__device__ __forceinline__ void load_queries(const QueryRows& rows, const i32* positions, const void* query,
                                             i64 stride, u8* shared) {
    using Mine = Copies<ROW_BYTES / CHUNK_BYTES>;
#pragma unroll 4
    for (i32 row = Mine::first_row(); row < TILE_ROWS; row += Mine::ROWS_AT_ONCE) {
        const bool exists = row < rows.count;
        const u8* const from = (const u8*)query + (exists ? rows.offset(row, positions[row], stride) : 0);
#pragma unroll
        for (int byte = 0; byte < ROW_BYTES; byte += Mine::PER_ROW * CHUNK_BYTES) {
            const i32 at = byte + Mine::first_byte();
            cp_async_16(shared + row * ROW_STRIDE + at, from + at, exists);
        }
    }
}

static_assert(sizeof(Keys) == POSITIONS - KEYS, "keys fill their room in shared memory");

// The keys and values that a tile of queries sees, as a stream of halves: keys of tile t (at positions from t *
// TILE_KEYS) are half 2 t, its values half 2 t + 1.
//
// Paging adds no wait: the block table is read two tiles ahead and addresses are made one tile ahead, a key by a
// thread, so that loads find them in shared memory.
struct KeyStream {
    // The lowest bit of an address, set where there is no key: nothing is read, and zeros take the key's place. The other
    // bits are still an address in the pool, because even a copy that ignores its source needs an aligned one.
    static constexpr i64 NOWHERE = 1;

    const PrefillParams& p;
    u8* shared;
    i32 slot;        // of the oldest half not used yet
    i32 next_block;  // of this thread's key, the table's entry two tiles ahead; negative: none

    __device__ __forceinline__ const Keys& keys() const { return *(const Keys*)(shared + KEYS); }
    __device__ __forceinline__ i32 end_tile() const { return (keys().end + TILE_KEYS - 1) / TILE_KEYS; }
    __device__ __forceinline__ i64* addresses(i32 tile) const {
        return (i64*)(shared + ADDRESSES) + (tile & 1) * TILE_KEYS;
    }
    __device__ __forceinline__ i32 block_of_thread(i32 tile) const {
        const i32 key = tile * TILE_KEYS + (i32)threadIdx.x;
        return key >= keys().first && key < keys().end ? keys().table[key >> p.block_size_log2] : -1;
    }
    __device__ __forceinline__ void put_address(i32 tile, i32 block) const {
        const i32 slot_in_block = (tile * TILE_KEYS + (i32)threadIdx.x) & ((1 << p.block_size_log2) - 1);
        const i64 elements = block * p.block_stride + (i64)slot_in_block * (p.num_kv_heads * HEAD_SIZE);
        // Two stores, because a choice between two addresses takes more registers than there are.
        if (block < 0)
            addresses(tile)[threadIdx.x] = (i64)p.pool + NOWHERE;
        else
            addresses(tile)[threadIdx.x] = keys().first_slot + elements * KV_ELEMENT_BYTES;
    }

    // Puts the addresses of the first two tiles, once `keys` is known to all threads. A barrier must follow.
    __device__ __forceinline__ void start(i32 first_tile) {
        if ((i32)threadIdx.x >= TILE_KEYS) return;
        for (i32 tile = first_tile; tile < first_tile + 2; ++tile) put_address(tile, block_of_thread(tile));
        next_block = block_of_thread(first_tile + 2);
    }

    // Puts the addresses of tile + 2 over those of `tile`, whose loads have all been issued. The next barrier stands
    // before their first use.
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
            const i64 offset = (half % 2 ? p.kv_stride * KV_ELEMENT_BYTES : 0) + Mine::first_byte();
            u8* const to = shared + RING + into * SLOT_BYTES + Mine::first_row() * SLOT_STRIDE + Mine::first_byte();
#pragma unroll
            for (int row = 0; row < TILE_KEYS; row += Mine::ROWS_AT_ONCE) {
                const i64 address = from[row];
#pragma unroll
                for (int byte = 0; byte < KV_ROW_BYTES; byte += Mine::PER_ROW * CHUNK_BYTES) {
                    const u8* const source = (const u8*)((address & ~NOWHERE) + offset) + byte;
                    cp_async_16(to + row * SLOT_STRIDE + byte, source, (address & NOWHERE) == 0);
                }
            }
        }
        cp_async_commit();
    }

    // Waits for `half`, the oldest not used yet, and issues the half that takes the place of the one used before.
    // Returns the tile of `half`, rows ROW_STRIDE bytes apart, in the type of the queries.
    __device__ __forceinline__ const u8* next(i32 half) {
        cp_async_wait<STAGES - 2>();
        const u8* tile = shared + RING + slot * SLOT_BYTES;
#if PAGEKV_KV_DTYPE == 3
        // Before the barrier: a thread widens what it copied itself, into the tile that was used two halves ago.
        tile = widen(tile, shared + opaque(WIDE + half % 2 * (TILE_KEYS * ROW_STRIDE)));
#endif
        __syncthreads();
        issue(half + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        return tile;
    }

#if PAGEKV_KV_DTYPE == 3
    // fp8 to the type of the queries: the part of a tile that `issue` gave to this thread.
    __device__ __forceinline__ const u8* widen(const u8* narrow, u8* wide) const {
        using Mine = Copies<KV_ROW_BYTES / CHUNK_BYTES>;
        if (Mine::ROWS_AT_ONCE > TILE_KEYS && Mine::first_row() >= TILE_KEYS) return wide;
        const u8* const from = narrow + Mine::first_row() * SLOT_STRIDE + Mine::first_byte();
        u8* const to = wide + Mine::first_row() * ROW_STRIDE + Mine::first_byte() * 2;
#pragma unroll
        for (int row = 0; row < TILE_KEYS; row += Mine::ROWS_AT_ONCE)
#pragma unroll
            for (int byte = 0; byte < KV_ROW_BYTES; byte += Mine::PER_ROW * CHUNK_BYTES) {
                const Bytes16 in = *(const Bytes16*)(from + row * SLOT_STRIDE + byte);
                Bytes16 out[2];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    widen_e4m3x4<Element>(in.word[i], out[i / 2].word[i % 2 * 2], out[i / 2].word[i % 2 * 2 + 1]);
                }
                *(Bytes16*)(to + row * ROW_STRIDE + byte * 2) = out[0];
                *(Bytes16*)(to + row * ROW_STRIDE + byte * 2 + CHUNK_BYTES) = out[1];
            }
        return wide;
    }
#endif
};

// Factor of products over widened fp8, beside the layer's scale.
#if PAGEKV_KV_DTYPE == 3
constexpr float STORED_SCALE = E4m3Widening<Element>::scale;
#else
constexpr float STORED_SCALE = 1.0f;
#endif
