// Decode on tensor cores: 16-bit queries over 16-bit or fp8 keys and values.
//
// A warp has 16 query heads (a row tile, padded with zeros) and a share of the tile's tokens, 16 at a time. Row tiles of
// a KV head: 1, 2 or 4 in a thread block, over the same keys and values; the other warps divide the tokens (slices). With
// up to 16 heads a KV head, four warps have 16 tokens of a tile of 64 each and wait for each other only at the tile's
// barrier. Each warp has a softmax state; at the end the states of the slices are merged in order, through shared memory.
// Queries lie in the ring's last stage until they are in registers, or behind the ring where either has no room.
#pragma once
#include "decode.cuh"
#include "fragments.cuh"

constexpr int WARPS = TILE / 16;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_ROWS = HEAD_SIZE <= 128 ? WARPS * 16 : 32;  // most query heads of a thread block
constexpr int BLOCKS_PER_SM = HEAD_SIZE <= 128 ? 3 : 2;
constexpr bool QUERY_IN_REGISTERS = HEAD_SIZE <= 128;
constexpr int QUERY_BYTES = BLOCK_ROWS * Q_ROW_STRIDE;
constexpr bool QUERY_IN_RING = QUERY_IN_REGISTERS && QUERY_BYTES <= 2 * TILE_BYTES;
constexpr int SHARED_BYTES = ROW_INDEX_BYTES + RING_BYTES + (QUERY_IN_RING ? 0 : QUERY_BYTES);

// For the merge of the slices, in the ring: out [WARPS][16][OUT_STRIDE] and (maximum, sum) [WARPS][16].
constexpr int OUT_STRIDE = HEAD_SIZE + 8;  // floats; rows of a fragment lie in different banks
constexpr int WARP_FLOATS = 16 * (OUT_STRIDE + 2);
static_assert(WARPS * WARP_FLOATS * 4 + 16 <= RING_BYTES, "results of the warps fit the ring");

// Starts copying the query heads of `work` into rows of shared memory; rows up to `rows` that have no head become zeros.
__device__ __forceinline__ void copy_queries(const DecodeParams& p, const Work& work, i32 rows, u8* target) {
    constexpr int CHUNKS = HEAD_SIZE * 2 / CHUNK_BYTES;
    const u8* source = (const u8*)((const Element*)p.query + work.row * p.query_stride + work.first_head * HEAD_SIZE);
#pragma unroll 2
    for (i32 i = (i32)threadIdx.x; i < rows * CHUNKS; i += THREADS) {
        const i32 row = i / CHUNKS, chunk = i % CHUNKS;
        const bool valid = row < work.heads;
        cp_async_16(target + row * Q_ROW_STRIDE + chunk * CHUNK_BYTES,
                    source + (valid ? row * HEAD_SIZE * 2 : 0) + chunk * CHUNK_BYTES, valid);
    }
}

__device__ __forceinline__ void decode_work(const DecodeParams& p, const Work& work, u8* shared) {
    u8* ring = shared + ROW_INDEX_BYTES;
    u8* query_rows = QUERY_IN_RING ? ring + (STAGES - 1) * 2 * TILE_BYTES : ring + RING_BYTES;
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i32 row_tiles = work.heads <= 16 ? 1 : work.heads <= 32 ? 2 : 4, slices = WARPS / row_tiles;
    const i32 row_tile = warp % row_tiles, slice = warp / row_tiles;

    const PagedRows rows = PagedRows::of(p, work.kv_head);
    const RowAddresses addresses = RowAddresses::of(rows, (u32*)shared);
    const Logits logits = Logits::of(p.scale, p.soft_cap, p.window, FP8_KV ? STORED_KEY_SCALE * p.k_scale : 1.0f);
    // All loads from memory are issued before the first result is needed.
    const i32 context = p.context_lens[work.sequence];
    copy_queries(p, work, row_tiles * 16, query_rows);
    addresses.load<THREADS>(p, work);
    const Span span = Span::of(logits, rows, work.split, context);
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
        addresses, span, ring,
        [&] {
            if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
                for (int step = 0; step < K_STEPS; ++step) load_query(own_query, step, queries[step]);
            }
        },
        [&](i32 tile, const u8* keys, const u8* values) {
            for (i32 token = slice * 16; token < TILE; token += slices * 16) {
                const i32 position = tile * TILE + token;
                if (position >= span.last || position + 16 <= span.first) continue;  // nothing visible: an exact no-op
                float s[2][4];
                scores(query, keys, token, s);
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const i32 key = position + n * 8 + lane % 4 * 2 + i % 2;
                        const bool visible = key >= span.first && key < span.last;
                        s[n][i] = visible ? logits.base2(s[n][i]) : -infinity();
                    }
                soften(s, result);
                add_values(s, values, token, result);
            }
        });

    // Merge of the slices.
    result.finish();
    float* const outs = (float*)ring;
    Softmax* const states = (Softmax*)(outs + WARPS * 16 * OUT_STRIDE);
#pragma unroll
    for (int n = 0; n < OUT_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            outs[(warp * 16 + lane / 4 + i / 2 * 8) * OUT_STRIDE + output_dim(n, i % 2)] = result.out[n][i];
    if (lane % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            states[warp * 16 + lane / 4 + 8 * half] = {result.maximum[half], result.sum[half]};
    }
    __syncthreads();
    constexpr int PIECES = HEAD_SIZE / 4;
    const float value_scale = FP8_KV ? STORED_VALUE_SCALE * p.v_scale : 1.0f;
    for (i32 i = (i32)threadIdx.x; i < work.heads * PIECES; i += THREADS) {
        const i32 head = i / PIECES, dim = i % PIECES * 4;
        const i32 next = row_tiles * 16;  // rows of `outs` to the next slice
        Softmax state = no_keys();
        for (i32 k = 0; k < slices; ++k) state.maximum = fmaxf(state.maximum, states[head + k * next].maximum);
        float out[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (i32 k = 0; k < slices; ++k) {
            const Softmax part = states[head + k * next];
            const float4 values = *(const float4*)(outs + (head + k * next) * OUT_STRIDE + dim);
            const float w = weight(part.maximum, state.maximum);
            state.sum += w * part.sum;
            out[0] += w * values.x;
            out[1] += w * values.y;
            out[2] += w * values.z;
            out[3] += w * values.w;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] *= value_scale;
        store_result(p, work, work.first_head + head, dim, state, out);
    }
    merge_if_last<THREADS>(p, work, (u32*)(states + WARPS * 16));
}
