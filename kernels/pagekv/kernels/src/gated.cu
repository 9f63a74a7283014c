// Gated activation: out = f(gate) * up, f being SiLU or GELU in its form with tanh, in float, rounded once.
//
// A thread has 16 bytes of a row's gate, and the elements that they gate. Grid: rows in x, pieces of a row in y.
#include "row_params.cuh"

constexpr i32 kChunk = 16 / sizeof(Element);  // elements
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kOuter = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
constexpr float kInner = 0.044715f;

struct alignas(16) Chunk { Element element[kChunk]; };

extern "C" __global__ void __launch_bounds__(256) pagekv_gated(const GatedParams p) {
    const i64 row = blockIdx.x;
    const i32 chunk = blockIdx.y * blockDim.x + threadIdx.x;
    const i32 chunks = p.size / kChunk;
    if (chunk >= chunks) return;
    const Chunk* const gates = reinterpret_cast<const Chunk*>(static_cast<const Element*>(p.gate_up) + row * 2 * p.size);
    const Chunk gate = gates[chunk], up = gates[chunks + chunk];
    Chunk out;
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) {
        const float x = to_float(gate.element[i]);
        // gelu(x) = x * sigmoid(2 * z), z = sqrt(2 / pi) * (x + 0.044715 * x^3), by tanh(z) = 2 * sigmoid(2 * z) - 1.
        const float z = p.gelu ? kOuter * fmaf(kInner * x * x, x, x) : x;
        out.element[i] = from_float<Element>(x / (1.0f + exp2_approx(-z * kLog2E)) * to_float(up.element[i]));
    }
    reinterpret_cast<Chunk*>(static_cast<Element*>(p.out) + row * p.size)[chunk] = out;
}
