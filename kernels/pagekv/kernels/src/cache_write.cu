// Cache write: keys and values of a step's new tokens into their slots (block, offset), for one layer. A norm is over one
// head.
constexpr bool TOGETHER = false;
#include "cache_write.cuh"

extern "C" __global__ void __launch_bounds__(kThreads) pagekv_cache_write(const CacheWriteParams p) {
    const i32 slot = p.slots[blockIdx.x];
    if (slot < 0) return;  // the whole thread block
    const Heads heads = Heads::of(p);
    write_heads(p, heads, slot, blockIdx.y * kHeads, heads.end, 0.0f, kHeadSize);
}
