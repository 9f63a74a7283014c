// The cache write of models that have one norm over all queries of a token, and one over all keys.
//
// A thread block has all queries of a token, or all its keys and values, because queries change in place and all must be
// summed before one changes. It reads at most some 16 KiB twice. The norm of a token does not depend on the batch: its sum
// is float, in an order that follows from the number of heads alone.
// Grid: [T, 2].
constexpr bool TOGETHER = true;
#include "cache_write.cuh"

// The sum of squares of `chunks` chunks side by side. Every thread of the thread block calls it.
__device__ __forceinline__ float sum_of_squares(const Element* first, i32 chunks) {
    float sum = 0.0f, values[kChunk];
    for (i32 chunk = threadIdx.x; chunk < chunks; chunk += kThreads) {
        to_floats(reinterpret_cast<const Chunk*>(first)[chunk], values);
        sum = sum_of_squares(values, sum);
    }
    __shared__ float sums[kThreads / 32];
#pragma unroll
    for (i32 lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(kFullWarp, sum, lane);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();  // every warp has summed, and read what it will change
    float total = 0.0f;
#pragma unroll
    for (i32 warp = 0; warp < kThreads / 32; ++warp) total += sums[warp];
    return total;
}

extern "C" __global__ void __launch_bounds__(kThreads, 4) pagekv_cache_write_together(const CacheWriteParams p) {
    const i32 slot = p.slots[blockIdx.x];
    if (slot < 0) return;  // the whole thread block
    const Heads heads = Heads::of(p);
    const bool queries = blockIdx.y == 0;
    const i32 begin = queries ? 0 : heads.num_queries, end = queries ? heads.num_queries : heads.end;
    const float squares = sum_of_squares(heads.at(p, blockIdx.x, begin), (end - begin) * kChunks);
#pragma unroll 1
    for (i32 first = begin; first < end; first += kHeads) {
        if (first > begin) __syncthreads();  // partners of the heads before have been read
        write_heads(p, heads, slot, first, end, squares, (end - begin) * kHeadSize);
    }
}
