"""Checks of the kernels before anything is timed: against torch in float64 on the same device, and against themselves.

The pool is NaN everywhere at first, and the cache write stores keys and values in it. So a check fails if a kernel
reads a slot that was not written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pagekv.kernels.bench.machine import CudaMachine
from pagekv.kernels.bench.scene import Scene, Setup
from pagekv.kernels.variants import DTYPE_PAIRS, HEAD_SIZES, Variant

ALLOWED = {"float32": 5e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest error of a weighted mean of values of size about 1: rounding of weights and of the result."""
LENGTHS = (1, 16, 255, 256, 257, 700, 2049, 5000, 9000)
"""The last length has 18 partial results of a decode, which the merge kernel merges; the others have at most 10. The
last two have splits of 512 keys. The end of a prompt of the last length has its keys split too, and one launch merges
it and a decode beside it."""
SHORT_LENGTHS = (1, 17, 300, 1100)
SHARERS = 19
"""Sequences that share all blocks: more than the rows of one thread block, and no multiple of them."""
CHUNK = 100
"""Rows of the prompt that are a chunk of their own when chunking is checked."""
MOST_PREFILL = 2049
"""Longest prompt that is computed whole: the reference takes memory by the square of the length."""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    error: float
    """Largest absolute error; for a claim of equal bits, how many elements differ."""
    allowed: float

    @property
    def passed(self) -> bool:
        """False for NaN."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        mark = "ok" if self.passed else "WRONG"
        return f"{mark:<6}{self.name}: error {self.error:.2g}, allowed {self.allowed:.2g}"


def variants_to_check() -> list[Variant]:
    """Every pair of element types, every head size, and the features once. Not all combinations, because each costs
    seconds of compilation."""
    return [
        *(Variant(dtype, kv_dtype, 128) for dtype, kv_dtypes in DTYPE_PAIRS.items() for kv_dtype in kv_dtypes),
        *(Variant("bfloat16", "bfloat16", size) for size in HEAD_SIZES if size != 128),
        Variant("float16", "float16", 128, features=True),
    ]


BF16 = Variant("bfloat16", "bfloat16", 128)
MANY_BLOCKS = 4096
"""Thread blocks of decodes: some ten times as many as run at a time on an H200."""


def setups() -> list[Setup]:
    """bf16 of head size 128, which is timed later, in every group and block size; then every variant."""
    groups = ((4, 4), (16, 2), (32, 1), (64, 1))
    return [
        Setup(BF16, LENGTHS),
        *(Setup(BF16, SHORT_LENGTHS, num_heads=heads, num_kv_heads=kv_heads) for heads, kv_heads in groups),
        *(Setup(BF16, SHORT_LENGTHS, block_size=block_size) for block_size in (1, 256)),
        crowd(BF16),
        *(
            Setup(Variant(dtype, "float8_e4m3fn", 128), SHORT_LENGTHS, subnormal=True)
            for dtype in ("bfloat16", "float16")
        ),
        *(Setup(variant, LENGTHS) for variant in variants_to_check() if variant != BF16),
    ]


def crowd(variant: Variant, most_context: int = 1100) -> Setup:
    """Decodes of so many sequences that thread blocks have several items each."""
    kv_heads = 4
    sequences = MANY_BLOCKS // kv_heads + 3
    lengths = np.random.default_rng(0).integers(1, most_context + 1, sequences)
    return Setup(variant, tuple(lengths.tolist()), num_heads=8, num_kv_heads=kv_heads, decodes_only=True)


def largest(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference, NaN where there is one."""
    return float((actual.double() - expected).abs().max())


def differing(actual: torch.Tensor, other: torch.Tensor) -> float:
    """Number of elements that differ; NaN differs from everything."""
    return float((actual != other).sum())


