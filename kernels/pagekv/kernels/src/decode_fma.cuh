// Decode with multiply-adds: f32 queries over f32 keys and values.
//
// A warp has whole query rows: rows warp, warp + 4, ... of the thread block's 16. Scores: a lane has one token of the tile
// (two at head size 64) and walks over its dims; one load of a key serves all rows of the warp. Values: a lane has four
// dims (eight at head size 256) and walks over the tokens, whose weights are in shared memory. Behind the ring lie queries
// [16][HEAD_SIZE] and weights [16][TILE].
#pragma once
#include "decode_walk.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_ROWS = 16;  // most query rows of a thread block
constexpr int BLOCKS_PER_SM = SMALL_SM ? 1 : 2;  // most head sizes leave no shared memory for a third
constexpr int WARP_ROWS = BLOCK_ROWS / WARPS;
constexpr int PIECES = HEAD_SIZE / 4;
constexpr int LANE_PIECES = (PIECES + 31) / 32;
constexpr int LANE_TOKENS = (TILE + 31) / 32;
constexpr int SHARED_BYTES = RING + RING_BYTES + BLOCK_ROWS * (HEAD_SIZE + TILE) * 4;

__device__ __forceinline__ float4 load4(const void* address) { return *(const float4*)address; }

__device__ __forceinline__ void multiply_add(float (&sum)[4], float factor, float4 v) {
    sum[0] = fmaf(factor, v.x, sum[0]);
    sum[1] = fmaf(factor, v.y, sum[1]);
    sum[2] = fmaf(factor, v.z, sum[2]);
    sum[3] = fmaf(factor, v.w, sum[3]);
}

// Starts copying the query rows of `work` into shared memory; rows that do not exist become zeros.
__device__ __forceinline__ void copy_queries(const DecodeParams& p, const Work& work, float* target) {
    for (i32 i = (i32)threadIdx.x; i < BLOCK_ROWS * PIECES; i += THREADS) {
        const i32 row = i / PIECES;
        const bool valid = row < work.rows();
        const i32 existing = valid ? row : 0;
        const float* query = (const float*)p.query + work.member(work.member_of(existing)).row * p.query_stride +
                             (work.first_head + work.head_of(existing)) * HEAD_SIZE;
        cp_async_16(target + i * 4, query + i % PIECES * 4, valid);
    }
}

