// Cache write: keys and values of a step's new tokens into their slots (block, offset), for one layer.
//
// A thread has 16 bytes (a chunk) of a head: of a query, which changes in place, or of a key and its value. A thread block has
// a few whole heads of one token.
//
// With `norm_weight`, queries and keys are normed first, each head for itself, and rounded as if that were stored. With `rope`,
// both are rotated, in float; a rotated key is rounded once, to the pool's type. fp8: stored = value / scale, to nearest,
// saturated at +-448.
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
    const float factor = IsSame<KvElement, e4m3>::value ? 1.0f / scale : 1.0f;
    KvChunk stored;
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) stored.element[i] = from_float<KvElement>(values[i] * factor);
    reinterpret_cast<KvChunk*>(head)[chunk] = stored;
}

// norm(x) = x / sqrt(mean(x * x) + eps) * weight over a head. `squares`: shared, one of each thread; `first`: the thread that
// has the head's first chunk. Every thread of the thread block calls it.
__device__ __forceinline__ void norm_head(
    const float* weight, float eps, float* squares, i32 first, bool at_work, float (&values)[kChunk]
) {
    float sum = 0.0f;
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) sum = fmaf(values[i], values[i], sum);
    squares[threadIdx.x] = sum;
    __syncthreads();  // every chunk is summed
    if (!at_work) return;
    float total = 0.0f;
#pragma unroll
    for (i32 i = 0; i < kChunks; ++i) total += squares[first + i];
    const float scale = 1.0f / sqrtf(total / kHeadSize + eps);
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) values[i] = to_float(from_float<Element>(values[i] * scale * weight[i]));
}

extern "C" __global__ void __launch_bounds__(kThreads) pagekv_cache_write(const CacheWriteParams p) {
    const i32 token = blockIdx.x;
    const i32 slot = p.slots[token];
    if (slot < 0) return;  // the whole thread block

    // Queries come first, if they change.
    const i32 num_queries = p.query != nullptr ? p.num_heads : 0;
    const i32 thread = threadIdx.x;
    const i32 chunk = thread % kChunks;
    const i32 first = thread - chunk;
    const i32 head = blockIdx.y * kHeads + thread / kChunks;
    const bool at_work = thread < kHeads * kChunks && head < num_queries + p.num_kv_heads;
    const bool is_query = head < num_queries;
    const i32 kv_head = head - num_queries;
    Element* const given = is_query
        ? static_cast<Element*>(p.query) + token * p.query_stride + head * kHeadSize
        : const_cast<Element*>(static_cast<const Element*>(p.key)) + token * p.key_stride + kv_head * kHeadSize;

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
    __shared__ float squares[kThreads];
    __shared__ Chunk staged[kThreads];
    if (p.norm_weight != nullptr)
        norm_head(p.norm_weight + head * kHeadSize + chunk * kChunk, p.norm_eps, squares, first, at_work, values);
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
