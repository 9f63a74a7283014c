// Decode on tensor cores: 16-bit queries over 16-bit or fp8 keys and values.
//
// A warp has 16 query rows (a row tile, padded with zeros) and a slice of every tile: 16 of its tokens. So a row tile has
// as many warps as a tile has slices, and these wait for each other only at the tile's barrier. A thread block has one row
// tile, or (WIDE) up to four over the same keys and values. Each warp has a softmax state; at the end the states of the
// slices are merged in order, through shared memory, one row tile after the other.
// Queries lie behind the ring, and go into registers where there is room: if four thread blocks share a multiprocessor, a
// thread has 128 registers.
#pragma once
#include "decode_walk.cuh"
#include "fragments.cuh"

constexpr int SLICES = TILE / 16;
constexpr int ROW_TILES = !WIDE ? 1 : HEAD_SIZE <= 128 ? 4 : 2;  // long heads leave less shared memory and fewer registers
constexpr int WARPS = SLICES * ROW_TILES;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_ROWS = ROW_TILES * 16;
constexpr int BLOCKS_PER_SM = WIDE ? 1 : FOUR_BLOCKS ? (SMALL_SM ? 2 : 4) : HEAD_SIZE <= 128 ? 3 : 2;
constexpr bool QUERY_IN_REGISTERS = !WIDE && HEAD_SIZE <= (FOUR_BLOCKS ? 64 : 128);
constexpr int QUERY_BYTES = BLOCK_ROWS * Q_ROW_STRIDE;
constexpr int SHARED_BYTES = RING + RING_BYTES + QUERY_BYTES;
static_assert(BLOCK_ROWS <= (WIDE ? MOST_MEMBERS : BLOCK_ROWS) && BLOCK_ROWS <= THREADS, "a thread for each member");

// Slices are merged through one stage of the ring, which has a place for each of TILE (slice, row) pairs. A place holds as
// many dims as fit, then (maximum, sum). If that is not the whole head, the slices are merged in several rounds.
constexpr int OUT_STRIDE = STAGE_BYTES / TILE / 4;  // floats; rows of a fragment lie in different banks
constexpr int MERGED_DIMS = OUT_STRIDE - 8 < HEAD_SIZE ? (OUT_STRIDE - 8) / 16 * 16 : HEAD_SIZE;
static_assert(OUT_STRIDE % 4 == 0 && MERGED_DIMS + 2 <= OUT_STRIDE, "float4 and a state fit a row");

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

// Merges the slices of row tile `row_tile`, whose warps have put dims [first_dim, first_dim + dims) into `outs`.
__device__ __forceinline__ void merge_slices(const DecodeParams& p, const Work& work, i32 row_tile, i32 first_dim, int dims,
                                             const float* outs) {
    const int pieces = dims / 4;
    const float value_scale = STORED_VALUE_SCALE * kv_scale(p, 1, work.kv_head);
    const i32 rows = min(work.rows() - row_tile * 16, 16);
    for (i32 i = (i32)threadIdx.x; i < rows * pieces; i += THREADS) {
        const i32 row = i / pieces, dim = i % pieces * 4;
        Softmax state = no_keys();
        const float* const first = outs + row * OUT_STRIDE;
        auto part_of = [&](int slice) { return *(const float2*)(first + slice * 16 * OUT_STRIDE + MERGED_DIMS); };
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) state.maximum = fmaxf(state.maximum, part_of(slice).x);
        float out[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            const float2 part = part_of(slice);
            const float4 values = *(const float4*)(first + slice * 16 * OUT_STRIDE + dim);
            const float w = weight(part.x, state.maximum);
            state.sum = fmaf(w, part.y, state.sum);
            out[0] = fmaf(w, values.x, out[0]);
            out[1] = fmaf(w, values.y, out[1]);
            out[2] = fmaf(w, values.z, out[2]);
            out[3] = fmaf(w, values.w, out[3]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] *= value_scale;
        const i32 of_block = row_tile * 16 + row;
        const Member& member = work.member(work.member_of(of_block));
        store_result(p, work, member, work.first_head + work.head_of(of_block), first_dim + dim, state, out);
    }
}

