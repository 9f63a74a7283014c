// Parameter structures of the sampler's kernels, laid out as those of params.cuh. params.py mirrors them too.
#pragma once
#include "types.cuh"

// The sampling of one row of logits.
struct Choice {
    u64 draw_key;     // random bits
    u64 top_p;        // times 2^64, less one; all ones: no top-p
    u64 min_weight;   // min_p in units of 2^-44
    i32 top_k;        // 0: no top-k
    i32 adjusted;     // row of the adjusted logits; -1: the logits are as the model gave them
    i32 last_token;   // place of the token in last_tokens
    i32 penalty_row;  // row of the counts of tokens; -1: none
    float scale;      // log2(e) / temperature: from a difference of logits to one of log2 of weights; 0: greedy
    float scale_low;  // the part of the exact scale that rounding took from `scale`
};

struct SampleParams {
    const void* logits;     // [grid in x, vocab_size], rows logit_stride apart
    const float* adjusted;  // [.., vocab_size]
    const Choice* choices;  // [grid in x]
    i32* tokens;            // [grid in x]: the token, -1 where the logits are not numbers
    i32* last_tokens;       // the same, 0 where they are not
    i32* counts;            // [.., vocab_size]: how often each token was generated
    u8* seen;               // [.., vocab_size]: whether the sequence has it at all
    i64 logit_stride;
    i32 vocab_size;         // at most 2^19
};

// The changes of one row of logits.
struct Adjustment {
    i32 row;          // of the logits
    i32 edits;        // the first of its edits
    i32 num_edits;
    i32 penalty_row;  // -1: no penalties
    float repetition;
    float presence;
    float frequency;
};

struct Edit {
    i32 token;
    float value;  // added; -infinity: the token is banned. A row has at most one of each for a token
};

struct AdjustParams {
    const void* logits;             // [.., vocab_size], rows logit_stride apart
    float* out;                     // [grid in x, vocab_size]
    const Adjustment* adjustments;  // [grid in x]
    const Edit* edits;
    const i32* counts;              // as of SampleParams
    const u8* seen;
    i64 logit_stride;
    i32 vocab_size;
};