__device__ __forceinline__ void decode(const DecodeParams& p, u8* shared) {
    float* queries = (float*)(shared + RING + RING_BYTES);
    float* weights = queries + BLOCK_ROWS * HEAD_SIZE;
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Logits logits = Logits::of(p.scale, p.soft_cap, p.window, 1.0f);

    Walk<THREADS, BLOCK_ROWS> walk(p, shared);
    {
        Work work;
        if (!walk.begin(work)) return;
        copy_queries(p, work, queries);
        walk.look_up_first(work, Span::of(logits, work));
        __syncthreads();  // the block ids are there
        walk.start();
    }
    while (true) {
        const Work work = walk.work();
        const Span span = Span::of(logits, work);
        Visible seen[WARP_ROWS];
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) seen[r] = span.of_row(logits, work, warp + r * WARPS);

        Softmax state[WARP_ROWS];
        float out[WARP_ROWS][LANE_PIECES][4];
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) {
            state[r] = no_keys();
#pragma unroll
            for (int i = 0; i < LANE_PIECES; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) out[r][i][j] = 0.0f;
        }

        walk.over(
            logits, span, [] {},
            [&](i32 tile, const u8* keys, const u8* values) {
                if (warp >= work.rows()) return;
                float s[WARP_ROWS][LANE_TOKENS];
#pragma unroll
                for (int k = 0; k < LANE_TOKENS; ++k) {
                    const u8* row = keys + (lane + 32 * k) % TILE * KV_ROW_STRIDE;
                    float sums[WARP_ROWS][4];
#pragma unroll
                    for (int r = 0; r < WARP_ROWS; ++r) sums[r][0] = sums[r][1] = sums[r][2] = sums[r][3] = 0.0f;
#pragma unroll 4
                    for (i32 piece = 0; piece < PIECES; ++piece) {
                        const float4 key = load4(row + piece * 16);
#pragma unroll
                        for (int r = 0; r < WARP_ROWS; ++r) {
                            if (warp + r * WARPS >= work.rows()) continue;
                            const float4 q = load4(queries + (warp + r * WARPS) * HEAD_SIZE + piece * 4);
                            sums[r][0] = fmaf(q.x, key.x, sums[r][0]);
                            sums[r][1] = fmaf(q.y, key.y, sums[r][1]);
                            sums[r][2] = fmaf(q.z, key.z, sums[r][2]);
                            sums[r][3] = fmaf(q.w, key.w, sums[r][3]);
                        }
                    }
                    const i32 position = tile * TILE + lane + 32 * k;
#pragma unroll
                    for (int r = 0; r < WARP_ROWS; ++r) {
                        const bool visible = lane + 32 * k < TILE && position >= seen[r].first && position < seen[r].last;
                        const float dot = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
                        s[r][k] = visible ? logits.base2(dot) : -infinity();
                    }
                }
#pragma unroll
                for (int r = 0; r < WARP_ROWS; ++r) {
                    const i32 row = warp + r * WARPS;
                    if (row >= work.rows()) continue;
                    float maximum = state[r].maximum;
#pragma unroll
                    for (int k = 0; k < LANE_TOKENS; ++k) maximum = fmaxf(maximum, s[r][k]);
#pragma unroll
                    for (int lanes = 16; lanes > 0; lanes /= 2)
                        maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, lanes));
                    const float factor = weight(state[r].maximum, maximum), base = reference(maximum);
                    state[r].maximum = maximum;
                    state[r].sum *= factor;
#pragma unroll
                    for (int k = 0; k < LANE_TOKENS; ++k) {
                        const float w = exp2_approx(s[r][k] - base);
                        state[r].sum += w;
                        if (lane + 32 * k < TILE) weights[row * TILE + lane + 32 * k] = w;
                    }
#pragma unroll
                    for (int i = 0; i < LANE_PIECES; ++i)
#pragma unroll
                        for (int j = 0; j < 4; ++j) out[r][i][j] *= factor;
                }
                __syncwarp();
#pragma unroll
                for (int i = 0; i < LANE_PIECES; ++i) {
                    const i32 piece = lane + 32 * i;
                    if (piece >= PIECES) continue;
#pragma unroll 2
                    for (i32 token = 0; token < TILE; token += 4) {
                        float4 v[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) v[j] = load4(values + (token + j) * KV_ROW_STRIDE + piece * 16);
#pragma unroll
                        for (int r = 0; r < WARP_ROWS; ++r) {
                            if (warp + r * WARPS >= work.rows()) continue;
                            const float4 w = load4(weights + (warp + r * WARPS) * TILE + token);
                            multiply_add(out[r][i], w.x, v[0]);
                            multiply_add(out[r][i], w.y, v[1]);
                            multiply_add(out[r][i], w.z, v[2]);
                            multiply_add(out[r][i], w.w, v[3]);
                        }
                    }
                }
            });
        const Work done = walk.work();
        const bool more = walk.more();
        if (more) {
            copy_queries(p, walk.next_work(), queries);
            cp_async_commit();
        }

#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) {
            const i32 row = warp + r * WARPS;
            if (row >= done.rows()) continue;
#pragma unroll
            for (int lanes = 16; lanes > 0; lanes /= 2) state[r].sum += __shfl_xor_sync(kFullWarp, state[r].sum, lanes);
#pragma unroll
            for (int i = 0; i < LANE_PIECES; ++i)
                if (lane + 32 * i < PIECES)
                    store_result(p, done, done.member(done.member_of(row)), done.first_head + done.head_of(row),
                                 (lane + 32 * i) * 4, state[r], out[r][i]);
        }
        merge_if_last<THREADS>(p, done, (u32*)(shared + MERGED_FLAGS));
        if (!more) return;
        walk.go_on();
    }
}
