// Prefill on tensor cores: the work of one warp on its WARP_ROWS query rows.
#pragma once
#include "prefill_softmax.cuh"
#include "prefill_tile.cuh"

struct PaddedRow {
    static constexpr int STRIDE = ROW_STRIDE;
    static __device__ __forceinline__ i32 chunk(i32, i32 chunk) { return chunk * CHUNK_BYTES; }
};

struct WarpRows : SoftmaxRows<WARP_ROWS / 16, TILE_KEYS, PaddedRow> {
    static constexpr int STRIPS = WARP_ROWS / 16;
    static constexpr int STEPS = HEAD_SIZE / 16;
    // Queries of short heads stay in registers; queries of long heads are read again for every tile.
    static constexpr bool KEEP_QUERY = STRIPS * STEPS * 4 <= 40;

    const u8* queries;  // the warp's, in shared memory
    u32 kept[KEEP_QUERY ? STEPS : 1][STRIPS][4];

    __device__ __forceinline__ void start(u8* shared) {
        row_of_warp = (i32)threadIdx.x / 32 * WARP_ROWS;
        positions = (const i32*)(shared + POSITIONS) + row_of_warp;
        queries = shared + row_of_warp * ROW_STRIDE;
        clear();
    }

    __device__ __forceinline__ void load_query(u32 (&a)[STRIPS][4], int step) const {
        const u8* const mine = queries + lane() % 16 * ROW_STRIDE + lane() / 16 * 16;
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) ldmatrix_x4(a[strip], mine + strip * 16 * ROW_STRIDE + step * 32);
    }

    // Called once the queries have arrived.
    __device__ __forceinline__ void keep_query() {
        if constexpr (KEEP_QUERY) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) load_query(kept[step], step);
        }
    }

    // Weights of the tile of keys that begins at position `first_key`; outputs and sums are brought to the new maxima.
    // `factor`: of a score, in the exponent.
    __device__ __forceinline__ void weigh(const Logits& logits, float factor, const u8* keys, i32 first_key,
                                          bool masked) {
        float score[STRIPS][TILE_KEYS / 8][4];
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) score[strip][n][i] = 0.0f;
        // Matrices 0 and 1 of a load: eight keys, dims 0 to 7 and 8 to 15; matrices 2 and 3: the next eight keys.
        const u8* const mine = keys + (lane() / 16 * 8 + lane() % 8) * ROW_STRIDE + lane() / 8 % 2 * 16;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 fresh[STRIPS][4];
            if constexpr (!KEEP_QUERY) load_query(fresh, step);
            u32(&a)[STRIPS][4] = KEEP_QUERY ? kept[KEEP_QUERY ? step : 0] : fresh;
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 16; ++n) {
                u32 b[4];
                ldmatrix_x4(b, mine + n * 16 * ROW_STRIDE + step * 32);
#pragma unroll
                for (int strip = 0; strip < STRIPS; ++strip) {
                    mma_m16n8k16<Element>(score[strip][2 * n], a[strip], b[0], b[1]);
                    mma_m16n8k16<Element>(score[strip][2 * n + 1], a[strip], b[2], b[3]);
                }
            }
        }
        SoftmaxRows::weigh(logits, factor, score, first_key, masked);
    }

    // Adds a tile's values under the weights.
    __device__ __forceinline__ void add(const u8* values) {
        // Matrices 0 and 1 of a load: eight dims of tokens 0 to 7 and 8 to 15; matrices 2 and 3: the next eight dims.
        const u8* const mine = values + lane() % 16 * ROW_STRIDE + lane() / 16 * 16;
#pragma unroll
        for (int k = 0; k < TILE_KEYS / 16; ++k)
#pragma unroll
            for (int n = 0; n < HEAD_SIZE / 16; ++n) {
                u32 b[4];
                ldmatrix_x4_trans(b, mine + k * 16 * ROW_STRIDE + n * 32);
#pragma unroll
                for (int strip = 0; strip < STRIPS; ++strip) {
                    mma_m16n8k16<Element>(out[strip][2 * n], weight[strip][k], b[0], b[1]);
                    mma_m16n8k16<Element>(out[strip][2 * n + 1], weight[strip][k], b[2], b[3]);
                }
            }
    }
};