__device__ __forceinline__ void decode(const DecodeParams& p, u8* shared) {
    u8* const query_rows = shared + RING + RING_BYTES;
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i32 row_tile = warp / SLICES, slice = warp % SLICES;
    const u8* own_query = query_rows + row_tile * 16 * Q_ROW_STRIDE;

    Walk<THREADS, BLOCK_ROWS> walk(p, shared);
    {
        Work work;
        if (!walk.begin(work)) return;
        copy_queries(p, work, (work.rows() + 15) / 16 * 16, query_rows);
        walk.look_up_first(work, Span::of(Logits::of(p.scale, p.soft_cap, p.window, 1.0f), work));
        __syncthreads();  // the block ids are there
        walk.start();
    }
    while (true) {
        const Work work = walk.work();
        const Logits logits = Logits::of(p.scale, p.soft_cap, p.window, STORED_KEY_SCALE * kv_scale(p, 0, work.kv_head));
        const Span span = Span::of(logits, work);
        Visible seen[2];  // of the lane's rows
#pragma unroll
        for (int half = 0; half < 2; ++half) seen[half] = span.of_row(logits, work, row_tile * 16 + lane / 4 + half * 8);

        Rows16 result;
        result.clear();
        u32 queries[QUERY_IN_REGISTERS ? K_STEPS : 1][4];
        auto query = [&](int step, u32 (&a)[4]) {
            if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = queries[step][i];
            } else {
                load_query(own_query, step, a);
            }
        };
        walk.over(
            logits, span,
            [&] {
                if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
                    for (int step = 0; step < K_STEPS; ++step) load_query(own_query, step, queries[step]);
                }
            },
            [&](i32 tile, const u8* keys, const u8* values) {
                const i32 position = tile * TILE + slice * 16;
                // Nothing visible, or no row: an exact no-op.
                if (position >= span.last || position + 16 <= span.first) return;
                if (WIDE && row_tile * 16 >= walk.work().rows()) return;
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
        // The work is read again from shared memory where it is needed: registers are short.
        result.finish();
        float* const outs = (float*)walk.free_stage();
        const i32 row_tiles = (walk.work().rows() + 15) / 16;
        i32 merged = 0;
        do {
#pragma unroll
            for (int first_dim = 0; first_dim < HEAD_SIZE; first_dim += MERGED_DIMS) {
                const int dims = HEAD_SIZE - first_dim < MERGED_DIMS ? HEAD_SIZE - first_dim : MERGED_DIMS;
                if (first_dim > 0 || (WIDE && merged > 0)) __syncthreads();  // those before are merged
                if (row_tile == merged) {
#pragma unroll
                    for (int n = 0; n < OUT_FRAGMENTS; ++n)
#pragma unroll
                        for (int i = 0; i < 4 && n * 8 >= first_dim && n * 8 < first_dim + dims; ++i)
                            outs[(slice * 16 + lane / 4 + i / 2 * 8) * OUT_STRIDE + output_dim(n, i % 2) - first_dim] =
                                result.out[n][i];
                    if (lane % 4 == 0) {
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            *(float2*)(outs + (slice * 16 + lane / 4 + 8 * half) * OUT_STRIDE + MERGED_DIMS) =
                                make_float2(result.maximum[half], result.sum[half]);
                    }
                }
                __syncthreads();
                if (merged == 0 && first_dim == 0 && walk.more()) {
                    const Work next = walk.next_work();
                    copy_queries(p, next, (next.rows() + 15) / 16 * 16, query_rows);
                    cp_async_commit();
                }
                merge_slices(p, walk.work(), merged, first_dim, dims, outs);
            }
        } while (++merged < row_tiles);
        merge_if_last<THREADS>(p, walk.work(), (u32*)(shared + MERGED_FLAGS));
        if (!walk.more()) return;
        walk.go_on();
    }
}
