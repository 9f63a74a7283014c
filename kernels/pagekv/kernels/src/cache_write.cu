// Cache write: keys and values of a step's new tokens into their slots (block, offset), for one layer.
//
// One thread block a token; a thread moves 16 bytes of its source at a time, always the same part (chunk) of one head after
// the other, so that neighbouring threads touch neighbouring memory and cosines and sines are loaded once for all heads.
//
// With `rope`, keys are rotated on the way and queries in place, in float; a rotated key is rounded once, to the pool's
// type. fp8: stored = value / scale, to nearest, saturated at +-448.
#include "params.cuh"

constexpr i32 kHeadSize = PAGEKV_HEAD_SIZE;
constexpr i32 kChunk = 16 / sizeof(Element);      // elements
constexpr i32 kChunks = kHeadSize / kChunk;       // of a head
static_assert(kHeadSize % kChunk == 0, "a head is a whole number of 16-byte chunks");

struct alignas(16) Chunk { Element element[kChunk]; };
struct alignas(kChunk * sizeof(KvElement)) KvChunk { KvElement element[kChunk]; };  // 16 bytes; fp8: 8

__device__ __forceinline__ void load_chunk(const Element* head, i32 chunk, float (&values)[kChunk]) {
    const Chunk loaded = reinterpret_cast<const Chunk*>(head)[chunk];
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) values[i] = to_float(loaded.element[i]);
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
            load_chunk(head, (first < half ? first + half : first - half) / kChunk, partners);
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

// With six thread blocks on a multiprocessor as the aim; left to themselves compilers aim higher, and spill.
extern "C" __global__ void __launch_bounds__(128, 6) pagekv_cache_write(const CacheWriteParams p) {
    const i32 token = blockIdx.x;
    const i32 slot = p.slots[token];
    if (slot < 0) return;  // the whole thread block

    // The threads work on whole heads at a time, so that one barrier stands between reading a query and overwriting it.
    const i32 thread = threadIdx.x;
    const i32 chunk = thread % kChunks;
    const i32 heads_at_once = static_cast<i32>(blockDim.x) / kChunks;
    const i32 first_head = thread / kChunks;
    const bool at_work = first_head < heads_at_once;

    const bool rotates = p.rope != nullptr;
    Rotation rotation;
    if (rotates) rotation.load(p, token, chunk);

    const i64 block = slot >> p.block_size_log2;
    const i64 offset = slot & ((1 << p.block_size_log2) - 1);
    const i64 row = block * p.block_stride + p.layer * 2 * p.kv_stride + offset * p.num_kv_heads * kHeadSize;
    KvElement* const key_out = static_cast<KvElement*>(p.pool) + row;
    KvElement* const value_out = key_out + p.kv_stride;
    const Element* const key = static_cast<const Element*>(p.key) + token * p.key_stride;
    const Element* const value = static_cast<const Element*>(p.value) + token * p.value_stride;
    for (i32 head = first_head; at_work && head < p.num_kv_heads; head += heads_at_once) {
        const float key_scale = kv_scale(p, 0, head), value_scale = kv_scale(p, 1, head);
        float keys[kChunk], values[kChunk];
        load_chunk(key + head * kHeadSize, chunk, keys);
        load_chunk(value + head * kHeadSize, chunk, values);
        if (rotates) rotation.rotate(key + head * kHeadSize, keys);
        store_chunk(key_out + head * kHeadSize, chunk, keys, key_scale);
        store_chunk(value_out + head * kHeadSize, chunk, values, value_scale);
    }

    if (!rotates || p.query == nullptr) return;
    Element* const query = static_cast<Element*>(p.query) + token * p.query_stride;
    for (i32 base = 0; base < p.num_heads; base += heads_at_once) {
        const i32 head = base + first_head;
        const bool has_head = at_work && head < p.num_heads;
        float values[kChunk];
        if (has_head) {
            load_chunk(query + head * kHeadSize, chunk, values);
            rotation.rotate(query + head * kHeadSize, values);
        }
        __syncthreads();  // partners are read before any thread overwrites them
        if (!has_head) continue;
        Chunk stored;
#pragma unroll
        for (i32 i = 0; i < kChunk; ++i) stored.element[i] = from_float<Element>(values[i]);
        reinterpret_cast<Chunk*>(query + head * kHeadSize)[chunk] = stored;
    }
}
