// The work of a thread block of both cache writes, cache_write.cu and cache_write_together.cu, which define TOGETHER first.
//
// A thread has 16 bytes (a chunk) of a head: of a query, which changes in place, or of a key and its value. A thread block has
// a few whole heads of one token at a time.
//
// With `norm_weight`, queries and keys are normed first and rounded to Element. With `rope`, both are rotated, in float; a
// rotated key is rounded once, to the pool's type. fp8: stored = value / scale, to nearest, saturated at +-448.
#pragma once
#include "params.cuh"

constexpr i32 kHeadSize = PAGEKV_HEAD_SIZE;
constexpr i32 kChunk = 16 / sizeof(Element);      // elements
constexpr i32 kChunks = kHeadSize / kChunk;       // of a head
constexpr i32 kThreads = 128;
constexpr i32 kHeads = kThreads / kChunks;        // of a thread block
static_assert(kHeadSize % kChunk == 0 && kHeads > 0, "a head is a whole number of 16-byte chunks, one a thread");

struct alignas(16) Chunk { Element element[kChunk]; };
struct alignas(kChunk * sizeof(KvElement)) KvChunk { KvElement element[kChunk]; };  // 16 bytes; fp8: 8

__device__ __forceinline__ void to_floats(const Chunk& chunk, float (&values)[kChunk]) {
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) values[i] = to_float(chunk.element[i]);
}

__device__ __forceinline__ Chunk to_chunk(const float (&values)[kChunk]) {
    Chunk chunk;
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) chunk.element[i] = from_float<Element>(values[i]);
    return chunk;
}

// One chunk's part in the rotation of a head's first rotary_dim elements: the elements that are rotated, and the angles.
struct Rotation {
    float cosine[kChunk];
    float sine[kChunk];  // negative where the element is the first of its pair
    i32 first;           // element of the head
    i32 half;            // distance of a pair's elements
    i32 rotated;         // elements of this chunk, from its beginning

    __device__ __forceinline__ void load(const CacheWriteParams& p, i32 token, i32 chunk) {
        const float* const cosines = p.rope + static_cast<i64>(p.positions[token]) * p.rotary_dim;
        first = chunk * kChunk;
        half = p.rotary_dim / 2;
        rotated = min(max(p.rotary_dim - first, 0), kChunk);
#pragma unroll
        for (i32 i = 0; i < kChunk; ++i) {
            if (i >= rotated) continue;
            const i32 element = first + i;
            const bool second = element >= half;
            const i32 angle = second ? element - half : element;
            const float s = cosines[half + angle];
            cosine[i] = cosines[angle];
            sine[i] = second ? s : -s;
        }
    }

    // The chunk of `head` (in its original state) that this rotation is for, rotated.
    __device__ __forceinline__ void rotate(const Element* head, float (&values)[kChunk]) const {
        if (rotated == 0) return;
        float partners[kChunk];
        if (half % kChunk == 0) {  // all partners are one chunk
            to_floats(reinterpret_cast<const Chunk*>(head)[(first < half ? first + half : first - half) / kChunk], partners);
        } else {
#pragma unroll
            for (i32 i = 0; i < kChunk; ++i) {
                if (i >= rotated) continue;
                const i32 element = first + i;
                partners[i] = to_float(head[element < half ? element + half : element - half]);
            }
        }
#pragma unroll
        for (i32 i = 0; i < kChunk; ++i)
            if (i < rotated) values[i] = fmaf(values[i], cosine[i], partners[i] * sine[i]);
    }
};

// Divides fp8 by its scale; other types ignore it.
__device__ __forceinline__ void store_chunk(KvElement* head, i32 chunk, const float (&values)[kChunk], float scale) {
    const float factor = PAGEKV_KV_DTYPE == 3 ? 1.0f / scale : 1.0f;
    KvChunk stored;
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) stored.element[i] = from_float<KvElement>(values[i] * factor);
    reinterpret_cast<KvChunk*>(head)[chunk] = stored;
}

__device__ __forceinline__ float sum_of_squares(const float (&values)[kChunk], float sum) {
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) sum = fmaf(values[i], values[i], sum);
    return sum;
}

