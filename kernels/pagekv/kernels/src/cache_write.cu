// Cache write: keys and values of a step's new tokens into their slots (block, offset), for one layer.
//
// One thread block a token; a thread moves 16 bytes of its source at a time, always the same part (chunk) of one head after
// the other, so that neighbouring threads touch neighbouring memory. fp8: stored = value / scale, to nearest, saturated at
// +-448.
#include "params.cuh"

constexpr i32 kHeadSize = PAGEKV_HEAD_SIZE;
constexpr i32 kChunk = 16 / sizeof(Element);      // elements
constexpr i32 kChunks = kHeadSize / kChunk;       // of a head
static_assert(kHeadSize % kChunk == 0, "a head is a whole number of 16-byte chunks");

struct alignas(16) Chunk { Element element[kChunk]; };
struct alignas(kChunk * sizeof(KvElement)) KvChunk { KvElement element[kChunk]; };  // 16 bytes; fp8: 8

// Divided by the scale where the pool is fp8.
__device__ __forceinline__ KvChunk converted(const Chunk& chunk, float scale) {
    const float factor = IsSame<KvElement, e4m3>::value ? 1.0f / scale : 1.0f;
    KvChunk result;
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) result.element[i] = from_float<KvElement>(to_float(chunk.element[i]) * factor);
    return result;
}

extern "C" __global__ void __launch_bounds__(128) pagekv_cache_write(const CacheWriteParams p) {
    const i32 token = blockIdx.x;
    const i32 slot = p.slots[token];
    if (slot < 0) return;

    const i32 thread = threadIdx.x;
    const i32 chunk = thread % kChunks;
    const i32 heads_at_once = static_cast<i32>(blockDim.x) / kChunks;
    if (thread / kChunks >= heads_at_once) return;

    const i64 block = slot >> p.block_size_log2;
    const i64 offset = slot & ((1 << p.block_size_log2) - 1);
    const i64 row = block * p.block_stride + p.layer * 2 * p.kv_stride + offset * p.num_kv_heads * kHeadSize;
    KvElement* const key_out = static_cast<KvElement*>(p.pool) + row;
    KvElement* const value_out = key_out + p.kv_stride;
    const Element* const key = static_cast<const Element*>(p.key) + token * p.key_stride;
    const Element* const value = static_cast<const Element*>(p.value) + token * p.value_stride;
    for (i32 head = thread / kChunks; head < p.num_kv_heads; head += heads_at_once) {
        const i32 at = head * kHeadSize;
        const Chunk keys = reinterpret_cast<const Chunk*>(key + at)[chunk];
        const Chunk values = reinterpret_cast<const Chunk*>(value + at)[chunk];
        reinterpret_cast<KvChunk*>(key_out + at)[chunk] = converted(keys, p.k_scale);
        reinterpret_cast<KvChunk*>(value_out + at)[chunk] = converted(values, p.v_scale);
    }
}
