// Tensor-core attention of 16 query rows over 16 tokens in shared memory: the building blocks of decode.
//
// One warp, mma.m16n8k16 with f32 accumulators. With row = lane / 4 and pair = lane % 4, a lane holds of a 16 x 8
// accumulator the columns 2 * pair and 2 * pair + 1 of rows `row` (elements 0, 1) and `row + 8` (elements 2, 3).
//   scores   S[16, 16] = Q[16, D] K[16, D]^T   accumulator n holds tokens 8n .. 8n + 7
//   weights  P = 2^(S - maximum), rounded to 16 bits, used in place: the two accumulators are one operand
//   values   O[16, D] += P[16, 16] V[16, D]    accumulator n holds dims given by output_dim
//
// fp8 (e4m3) keys and values become 16-bit operands in registers.
// - f16: the hardware converts where it can. Otherwise sign, exponent and mantissa are shifted to their places in f16. The
//   result is 2^-8 of the value, also for subnormals, and the scales make up for it.
// - bf16, for keys: bf16's exponent is wider, so shifted bits give 2^-120 of the value. An exact multiplication restores it.
// - Values are f16 whatever the type of the queries, and so are the weights that meet them.
// One shift moves bytes 0 and 2 of a word, another bytes 1 and 3. So a fragment has its dims in the order (0, 2), (1, 3):
// queries are loaded in this order, and output_dim says which dims the accumulators hold. NaN (0x7f) stays NaN only where
// the hardware converts. Rows without a token are zeros.
#pragma once
#include "attention.cuh"

constexpr bool BF16 = PAGEKV_DTYPE == 2;

template <bool same> struct WeightOf { typedef Element type; };
template <> struct WeightOf<false> { typedef f16 type; };
typedef WeightOf<!FP8_KV>::type Weight;  // of the second product's operands

constexpr int K_STEPS = HEAD_SIZE / 16;       // of the scores' product
constexpr int OUT_FRAGMENTS = HEAD_SIZE / 8;  // accumulators of 16 rows
// Against bank conflicts: an odd number of 16-byte chunks for ldmatrix, of 32-byte pieces for the 8-byte loads beside fp8.
constexpr int Q_ROW_STRIDE = FP8_KV ? (HEAD_SIZE * 2 / 32 | 1) * 32 : padded_row(HEAD_SIZE * 2);

// Factors that products over converted fp8 lack, beside the layer's scale.
constexpr float STORED_KEY_SCALE = FP8_KV && !BF16 ? E4m3Widening<f16>::scale : 1.0f;
constexpr float STORED_VALUE_SCALE = FP8_KV ? E4m3Widening<f16>::scale : 1.0f;

// ---- operands ----

// Bytes `odd` and `odd` + 2 of a word of e4m3 as a pair of f16, divided by E4m3Widening<f16>::scale.
template <int odd> __device__ __forceinline__ u32 e4m3_to_f16x2(u32 x) {
#ifdef PAGEKV_E4M3_CVT
    return e4m3x2_to_f16x2((u16)byte_permute(x, 0u, odd ? 0x4431u : 0x4420u));
#else
    if (odd) x >>= 8;
    return ((x << 8) & 0x80008000u) | ((x << 7) & 0x3f803f80u);
#endif
}

template <int odd> __device__ __forceinline__ u32 e4m3_to_bf16x2(u32 x) {
    if (odd) x >>= 8;
    u32 scaled = ((x << 8) & 0x80008000u) | ((x << 4) & 0x07f007f0u);
    return bf16x2_multiply(scaled, 0x7b807b80u);  // 2^120, exact
}

// Query operand of k-step `step`: rows 0..15 of a tile with rows Q_ROW_STRIDE bytes apart.
__device__ __forceinline__ void load_query(const u8* tile, int step, u32 (&a)[4]) {
    i32 lane = threadIdx.x % 32;
    if constexpr (!FP8_KV) {
        // Matrices: rows 0-7 and 8-15 at dims 0-7, then both at dims 8-15.
        ldmatrix_x4(a, tile + (lane % 16) * Q_ROW_STRIDE + step * 32 + (lane / 16) * 16);
    } else {
        const u8* source = tile + (lane / 4) * Q_ROW_STRIDE + step * 32 + (lane % 4) * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Bytes8 four = *(const Bytes8*)(source + half * 8 * Q_ROW_STRIDE);
            a[half] = byte_permute(four.word[0], four.word[1], 0x5410u);
            a[half + 2] = byte_permute(four.word[0], four.word[1], 0x7632u);
        }
    }
}

// Key operands of k-step `step` for tokens [token, token + 16): b[0..1] for the first eight, b[2..3] for the others.
__device__ __forceinline__ void load_keys(const u8* tile, int token, int step, u32 (&b)[4]) {
    i32 lane = threadIdx.x % 32;
    if constexpr (!FP8_KV) {
        i32 row = token + (lane / 16) * 8 + lane % 8;
        ldmatrix_x4(b, tile + row * KV_ROW_STRIDE + step * 32 + (lane / 8 % 2) * 16);
    } else {
        const u8* source = tile + (token + lane / 4) * KV_ROW_STRIDE + step * 16 + (lane % 4) * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 x = *(const u32*)(source + half * 8 * KV_ROW_STRIDE);
            b[2 * half] = BF16 ? e4m3_to_bf16x2<0>(x) : e4m3_to_f16x2<0>(x);
            b[2 * half + 1] = BF16 ? e4m3_to_bf16x2<1>(x) : e4m3_to_f16x2<1>(x);
        }
    }
}

