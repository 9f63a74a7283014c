// Add and RMSNorm: stream += factor * norm(added), then out = norm(stream); every part may be missing.
//
// A thread block has one row. A thread has the same elements in each pass, so it reads back only what it wrote itself. Sums
// are float, in an order that follows from the row's size alone: a row's result does not depend on the batch.
#include "row_params.cuh"

constexpr i32 kChunk = 16 / sizeof(Element);  // elements
constexpr i32 kWarps = 8;                     // of a thread block, at most

struct alignas(16) Chunk { Element element[kChunk]; };

__device__ __forceinline__ float sum_of_squares(const Element* row, i32 chunks) {
    float sum = 0.0f;
    for (i32 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
        const Chunk held = reinterpret_cast<const Chunk*>(row)[chunk];
#pragma unroll
        for (i32 i = 0; i < kChunk; ++i) sum = fmaf(to_float(held.element[i]), to_float(held.element[i]), sum);
    }
    __shared__ float sums[kWarps];
#pragma unroll
    for (i32 lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(kFullWarp, sum, lane);
    __syncthreads();  // an earlier sum has been read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
    for (i32 warp = 0; warp < static_cast<i32>(blockDim.x) / 32; ++warp) total += sums[warp];
    return total;
}

extern "C" __global__ void __launch_bounds__(32 * kWarps) pagekv_add_norm(const AddNormParams p) {
    const i64 row = blockIdx.x;
    const i32 chunks = p.size / kChunk;
    Element* const stream = static_cast<Element*>(p.stream) + row * p.size;
    if (p.added != nullptr) {
        const Element* const added = static_cast<const Element*>(p.added) + row * p.size;
        float scale = p.factor;
        if (p.added_weight != nullptr) scale /= sqrtf(sum_of_squares(added, chunks) / p.size + p.added_eps);
        for (i32 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
            const Chunk more = reinterpret_cast<const Chunk*>(added)[chunk];
            Chunk held = reinterpret_cast<const Chunk*>(stream)[chunk];
#pragma unroll
            for (i32 i = 0; i < kChunk; ++i) {
                const float weight = p.added_weight != nullptr ? p.added_weight[chunk * kChunk + i] : 1.0f;
                const float sum = fmaf(to_float(more.element[i]) * scale, weight, to_float(held.element[i]));
                held.element[i] = from_float<Element>(sum);
            }
            reinterpret_cast<Chunk*>(stream)[chunk] = held;
        }
    }
    if (p.weight == nullptr) return;  // the whole thread block
    const float scale = 1.0f / sqrtf(sum_of_squares(stream, chunks) / p.size + p.eps);
    Element* const out = static_cast<Element*>(p.out) + row * p.size;
    for (i32 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
        Chunk held = reinterpret_cast<const Chunk*>(stream)[chunk];
#pragma unroll
        for (i32 i = 0; i < kChunk; ++i) {
            const float normed = to_float(held.element[i]) * scale * p.weight[chunk * kChunk + i];
            held.element[i] = from_float<Element>(normed);
        }
        reinterpret_cast<Chunk*>(out)[chunk] = held;
    }
}
