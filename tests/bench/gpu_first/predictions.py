"""Predictions of a review of 2026-11 for one H200, before anything had run: (lowest, highest) of each figure.

From instruction counts, register and shared-memory budgets, and latencies of other kernels; none of it was measured.
"""

from __future__ import annotations

Range = tuple[float, float]

# Share of the card's copy bandwidth.
DECODE_SHARE: dict[str, Range] = {
    "MHA, 64 x 1k": (0.95, 0.95),
    "MHA, 256 x 1k": (0.96, 0.96),
    "MHA, 64 x 4k": (0.96, 0.96),
    "MHA, 8 x 4k": (0.93, 0.93),
    "MHA, 8 x 16k": (0.95, 0.95),
    "MHA, 1 x 16k": (0.85, 0.85),
    "MHA, 1 x 64k": (0.91, 0.91),
    "GQA 4, 64 x 1k": (0.83, 0.90),
    "GQA 4, 256 x 1k": (0.93, 0.93),
    "GQA 4, 64 x 4k": (0.93, 0.93),
    "GQA 4, 64 x 16k": (0.94, 0.94),
    "GQA 4, 64 x 64k": (0.94, 0.94),
    "GQA 4, 8 x 4k": (0.83, 0.83),
    "GQA 4, 8 x 16k": (0.90, 0.90),
    "GQA 4, 1 x 16k": (0.60, 0.60),
    "GQA 4, 1 x 64k": (0.75, 0.75),
    "GQA 8, 64 x 1k": (0.82, 0.89),
    "GQA 8, 256 x 1k": (0.90, 0.90),
    "GQA 8, 64 x 4k": (0.90, 0.90),
    "GQA 8, 64 x 16k": (0.91, 0.91),
    "GQA 8, 64 x 64k": (0.91, 0.91),
    "GQA 8, 8 x 4k": (0.82, 0.82),
    "GQA 8, 8 x 16k": (0.88, 0.88),
    "GQA 8, 1 x 16k": (0.60, 0.60),
    "GQA 8, 1 x 64k": (0.74, 0.74),
    "MQA, 64 x 1k": (0.55, 0.70),
    "MQA, 256 x 1k": (0.72, 0.79),
    "MQA, 64 x 4k": (0.72, 0.79),
    "MQA, 64 x 16k": (0.72, 0.76),
    "MQA, 64 x 64k": (0.74, 0.78),
    "MQA, 8 x 4k": (0.44, 0.44),
    "MQA, 8 x 16k": (0.56, 0.56),
    "MQA, 1 x 16k": (0.14, 0.14),
    "MQA, 1 x 64k": (0.32, 0.32),
    "GQA 4, 64 x 1k, fp8": (0.70, 0.80),
    "GQA 4, 256 x 1k, fp8": (0.75, 0.85),
    "GQA 4, 64 x 4k, fp8": (0.75, 0.85),
    "GQA 4, 64 x 16k, fp8": (0.75, 0.85),
}

# TFLOP/s, causal, whole prompts by their length; and 512 tokens behind 16k and 64k.
PREFILL_BY_LENGTH: dict[int, Range] = {
    512: (130, 170),
    1024: (190, 230),
    2048: (240, 290),
    4096: (280, 330),
    8192: (310, 360),
    16384: (330, 380),
}
PREFILL_CHUNK: Range = (170, 210)

# Share of copy bandwidth, or of a pinned copy.
OTHERS: dict[str, Range] = {"cache write of 8k tokens": (0.60, 0.75), "block copy": (0.85, 0.92), "swap": (0.92, 0.97)}

# Milliseconds of a step of Llama 3 8B; the key is that of a row.
STEP_MS: dict[tuple[str, str], Range] = {
    ("with graphs", "batch 1, greedy"): (6.2, 6.7),
    ("with graphs", "batch 32, greedy"): (6.7, 7.1),
    ("with graphs", "batch 256, greedy"): (10.7, 12.2),
    ("with graphs", "batch 256, top-p"): (18.0, 22.0),
    ("with graphs", "31 decodes beside a chunk of 512"): (18.0, 28.0),
    ("with graphs", "255 decodes beside a chunk of 512"): (20.0, 30.0),
}
STEP_LAUNCHES: Range = (1200, 1400)
COPY_GB_PER_S: Range = (4200, 4400)
GEMM_TFLOP_PER_S: Range = (750, 800)


def prefill(new: int, cached: int) -> Range | None:
    """TFLOP/s of a prefill case."""
    if not cached:
        return PREFILL_BY_LENGTH.get(new)
    return PREFILL_CHUNK if new == 512 and cached >= 16384 else None


def shown(predicted: Range | None, layout: str) -> str:
    """A range in a cell."""
    if predicted is None:
        return ""
    low, high = (format(value, layout) for value in predicted)
    return low if low == high else f"{low} to {high}"
