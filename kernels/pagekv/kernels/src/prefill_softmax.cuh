// Prefill on tensor cores: the softmax of query rows, and the stores of their outputs and partial results.
//
// Fragments (ptx.cuh): of each 16 rows a lane holds rows lane / 4 and lane / 4 + 8, and of each 8 columns two. Scores
// become weights in place and are rounded to 16 bits in pairs, which is the layout of the product with V.
//
// Without features, maxima are taken of raw dot products, since only a factor stands between these and the exponent: a
// weight costs one multiply-add and one exponential.
#pragma once
#include "prefill_rows.cuh"

// One warp's STRIPS * 16 query rows, over tiles of TILE_KEYS keys. `Row`: of a tile of queries in shared memory; one is STRIDE
// bytes after the one before, and has 16-byte chunk c at byte `chunk(row, c)`.
template <int STRIPS, int TILE_KEYS, class Row> struct SoftmaxRows {
    static constexpr int HELD = 2 * STRIPS;  // of a lane: row i is 16 * (i / 2) + 8 * (i % 2) + lane / 4 of the warp's

    i32 row_of_warp;
    float out[STRIPS][HEAD_SIZE / 8][4];
    u32 weight[STRIPS][TILE_KEYS / 16][4];
    float maximum[HELD];  // of the scores
    float sum[HELD];      // of the weights this lane has seen
    const i32* positions;  // of the warp's rows

    static __device__ __forceinline__ i32 lane() { return (i32)threadIdx.x % 32; }
    static __device__ __forceinline__ i32 row(int i) { return 16 * (i / 2) + 8 * (i % 2) + lane() / 4; }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
            for (int n = 0; n < HEAD_SIZE / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[strip][n][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            maximum[i] = -infinity();
            sum[i] = 0.0f;
        }
    }

    // Scores of the tile of keys that begins at position `first_key` become weights; outputs and sums are brought to the
    // new maxima. `factor`: of a score, in the exponent.
    __device__ __forceinline__ void weigh(const Logits& logits, float factor, float (&score)[STRIPS][TILE_KEYS / 8][4],
                                          i32 first_key, bool masked) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (PAGEKV_FEATURES || masked) shape(logits, i, score[i / 2], first_key, masked);
            soften(i, factor, score[i / 2]);
        }
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 16; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float(&from)[4] = score[strip][2 * n + i / 2];
                    weight[strip][n][i] = pack2<Element>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
                }
    }

    // Features and masks of row i, whose scores are elements 2 (i % 2) and the next of each fragment.
    __device__ __forceinline__ void shape(const Logits& logits, int i, float (&score)[TILE_KEYS / 8][4], i32 first_key,
                                          bool masked) const {
        const int half = i % 2 * 2;
        const i32 position = positions[row(i)];
        if constexpr (PAGEKV_FEATURES) {
            float unit = logits.scale * LOG2_E;
            if (logits.soft_cap != 0.0f) {
                unit = LOG2_E;
#pragma unroll
                for (int n = 0; n < TILE_KEYS / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j) score[n][half + j] = logits.capped(score[n][half + j] * logits.scale);
            }
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) score[n][half + j] *= unit;
        }
        if (!masked) return;
        const i32 distance = first_key + lane() % 4 * 2 - position;  // of this lane's first key from the query
        const i32 oldest = logits.first_visible(position) - position;
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const i32 d = distance + n * 8 + j;
                if (d > 0 || (PAGEKV_FEATURES && d < oldest)) score[n][half + j] = -infinity();
            }
    }

    // One step of the online softmax for row i: its scores become weights.
    __device__ __forceinline__ void soften(int i, float factor, float (&score)[TILE_KEYS / 8][4]) {
        const int half = i % 2 * 2;
        float highest = maximum[i];
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; ++n) highest = fmaxf(highest, fmaxf(score[n][half], score[n][half + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
        const float base = reference(highest);
        // The difference comes first: where the maximum stays, this is 2^0, exactly 1.
        const float shrink = exp2_approx((maximum[i] - base) * factor);
        const float shift = -base * factor;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; ++n)
#pragma unroll
            for (int j = half; j < half + 2; ++j) {
                score[n][j] = exp2_approx(fmaf(score[n][j], factor, shift));
                total += score[n][j];
            }
        maximum[i] = highest;
        sum[i] = fmaf(sum[i], shrink, total);
#pragma unroll
        for (int n = 0; n < HEAD_SIZE / 8; ++n) {
            out[i / 2][n][half] *= shrink;
            out[i / 2][n][half + 1] *= shrink;
        }
    }

    // Writes the rows that exist, through the warp's own rows of shared memory so that they leave 16 bytes at a time.
    __device__ __forceinline__ void store(const QueryRows& all, u8* shared, void* to, i64 stride, float value_scale,
                                          const float* sinks) {
        u8* const staged = shared + row_of_warp * Row::STRIDE;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            float total = sum[i];
            total += __shfl_xor_sync(kFullWarp, total, 1);
            total += __shfl_xor_sync(kFullWarp, total, 2);
            float factor = normaliser(total);
            // With features, maxima are in base 2 as the sinks are.
            if (PAGEKV_FEATURES && sinks != nullptr && row_of_warp + row(i) < all.count)
                factor = normaliser({maximum[i], total}, sinks, all.head_of(row_of_warp + row(i), positions[row(i)]));
            const float scale = value_scale * factor;
            u32* const mine = (u32*)(staged + row(i) * Row::STRIDE) + lane() % 4;
#pragma unroll
            for (int n = 0; n < HEAD_SIZE / 8; ++n) {
                const float(&from)[4] = out[i / 2][n];
                mine[Row::chunk(row(i), n) / 4] = pack2<Element>(from[i % 2 * 2] * scale, from[i % 2 * 2 + 1] * scale);
            }
        }
        __syncwarp();
        constexpr int CHUNKS = ROW_BYTES / CHUNK_BYTES;
        for (int index = lane(); index < 16 * STRIPS * CHUNKS; index += 32) {
            const i32 from = index / CHUNKS, byte = index % CHUNKS * CHUNK_BYTES;
            if (row_of_warp + from < all.count) {
                *(Bytes16*)((u8*)to + all.offset(row_of_warp + from, positions[from], stride) + byte) =
                    *(const Bytes16*)(staged + from * Row::STRIDE + Row::chunk(from, index % CHUNKS));
            }
        }
    }

    // Writes the partial results of the rows that have one, 32 bytes of a row by four lanes at a time.
    __device__ __forceinline__ void store_partials(const QueryRows& all, const PartialRows& to, const Keys& keys) {
        const float unit = PAGEKV_FEATURES ? 1.0f : keys.factor;  // with features, maxima are in base 2
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            float total = sum[i];
            total += __shfl_xor_sync(kFullWarp, total, 1);
            total += __shfl_xor_sync(kFullWarp, total, 2);
            const i64 place = to.place(all, row_of_warp + row(i), positions[row(i)]);
            if (place < 0) continue;
            float2* const mine = (float2*)(to.p.partial_out + place * HEAD_SIZE) + lane() % 4;
#pragma unroll
            for (int n = 0; n < HEAD_SIZE / 8; ++n) {
                const float(&from)[4] = out[i / 2][n];
                mine[n * 4] = make_float2(from[i % 2 * 2] * keys.value_factor, from[i % 2 * 2 + 1] * keys.value_factor);
            }
            if (lane() % 4 == 0) ((float2*)to.p.partial_state)[place] = make_float2(maximum[i] * unit, total);
        }
    }
};