def checks(machine: CudaMachine, setup: Setup) -> Iterator[Check]:
    scene = Scene(machine, setup)
    allowed = ALLOWED[setup.variant.dtype] * scene.magnitude
    everyone = range(len(setup.lengths))
    yield from write_checks(scene)
    decoded = scene.decode(everyone)
    yield Check(f"{setup}: decode", largest(decoded, scene.expected_last()), allowed)
    if not setup.decodes_only:
        yield from _prefills(scene, allowed)
    apart = everyone if not setup.decodes_only else range(0, len(setup.lengths), max(1, len(setup.lengths) // 8))
    alone = torch.cat([scene.decode([sequence]) for sequence in apart])
    yield Check(f"{setup}: decode does not depend on the batch", differing(alone, decoded[list(apart)]), 0)
    longest = int(np.argmax(scene.lengths))
    together = scene.decode([longest] * SHARERS)
    one = decoded[longest].expand_as(together)
    yield Check(f"{setup}: decode of {SHARERS} sequences with the same blocks", differing(together, one), 0)
    scene.place(np.random.default_rng(1).permutation(scene.num_blocks))
    again = scene.decode(everyone)
    yield Check(f"{setup}: decode does not depend on the blocks", differing(again, decoded), 0)
    yield from block_copy_checks(scene)


def write_checks(scene: Scene) -> Iterator[Check]:
    """The pool holds the written keys and values in their slots."""
    # As float32, which is exact: torch.cat has no fp8 on the GPUs of older torch.
    stored = torch.cat([scene.stored(sequence).float() for sequence in range(len(scene.lengths))])
    # Keys and values side by side, so that keys stored as values are noticed.
    written = torch.stack([scene.key, scene.value], 1).to(scene.kv_dtype)
    yield Check(f"{scene.setup}: cache write", differing(stored, written.float()), 0)


def _prefills(scene: Scene, allowed: float) -> Iterator[Check]:
    """The longest prompt with a reference, whole and in chunks; and the end of a longer one."""
    setup = scene.setup
    whole = int(np.argmax(np.where(scene.lengths <= MOST_PREFILL, scene.lengths, 0)))
    length = int(scene.lengths[whole])
    rows = scene.prefill(whole, 0, length)
    yield Check(f"{setup}: prefill", largest(rows, scene.expected(whole, 0)), allowed)
    cut = min(CHUNK, length - 1)
    chunks = torch.cat([scene.prefill(whole, 0, cut), scene.prefill(whole, cut, length)])
    yield Check(f"{setup}: prefill does not depend on chunks", differing(chunks, rows), 0)
    longest = int(np.argmax(scene.lengths))
    if longest != whole:
        start, stop = int(scene.lengths[longest]) - CHUNK, int(scene.lengths[longest])
        behind = scene.prefill(longest, start, stop)
        name = f"{setup}: prefill behind {start} tokens"
        yield Check(name, largest(behind, scene.expected(longest, start)), allowed)
        cut = start + CHUNK // 3
        chunks = torch.cat([scene.prefill(longest, start, cut), scene.prefill(longest, cut, stop)])
        yield Check(f"{name} does not depend on chunks", differing(chunks, behind), 0)
        beside, alone = scene.decode_beside_prefill(longest, start), torch.cat([scene.decode([longest]), behind])
        yield Check(f"{name} and a decode do not depend on each other", differing(beside, alone), 0)


def block_copy_checks(scene: Scene) -> Iterator[Check]:
    """A copy of the longest sequence's first block, over the first sequence's last one, is equal to the bit."""
    source, target = int(scene.tables[int(np.argmax(scene.lengths)), 0]), int(scene.tables[0, -1])
    if source != target:
        pairs = torch.tensor([[source, target]], dtype=torch.int32, device=scene.machine.device)
        scene.attention.copy_blocks(pairs)
        scene.machine.synchronize()
        bits = scene.pool.view(torch.uint8)
        yield Check(f"{scene.setup}: block copy", differing(bits[source], bits[target]), 0)
