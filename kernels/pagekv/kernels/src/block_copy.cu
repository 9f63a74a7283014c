// Block copy: whole blocks, each one slab over all layers, for any number of (source, destination) pairs in one launch.
//
// Grid: pairs in x, pieces of 16 KiB in y (in a loop, where a block has more pieces than the grid). A thread has four
// copies of 16 bytes under way at a time.
#include "params.cuh"

constexpr i32 kPieceBytes = 16384;
constexpr i32 kUnroll = 4;

extern "C" __global__ void __launch_bounds__(128) pagekv_block_copy(const BlockCopyParams p) {
    const i32* const pair = p.pairs + 2 * static_cast<i64>(blockIdx.x);
    const char* const source = static_cast<const char*>(p.pool) + pair[0] * p.block_bytes;
    char* const destination = static_cast<char*>(p.pool) + pair[1] * p.block_bytes;
    for (i64 piece = blockIdx.y; piece * kPieceBytes < p.block_bytes; piece += gridDim.y) {
        const i64 begin = piece * kPieceBytes;
        const i64 rest = p.block_bytes - begin;
        const i32 vectors = static_cast<i32>((rest < kPieceBytes ? rest : kPieceBytes) / 16);
        const Bytes16* const from = reinterpret_cast<const Bytes16*>(source + begin);
        Bytes16* const to = reinterpret_cast<Bytes16*>(destination + begin);
        const i32 threads = blockDim.x;
        for (i32 first = threadIdx.x; first < vectors; first += kUnroll * threads) {
            Bytes16 held[kUnroll];
#pragma unroll
            for (i32 i = 0; i < kUnroll; ++i)
                if (first + i * threads < vectors) held[i] = from[first + i * threads];
#pragma unroll
            for (i32 i = 0; i < kUnroll; ++i)
                if (first + i * threads < vectors) to[first + i * threads] = held[i];
        }
    }
}
