"""The sampler's kernels: one adjusts logits by biases, bans and penalties, the other samples the next token of each
row. `src/sampling_weight.cuh` defines the weights of tokens.
"""

from __future__ import annotations

import math

import numpy as np

from pagekv.kernels import launch_config
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.params import ADJUST, SAMPLE, fill
from pagekv.kernels.tensors import Tensor
from pagekv.kernels.variants import Variant

MAX_VOCAB_SIZE = 2**19
"""The most columns of the logits: the sum of so many weights fits 64 bits."""
UNIT = 2.0**44
"""Weight of the likeliest token."""
NONE = 2**64 - 1
"""`Choice.top_p` of a row without top-p."""
MAX_SCALE = 2.0**100


def scales(temperature: float) -> tuple[float, float]:
    """`scale` and `scale_low` of a `Choice`, as float32 values; `temperature` above 0. Temperatures below about 2^-100
    count as that.
    """
    exact = min(math.log2(math.e) / temperature, MAX_SCALE)
    high = float(np.float32(exact))
    return high, float(np.float32(exact - high))


def top_p_share(top_p: float) -> int:
    """`Choice.top_p`: one unit less than the share, because a nucleus of exactly `top_p` is large enough."""
    return NONE if top_p >= 1 else max(int(top_p * 2.0**64) - 1, 1)


def min_weight(min_p: float) -> int:
    """`Choice.min_weight` of min-p in [0, 1]."""
    return math.ceil(min_p * UNIT)


class SamplingKernels:
    """The kernels for logits `[rows, vocab_size]` of one element type, beside tables of the tokens that sequences have
    had. Holds no state of a step.
    """

    def __init__(self, launcher: Launcher, dtype: str, vocab_size: int) -> None:
        """`dtype`: float32, float16 or bfloat16. Raises ValueError for a vocabulary that is too large."""
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size: must be in [1, {MAX_VOCAB_SIZE}], got {vocab_size}")
        self._launcher, self._vocab_size = launcher, vocab_size
        self._variant = Variant(dtype, dtype, 64)

    def adjust(
        self, logits: Tensor, out: Tensor, adjustments: Tensor, edits: Tensor | None, counts: Tensor, seen: Tensor
    ) -> None:
        """Writes rows of adjusted logits, float32 `[n, vocab_size]`, as `adjustments` say: int32 words, one
        `params.ADJUSTMENT` a row; `edits`: int32 words of `params.EDIT`. `counts` int32 and `seen` bool
        `[.., vocab_size]`.
        """
        self._launcher.launch(
            "pagekv_adjust",
            self._variant,
            launch_config.adjust(int(out.shape[0]), self._vocab_size),
            fill(
                ADJUST,
                logits=logits.data_ptr(),
                out=out.data_ptr(),
                adjustments=adjustments.data_ptr(),
                edits=0 if edits is None else edits.data_ptr(),
                counts=counts.data_ptr(),
                seen=seen.data_ptr(),
                logit_stride=logits.stride()[0],
                vocab_size=self._vocab_size,
            ),
        )

    def sample(
        self,
        logits: Tensor,
        adjusted: Tensor | None,
        choices: Tensor,
        tokens: Tensor,
        last_tokens: Tensor,
        counts: Tensor,
        seen: Tensor,
    ) -> None:
        """Samples the next token of each row of `logits`, whose columns are side by side, and writes it to `tokens`,
        int32 `[rows]`, and to `last_tokens`. If a logit of the row is NaN, they get -1 and 0. `choices`: int32 words,
        one `params.CHOICE` a row. Counts each token in its sequence's row of `counts` and `seen`, which no two rows
        share.
        """
        self._launcher.launch(
            "pagekv_sample",
            self._variant,
            launch_config.sample(int(tokens.shape[0])),
            fill(
                SAMPLE,
                logits=logits.data_ptr(),
                adjusted=0 if adjusted is None else adjusted.data_ptr(),
                choices=choices.data_ptr(),
                tokens=tokens.data_ptr(),
                last_tokens=last_tokens.data_ptr(),
                counts=counts.data_ptr(),
                seen=seen.data_ptr(),
                logit_stride=logits.stride()[0],
                vocab_size=self._vocab_size,
            ),
        )