// The heads of a token that are written: queries, if they change, then keys and values.
struct Heads {
    i32 num_queries;
    i32 end;

    __device__ __forceinline__ static Heads of(const CacheWriteParams& p) {
        const i32 num_queries = p.query != nullptr ? p.num_heads : 0;
        return {num_queries, num_queries + p.num_kv_heads};
    }

    // A key is only read.
    __device__ __forceinline__ Element* at(const CacheWriteParams& p, i32 token, i32 head) const {
        return head < num_queries
            ? static_cast<Element*>(p.query) + token * p.query_stride + head * kHeadSize
            : const_cast<Element*>(static_cast<const Element*>(p.key)) + token * p.key_stride + (head - num_queries) * kHeadSize;
    }
};

// Writes heads [begin, begin + kHeads) of a token, as far as they are before `end`. `squares`: if TOGETHER, the sum of squares
// of the `size` elements that share a norm. Every thread of the thread block calls it.
__device__ __forceinline__ void write_heads(
    const CacheWriteParams& p, const Heads heads, i32 slot, i32 begin, i32 end, float squares, i32 size
) {
    const i32 token = blockIdx.x;
    const i32 thread = threadIdx.x;
    // Angles of a chunk, kept from one group of heads to the next, would spill.
    const i32 chunk = TOGETHER ? opaque(thread % kChunks) : thread % kChunks;
    const i32 first = thread - chunk;
    const i32 head = begin + thread / kChunks;
    const bool at_work = thread < kHeads * kChunks && head < end;
    const bool is_query = head < heads.num_queries;
    const i32 kv_head = head - heads.num_queries;
    Element* const given = heads.at(p, token, head);

    const bool rotates = p.rope != nullptr;
    Rotation rotation;
    if (rotates) rotation.load(p, token, chunk);
    float values[kChunk] = {};
    Chunk value = {};
    if (at_work) {
        to_floats(reinterpret_cast<const Chunk*>(given)[chunk], values);
        const Element* const row = static_cast<const Element*>(p.value) + token * p.value_stride;
        if (!is_query) value = reinterpret_cast<const Chunk*>(row + kv_head * kHeadSize)[chunk];
    }
    __shared__ float of_chunks[kThreads];
    __shared__ Chunk staged[kThreads];
    if (p.norm_weight != nullptr) {
        if constexpr (!TOGETHER) {
            of_chunks[thread] = sum_of_squares(values, 0.0f);
            __syncthreads();  // every chunk is summed
            if (at_work)
#pragma unroll
                for (i32 i = 0; i < kChunks; ++i) squares += of_chunks[first + i];
        }
        if (at_work) {
            // norm(x) = x / sqrt(mean(x * x) + eps) * weight
            const float* const weight = p.norm_weight + head * kHeadSize + chunk * kChunk;
            const float scale = 1.0f / sqrtf(squares / size + p.norm_eps);
#pragma unroll
            for (i32 i = 0; i < kChunk; ++i) values[i] = to_float(from_float<Element>(values[i] * scale * weight[i]));
        }
    }
    if (rotates) {
        staged[thread] = to_chunk(values);
        __syncthreads();  // every partner is there
        if (at_work) rotation.rotate(reinterpret_cast<const Element*>(staged + first), values);
    }
    if (!at_work) return;
    if (is_query) {
        reinterpret_cast<Chunk*>(given)[chunk] = to_chunk(values);
        return;
    }
    const i64 block = slot >> p.block_size_log2;
    const i64 offset = slot & ((1 << p.block_size_log2) - 1);
    const i64 row = block * p.block_stride + p.layer * 2 * p.kv_stride + offset * p.num_kv_heads * kHeadSize;
    KvElement* const key_out = static_cast<KvElement*>(p.pool) + row + kv_head * kHeadSize;
    store_chunk(key_out, chunk, values, kv_scale(p, 0, kv_head));
    to_floats(value, values);
    store_chunk(key_out + p.kv_stride, chunk, values, kv_scale(p, 1, kv_head));
}
