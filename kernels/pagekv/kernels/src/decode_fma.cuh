// Decode with multiply-adds: f32 queries over f32 keys and values.
//
// A warp has whole query rows, warp, warp + 4, ... of the thread block's 16. Scores: a lane has a token and walks over
// its dims, and one load of keys serves the warp's rows. Values: a lane has four dims (eight at head size 256) and walks
// over the tokens; their weights are in shared memory. Behind the ring lie queries [16][HEAD_SIZE] and weights [16][TILE].
#pragma once
#include "decode.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_ROWS = 16;  // most query rows of a thread block
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int BLOCKS_PER_SM = 1;  // an SM has 100 KB of shared memory: no second one fits, so registers need no sparing
#else
constexpr int BLOCKS_PER_SM = 3;
#endif
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

__device__ __forceinline__ void decode_work(const DecodeParams& p, Work& work, u8* shared) {
    u8* ring = shared + RING;
    float* queries = (float*)(ring + RING_BYTES);
    float* weights = queries + BLOCK_ROWS * HEAD_SIZE;
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    const PagedRows rows = PagedRows::of(p, work.kv_head);
    const RowAddresses addresses = RowAddresses::of(rows, (u32*)shared);
    const Logits logits = Logits::of(p.scale, p.soft_cap, p.window, 1.0f);
    work.load_members(p, (Member*)(shared + ROW_INDEX_BYTES));  // before the wait for the block ids
    for (i32 i = (i32)threadIdx.x; i < BLOCK_ROWS * PIECES; i += THREADS) {
        const i32 row = i / PIECES;
        const bool valid = row < work.rows();
        const i32 existing = valid ? row : 0;
        const float* query = (const float*)p.query + work.member(work.member_of(existing)).row * p.query_stride +
                             (work.first_head + work.head_of(existing)) * HEAD_SIZE;
        cp_async_16(queries + i * 4, query + i % PIECES * 4, valid);
    }
    // Block ids arrive together with the context length, which a longer split has to know first.
    if (work.one_segment()) addresses.load<THREADS>(p, work, work.split);
    const Span span = Span::of(logits, work);
    if (!work.one_segment()) addresses.load_two<THREADS>(p, work, span.first_tile / SEGMENT_TILES);
    Visible seen[WARP_ROWS];
#pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r) seen[r] = span.of_row(logits, work, warp + r * WARPS);
    __syncthreads();  // the row indices are there

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

    for_each_tile<THREADS>(
        p, work, addresses, span, ring, [] {},
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

#pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r) {
        const i32 row = warp + r * WARPS;
        if (row >= work.rows()) continue;
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) state[r].sum += __shfl_xor_sync(kFullWarp, state[r].sum, lanes);
#pragma unroll
        for (int i = 0; i < LANE_PIECES; ++i)
            if (lane + 32 * i < PIECES)
                store_result(p, work, work.member(work.member_of(row)), work.first_head + work.head_of(row),
                             (lane + 32 * i) * 4, state[r], out[r][i]);
    }
    merge_if_last<THREADS>(p, work, (u32*)(WIDE ? shared + ROW_INDEX_BYTES + MOST_MEMBERS * 12 : ring));
}
