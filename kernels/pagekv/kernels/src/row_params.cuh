// Parameter structures of add_norm.cu and gated.cu, laid out as those of params.cuh. params.py mirrors them too.
#pragma once
#include "types.cuh"

// Rows of a residual stream: stream += factor * norm(added), out = norm(stream). norm(x) is
// x / sqrt(mean(x * x) + eps) * weight.
struct AddNormParams {
    void* stream;               // [grid in x, size]
    const void* added;          // [grid in x, size]; null: nothing is added
    void* out;                  // as stream
    const float* added_weight;  // [size]; null: what is added is not normed
    const float* weight;        // [size]; null: no out
    i32 size;                   // a multiple of 16 bytes
    float factor;
    float added_eps;
    float eps;
};

// out = f(gate) * up: the first half of a row is the gate.
struct GatedParams {
    const void* gate_up;  // [grid in x, 2, size]
    void* out;            // [grid in x, size]
    i32 size;             // a multiple of 16 bytes
    i32 gelu;             // 0: f is SiLU; 1: GELU in its form with tanh
};
