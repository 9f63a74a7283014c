// Logits as their sequence's sampling changes them: bias, ban, then penalties of tokens that it has had; in float.
//
// One thread block a row and piece of the vocabulary: the piece is read, edited in shared memory and written.
#include "sample_params.cuh"

constexpr i32 kPiece = 2048;

extern "C" __global__ void __launch_bounds__(256) pagekv_adjust(const AdjustParams p) {
    __shared__ float piece[kPiece];
    const Adjustment row = p.adjustments[blockIdx.x];
    const i32 first = blockIdx.y * kPiece, size = min(kPiece, p.vocab_size - first);
    const Element* const logits = static_cast<const Element*>(p.logits) + row.row * p.logit_stride + first;
    for (i32 i = threadIdx.x; i < size; i += blockDim.x) piece[i] = to_float(logits[i]);
    __syncthreads();
    // Biases first, then bans: a token may have one of each. What is no number stays so, for `sample.cu` to find.
    for (i32 bans = 0; bans < 2; ++bans) {
        for (i32 i = threadIdx.x; i < row.num_edits; i += blockDim.x) {
            const Edit edit = p.edits[row.edits + i];
            const i32 at = edit.token - first;
            if (at < 0 || at >= size || (edit.value == -infinity()) != (bans == 1) || piece[at] != piece[at]) continue;
            piece[at] = bans == 1 ? -infinity() : piece[at] + edit.value;
        }
        __syncthreads();
    }
    float* const out = p.out + static_cast<i64>(blockIdx.x) * p.vocab_size + first;
    const i64 tokens = static_cast<i64>(row.penalty_row) * p.vocab_size + first;
    for (i32 i = threadIdx.x; i < size; i += blockDim.x) {
        float logit = piece[i];
        if (row.penalty_row >= 0 && p.seen[tokens + i]) {
            logit = logit > 0.0f ? logit / row.repetition : __fmul_rn(logit, row.repetition);
            const i32 count = p.counts[tokens + i];
            if (count > 0) logit -= fmaf(static_cast<float>(count), row.frequency, row.presence);
        }
        out[i] = logit;
    }
}
