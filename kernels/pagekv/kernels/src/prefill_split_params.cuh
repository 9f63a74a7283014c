// Parameters of pagekv_prefill_split, laid out as those of params.cuh. params.py mirrors them too.
#pragma once
#include "params.cuh"

struct PrefillSplitParams : PrefillParams {
    const i32* merges;     // [T, 4], an entry for each row of the step: row, first partial, partials, split of the first
                           // partial; no partials: the row is not split
    float* partial_out;    // [partials, H, D] sums of weighted values
    float* partial_state;  // [partials, H, 2]: maximum logit and sum of weights, base 2
};
