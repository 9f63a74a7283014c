// Parameter structures of the kernels that know rows alone, laid out as those of params.cuh. params.py mirrors them too.
#pragma once
#include "types.cuh"

// Rows of a residual stream, or of heads: stream += factor * norm(added), out = norm(stream). norm(x) is
// x / sqrt(mean(x * x) + eps) * weight over `size` elements.
struct AddNormParams {
    void* stream;               // [grid in x, grid in y, size], rows stream_stride apart
    const void* added;          // [grid in x, size]; null: nothing is added
    void* out;                  // as stream, rows out_stride apart; may be stream
    const float* added_weight;  // [size]; null: what is added is not normed
    const float* weight;        // [elements of all groups]; null: no out
    i64 stream_stride;
    i64 out_stride;
    i32 size;                   // a multiple of 16 bytes; where something is added, the grid in y is 1
    i32 last_size;              // of the last group in y, likewise
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
