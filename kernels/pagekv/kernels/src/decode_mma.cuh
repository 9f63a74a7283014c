// Decode on tensor cores: 16-bit queries over 16-bit or fp8 keys and values.
//
// A warp has 16 query rows (a row tile, padded with zeros) and a slice of every tile: 16 of its tokens. So a row tile has
// as many warps as a tile has slices, and these wait for each other only at the tile's barrier. A thread block has one row
// tile, or (WIDE) up to four over the same keys and values. Each warp has a softmax state; at the end the states of the
// slices are merged in order, through shared memory, one row tile after the other.
// Queries lie in the ring's last stage until they are in registers, or behind the ring where either has no room: with four
// thread blocks a multiprocessor a thread has 128 registers.
#pragma once
#include "decode.cuh"
#include "fragments.cuh"

constexpr int SLICES = TILE / 16;
constexpr int ROW_TILES = !WIDE ? 1 : HEAD_SIZE <= 128 ? 4 : 2;  // long heads: less shared memory and registers are left
constexpr int WARPS = SLICES * ROW_TILES;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_ROWS = ROW_TILES * 16;
constexpr int BLOCKS_PER_SM = WIDE ? 1 : SHORT_ROWS ? 4 : HEAD_SIZE <= 128 ? 3 : 2;
constexpr bool QUERY_IN_REGISTERS = !WIDE && HEAD_SIZE <= (SHORT_ROWS ? 64 : 128);
constexpr int QUERY_BYTES = BLOCK_ROWS * Q_ROW_STRIDE;
constexpr bool QUERY_IN_RING = QUERY_IN_REGISTERS && QUERY_BYTES <= 2 * TILE_BYTES;
constexpr int SHARED_BYTES = RING + RING_BYTES + (QUERY_IN_RING ? 0 : QUERY_BYTES);
static_assert(BLOCK_ROWS <= (WIDE ? MOST_MEMBERS : BLOCK_ROWS) && BLOCK_ROWS <= THREADS, "a thread for each member");

// For the merge of the slices, in the ring: out [SLICES][16][OUT_STRIDE] and (maximum, sum) [SLICES][16].
constexpr int OUT_STRIDE = HEAD_SIZE + 8;  // floats; rows of a fragment lie in different banks
static_assert(SLICES * 16 * (OUT_STRIDE + 2) * 4 + 16 <= RING_BYTES, "results of a row tile's warps fit the ring");

// Starts copying the query rows of `work` into shared memory; rows up to `rows` that do not exist become zeros.
__device__ __forceinline__ void copy_queries(const DecodeParams& p, const Work& work, i32 rows, u8* target) {
    constexpr int CHUNKS = HEAD_SIZE * 2 / CHUNK_BYTES;
#pragma unroll 2
    for (i32 i = (i32)threadIdx.x; i < rows * CHUNKS; i += THREADS) {
        const i32 row = i / CHUNKS, chunk = i % CHUNKS;
        const bool valid = row < work.rows();
        const i32 existing = valid ? row : 0;
        const Element* source = (const Element*)p.query + work.member(work.member_of(existing)).row * p.query_stride +
                                (work.first_head + work.head_of(existing)) * HEAD_SIZE;
        cp_async_16(target + row * Q_ROW_STRIDE + chunk * CHUNK_BYTES, (const u8*)source + chunk * CHUNK_BYTES, valid);
    }
}

// Merges the slices of row tile `row_tile`, whose warps have put their results into `outs` and `states`.
__device__ __forceinline__ void merge_slices(const DecodeParams& p, const Work& work, i32 row_tile, const float* outs,
                                             const Softmax* states) {
    constexpr int PIECES = HEAD_SIZE / 4;
    const float value_scale = STORED_VALUE_SCALE * kv_scale(p, 1, work.kv_head);
    const i32 rows = min(work.rows() - row_tile * 16, 16);
    for (i32 i = (i32)threadIdx.x; i < rows * PIECES; i += THREADS) {
        const i32 row = i / PIECES, dim = i % PIECES * 4;
        Softmax state = no_keys();
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) state.maximum = fmaxf(state.maximum, states[slice * 16 + row].maximum);
        float out[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            const Softmax part = states[slice * 16 + row];
            const float4 values = *(const float4*)(outs + (slice * 16 + row) * OUT_STRIDE + dim);
            const float w = weight(part.maximum, state.maximum);
            state.sum = fmaf(w, part.sum, state.sum);
            out[0] = fmaf(w, values.x, out[0]);
            out[1] = fmaf(w, values.y, out[1]);
            out[2] = fmaf(w, values.z, out[2]);
            out[3] = fmaf(w, values.w, out[3]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] *= value_scale;
        const i32 of_block = row_tile * 16 + row;
        const Member& member = work.member(work.member_of(of_block));
        store_result(p, work, member, work.first_head + work.head_of(of_block), dim, state, out);
    }
}

