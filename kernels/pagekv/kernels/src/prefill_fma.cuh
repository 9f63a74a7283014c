// Prefill in fp32, without tensor cores: the work of one warp on its WARP_ROWS query rows.
//
// A lane has one key of the tile and its scores with all rows of the warp; then, for the outputs, every 32nd dim.
// Weights go through shared memory; the barriers of KeyStream::next are between writing and reading.
#pragma once
#include "prefill_tile.cuh"

struct WarpRows {
    static_assert(!FP32 || TILE_KEYS == 32, "a key for each lane");
    static constexpr int DIMS = (HEAD_SIZE + 31) / 32;  // of a lane

    const u8* queries;  // the warp's, in shared memory
    float* weights;     // [WARP_ROWS, TILE_KEYS], the warp's, in shared memory
    i32 row_of_warp;
    float out[WARP_ROWS][DIMS];
    float maximum[WARP_ROWS];  // of the logits, in base 2
    float sum[WARP_ROWS];      // of the weights this lane has seen
    const i32* positions;  // of the warp's rows

    static __device__ __forceinline__ i32 lane() { return (i32)threadIdx.x % 32; }
    static __device__ __forceinline__ bool has_dim(int n) { return HEAD_SIZE % 32 == 0 || n * 32 + lane() < HEAD_SIZE; }

    __device__ __forceinline__ void start(u8* shared) {
        row_of_warp = (i32)threadIdx.x / 32 * WARP_ROWS;
        positions = (const i32*)(shared + POSITIONS) + row_of_warp;
        queries = shared + row_of_warp * ROW_STRIDE;
        weights = (float*)(shared + WEIGHTS) + row_of_warp * TILE_KEYS;
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i) {
#pragma unroll
            for (int n = 0; n < DIMS; ++n) out[i][n] = 0.0f;
            maximum[i] = -infinity();
            sum[i] = 0.0f;
        }
    }

    __device__ __forceinline__ void keep_query() {}

    // Weights of the tile of keys that begins at position `first_key`; outputs and sums are brought to the new maxima.
    __device__ __forceinline__ void weigh(const Logits& logits, float, const u8* keys, i32 first_key, bool masked) {
        float score[WARP_ROWS];
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i) score[i] = 0.0f;
        const float4* const key = (const float4*)(keys + lane() * ROW_STRIDE);
#pragma unroll 4
        for (int k = 0; k < HEAD_SIZE / 4; ++k) {
            const float4 b = key[k];
#pragma unroll
            for (int i = 0; i < WARP_ROWS; ++i) {
                const float4 a = ((const float4*)(queries + i * ROW_STRIDE))[k];
                score[i] = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, score[i]))));
            }
        }
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i) {
            const i32 position = positions[i];
            const i32 key = first_key + lane();
            float x = logits.base2(score[i]);
            if (masked && (key > position || key < logits.first_visible(position))) x = -infinity();
            float highest = fmaxf(maximum[i], x);
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) {
                highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, mask));
            }
            const float shrink = weight(maximum[i], highest);
            const float mine = exp2_approx(x - reference(highest));
            maximum[i] = highest;
            sum[i] = fmaf(sum[i], shrink, mine);
            weights[i * TILE_KEYS + lane()] = mine;
#pragma unroll
            for (int n = 0; n < DIMS; ++n) out[i][n] *= shrink;
        }
    }

    // Adds a tile's values under the weights.
    __device__ __forceinline__ void add(const u8* values) {
#pragma unroll 2
        for (int k = 0; k < TILE_KEYS; k += 4) {
            float b[4][DIMS];
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int n = 0; n < DIMS; ++n) {
                    b[j][n] = has_dim(n) ? ((const float*)(values + (k + j) * ROW_STRIDE))[n * 32 + lane()] : 0.0f;
                }
#pragma unroll
            for (int i = 0; i < WARP_ROWS; ++i) {
                const float4 a = *(const float4*)(weights + i * TILE_KEYS + k);
#pragma unroll
                for (int n = 0; n < DIMS; ++n) {
                    const float later = fmaf(a.z, b[2][n], fmaf(a.w, b[3][n], out[i][n]));
                    out[i][n] = fmaf(a.x, b[0][n], fmaf(a.y, b[1][n], later));
                }
            }
        }
    }

    // Writes the rows that exist.
    __device__ __forceinline__ void store(const QueryRows& all, u8*, void* to, i64 stride, float value_scale,
                                          const float* sinks) {
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i) {
            float total = sum[i];
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(kFullWarp, total, mask);
            if (row_of_warp + i >= all.count) continue;
            const i32 head = all.head_of(row_of_warp + i, positions[i]);
            const float scale = value_scale * normaliser({maximum[i], total}, PAGEKV_FEATURES ? sinks : nullptr, head);
            float* const row = (float*)((u8*)to + all.offset(row_of_warp + i, positions[i], stride));
#pragma unroll
            for (int n = 0; n < DIMS; ++n)
                if (has_dim(n)) row[n * 32 + lane()] = out[i][n] * scale;
        }
    }

    // Writes the partial results of the rows that have one.
    __device__ __forceinline__ void store_partials(const QueryRows& all, const PartialRows& to, const Keys&) {
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i) {
            float total = sum[i];
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(kFullWarp, total, mask);
            const i64 place = to.place(all, row_of_warp + i, positions[i]);
            if (place < 0) continue;
            float* const mine = to.p.partial_out + place * HEAD_SIZE + lane();
#pragma unroll
            for (int n = 0; n < DIMS; ++n)
                if (has_dim(n)) mine[n * 32] = out[i][n];
            if (lane() == 0) ((float2*)to.p.partial_state)[place] = make_float2(maximum[i], total);
        }
    }
};