// Value operands of tokens [token, token + 16) for 32 dims: b[j] belongs to accumulator 4 * group + j. Where the head
// size is no multiple of 32 the last group has two accumulators, and b[2], b[3] are not to be used.
__device__ __forceinline__ void load_values(const u8* tile, int token, int group, u32 (&b)[4][2]) {
    const i32 lane = threadIdx.x % 32;
    const u8* row = tile + (token + lane % 16) * KV_ROW_STRIDE;
    const bool whole = 4 * group + 4 <= OUT_FRAGMENTS;
    u32 x[4];
    if constexpr (!FP8_KV) {
#pragma unroll
        for (int half = 0; half < (whole ? 2 : 1); ++half) {
            // Matrices: tokens 0-7 and 8-15 of eight dims, then both of the next eight.
            ldmatrix_x4_trans(x, row + group * 64 + half * 32 + (lane / 16) * 16);
            b[2 * half][0] = x[0], b[2 * half][1] = x[1];
            b[2 * half + 1][0] = x[2], b[2 * half + 1][1] = x[3];
        }
    } else {
        // The same with bytes: a matrix is sixteen dims wide, and a register holds two dims of two tokens.
        ldmatrix_x4_trans(x, row + group * 32 + (whole ? lane / 16 * 16 : 0));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            b[i / 2 * 2][i % 2] = e4m3_to_f16x2<0>(x[i]);
            b[i / 2 * 2 + 1][i % 2] = e4m3_to_f16x2<1>(x[i]);
        }
    }
}

// Dim of element `element` (0 or 1, and the same for 2 and 3) of accumulator `fragment`.
__device__ __forceinline__ int output_dim(int fragment, int element) {
    i32 pair = threadIdx.x % 4;
    return FP8_KV ? fragment / 2 * 16 + pair * 4 + element * 2 + fragment % 2 : fragment * 8 + pair * 2 + element;
}

// ---- steps ----

// Accumulators of 16 rows: softmax state of rows `row` and `row + 8`, and their outputs. `sum` covers this lane's tokens
// only, until `finish` adds up the four lanes of a row.
struct Rows16 {
    float maximum[2];
    float sum[2];
    float out[OUT_FRAGMENTS][4];

    __device__ __forceinline__ void clear() {
        maximum[0] = maximum[1] = -infinity();
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < OUT_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(kFullWarp, sum[half], 1);
            sum[half] += __shfl_xor_sync(kFullWarp, sum[half], 2);
        }
    }
};

// Dot products of 16 rows with tokens [token, token + 16) of a tile. `query(step, a)` gives the operand of a k-step.
template <class Query>
__device__ __forceinline__ void scores(Query query, const u8* keys, int token, float (&s)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] = s[1][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
        u32 a[4], b[4];
        query(step, a);
        load_keys(keys, token, step, b);
        mma_m16n8k16<Element>(s[0], a, b[0], b[1]);
        mma_m16n8k16<Element>(s[1], a, b[2], b[3]);
    }
}

// One step of the online softmax: turns base-2 logits (masked ones -inf) into weights, and brings `rows` to the maximum
// that includes these logits.
__device__ __forceinline__ void soften(float (&s)[2][4], Rows16& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = 2 * half;
        const float before = rows.maximum[half];
        float maximum = fmaxf(before, fmaxf(fmaxf(s[0][i], s[0][i + 1]), fmaxf(s[1][i], s[1][i + 1])));
        maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, 2));
        const float base = reference(maximum);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            s[n][i] = exp2_approx(s[n][i] - base);
            s[n][i + 1] = exp2_approx(s[n][i + 1] - base);
        }
        if (maximum != before) {  // otherwise the factor is exactly 1
            const float factor = exp2_approx(before - base);
            rows.maximum[half] = maximum;
            rows.sum[half] *= factor;
#pragma unroll
            for (int n = 0; n < OUT_FRAGMENTS; ++n) {
                rows.out[n][2 * half] *= factor;
                rows.out[n][2 * half + 1] *= factor;
            }
        }
        rows.sum[half] += (s[0][i] + s[0][i + 1]) + (s[1][i] + s[1][i + 1]);
    }
}

// Adds the weighted values of tokens [token, token + 16) of a tile.
__device__ __forceinline__ void add_values(const float (&s)[2][4], const u8* values, int token, Rows16& rows) {
    const u32 a[4] = {pack2<Weight>(s[0][0], s[0][1]), pack2<Weight>(s[0][2], s[0][3]),
                      pack2<Weight>(s[1][0], s[1][1]), pack2<Weight>(s[1][2], s[1][3])};
#pragma unroll
    for (int group = 0; group < (OUT_FRAGMENTS + 3) / 4; ++group) {
        u32 b[4][2];
        load_values(values, token, group, b);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (4 * group + j < OUT_FRAGMENTS) mma_m16n8k16<Weight>(rows.out[4 * group + j], a, b[j][0], b[j][1]);
    }
}