__device__ __forceinline__ void decode_work(const DecodeParams& p, Work& work, u8* shared) {
    u8* ring = shared + RING;
    u8* query_rows = QUERY_IN_RING ? ring + (STAGES - 1) * 2 * TILE_BYTES : ring + RING_BYTES;
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i32 row_tile = warp / SLICES, slice = warp % SLICES;

    const PagedRows rows = PagedRows::of(p, work.kv_head);
    const RowAddresses addresses = RowAddresses::of(rows, (u32*)shared);
    const Logits logits = Logits::of(p.scale, p.soft_cap, p.window, STORED_KEY_SCALE * kv_scale(p, 0, work.kv_head));
    // All loads from memory are issued before the first result is needed.
    work.load_members(p, (Member*)(shared + ROW_INDEX_BYTES));
    const i32 row_tiles = (work.rows() + 15) / 16;
    copy_queries(p, work, row_tiles * 16, query_rows);
    // Block ids arrive together with the context length, which a longer split has to know first.
    if (work.one_segment()) addresses.load<THREADS>(p, work, work.split);
    const Span span = Span::of(logits, work);
    if (!work.one_segment()) addresses.load_two<THREADS>(p, work, span.first_tile / SEGMENT_TILES);
    Visible seen[2];  // of the lane's rows
#pragma unroll
    for (int half = 0; half < 2; ++half) seen[half] = span.of_row(logits, work, row_tile * 16 + lane / 4 + half * 8);
    __syncthreads();  // the row indices are there

    Rows16 result;
    result.clear();
    u32 queries[QUERY_IN_REGISTERS ? K_STEPS : 1][4];
    const u8* own_query = query_rows + row_tile * 16 * Q_ROW_STRIDE;
    auto query = [&](int step, u32 (&a)[4]) {
        if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = queries[step][i];
        } else {
            load_query(own_query, step, a);
        }
    };
    for_each_tile<THREADS>(
        p, work, addresses, span, ring,
        [&] {
            if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
                for (int step = 0; step < K_STEPS; ++step) load_query(own_query, step, queries[step]);
            }
        },
        [&](i32 tile, const u8* keys, const u8* values) {
            const i32 position = tile * TILE + slice * 16;
            // No row, or nothing visible: an exact no-op.
            if (row_tile >= row_tiles || position >= span.last || position + 16 <= span.first) return;
            float s[2][4];
            scores(query, keys, slice * 16, s);
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const i32 key = position + n * 8 + lane % 4 * 2 + i % 2;
                    const bool visible = key >= seen[i / 2].first && key < seen[i / 2].last;
                    s[n][i] = visible ? logits.base2(s[n][i]) : -infinity();
                }
            soften(s, result);
            add_values(s, values, slice * 16, result);
        });

    // Merge of the slices.
    result.finish();
    float* const outs = (float*)ring;
    Softmax* const states = (Softmax*)(outs + SLICES * 16 * OUT_STRIDE);
    for (i32 merged = 0; merged < row_tiles; ++merged) {
        if (WIDE && merged > 0) __syncthreads();  // the row tile before is merged
        if (row_tile == merged) {
#pragma unroll
            for (int n = 0; n < OUT_FRAGMENTS; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    outs[(slice * 16 + lane / 4 + i / 2 * 8) * OUT_STRIDE + output_dim(n, i % 2)] = result.out[n][i];
            if (lane % 4 == 0) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    states[slice * 16 + lane / 4 + 8 * half] = {result.maximum[half], result.sum[half]};
            }
        }
        __syncthreads();
        merge_slices(p, work, merged, outs, states);
    }
    merge_if_last<THREADS>(p, work, (u32*)(WIDE ? shared + ROW_INDEX_BYTES + MOST_MEMBERS * 12 : (u8*)(states + SLICES * 16)));
}
