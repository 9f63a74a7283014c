"""Loops that Numba compiles, run on the threads of torch's own OpenMP.

A reader may take the modules in this order:

    a step's attention          step_attention, decode_attention, prompt_attention
    parts of it                 slots, softmax, transpose, interleave
    products with weights       product, packing, weight_memory, tile, bfloat16_sums, matrix_unit
    row by row                  rows, expert_rows, stored_rows
    how loops are run           program, openmp, code_cache
    numbers and vectors         numbers, vectors, intrinsics
"""
