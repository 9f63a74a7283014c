"""The kernels against torch in float64 on the same device, and against themselves: asked before anything is timed.

The pool starts as NaN everywhere, and keys and values get there through the cache write: what was not written must not
be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagekv.kernels.bench.machine import Machine
from pagekv.kernels.bench.scene import Scene, Setup
from pagekv.kernels.decode_plan import MAX_BLOCKS
from pagekv.kernels.swap import BlockSwapper
from pagekv.kernels.variants import HEAD_SIZES, Variant

ALLOWED = {"float32": 5e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest error of a weighted mean of values of size about 1: rounding of weights and of the result."""
LENGTHS = (1, 16, 255, 256, 257, 700, 2049, 5000)
"""The last has 20 partial results, which a kernel of their own merges; those before, at most 9."""
SHORT_LENGTHS = (1, 17, 300, 1100)
CHUNK = 100
"""Rows of the prompt that are computed apart when chunking is checked."""
MOST_PREFILL = 2049
"""Longest prompt that is computed whole: the reference takes memory by its square."""
REPLAYS = 200


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    error: float
    """Largest absolute error; for a claim of equal bits, how many elements differ."""
    allowed: float

    @property
    def passed(self) -> bool:
        """False for NaN."""
        return self.error <= self.allowed

    def row(self) -> dict[str, object]:
        """As JSON has it."""
        return {"name": self.name, "error": self.error, "allowed": self.allowed, "passed": self.passed}


def variants_to_check() -> list[Variant]:
    """Every pair of element types, every head size, and the features once: each costs seconds of compilation."""
    return [
        *(Variant(dtype, kv_dtype, 128) for dtype, kv_dtype in PAIRS),
        *(Variant("bfloat16", "bfloat16", size) for size in HEAD_SIZES if size != 128),
        Variant("float16", "float16", 128, features=True),
    ]


PAIRS = (
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float16"),
    ("float16", "float8_e4m3fn"),
    ("float32", "float32"),
)
BF16 = Variant("bfloat16", "bfloat16", 128)


def setups() -> list[Setup]:
    """Setups, those timed later first: bf16 of head size 128 in every group and block size. Then every variant."""
    groups = ((4, 4), (16, 2), (32, 1), (64, 1))
    return [
        Setup(BF16, LENGTHS),
        *(Setup(BF16, SHORT_LENGTHS, num_heads=heads, num_kv_heads=kv_heads) for heads, kv_heads in groups),
        *(Setup(BF16, SHORT_LENGTHS, block_size=block_size) for block_size in (1, 256)),
        Setup(BF16, SHORT_LENGTHS, rotary_dim=128),
        Setup(BF16, SHORT_LENGTHS, rotary_dim=64, interleaved=True),
        crowd(BF16),
        *(
            Setup(Variant(dtype, "float8_e4m3fn", 128), SHORT_LENGTHS, subnormal=True)
            for dtype in ("bfloat16", "float16")
        ),
        *(Setup(variant, LENGTHS) for variant in variants_to_check() if variant != BF16),
    ]


def crowd(variant: Variant, most_context: int = 1100) -> Setup:
    """So many sequences that a launch of the decode kernel has more work than thread blocks. Only decodes."""
    kv_heads = 4
    sequences = MAX_BLOCKS // kv_heads + 3
    lengths = np.random.default_rng(0).integers(1, most_context + 1, sequences)
    return Setup(variant, tuple(lengths.tolist()), num_heads=8, num_kv_heads=kv_heads, decodes_only=True)


def largest(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference, NaN where there is one."""
    return float((actual.double() - expected).abs().max())


def differing(actual: torch.Tensor, other: torch.Tensor) -> float:
    """How many elements differ, NaN from anything."""
    return float((actual != other).sum())


def checks(machine: Machine, setup: Setup) -> Iterator[Check]:
    """Every check of one setup."""
    scene = Scene(machine, setup)
    allowed = ALLOWED[setup.variant.dtype] * scene.magnitude
    everyone = range(len(setup.lengths))
    yield from _writes(scene, setup)
    decoded = scene.decode(everyone)
    yield Check(f"{setup}: decode", largest(decoded, scene.expected_last()), allowed)
    if not setup.decodes_only:
        yield from _prefills(scene, setup, allowed)
    apart = everyone if not setup.decodes_only else range(0, len(setup.lengths), max(1, len(setup.lengths) // 8))
    alone = torch.cat([scene.decode([sequence]) for sequence in apart])
    yield Check(f"{setup}: decode does not depend on the batch", differing(alone, decoded[list(apart)]), 0)
    scene.place(np.random.default_rng(1).permutation(scene.num_blocks))
    again = scene.decode(everyone)
    yield Check(f"{setup}: decode does not depend on the blocks", differing(again, decoded), 0)
    yield from _block_copy(scene, setup)


def _writes(scene: Scene, setup: Setup) -> Iterator[Check]:
    """The pool holds what was written, in the right places; with RoPE, keys and queries turned."""
    stored = torch.cat([scene.stored(sequence) for sequence in range(len(setup.lengths))])
    if setup.rotary_dim:
        # Of numbers of size about 1, rounded to the pool's type; and values untouched.
        allowed = 2.0**-7 if scene.kv_dtype.itemsize == 2 else 2.0**-22
        yield Check(f"{setup}: keys turned by RoPE", largest(stored[:, 0], scene.turned_key), 4 * allowed)
        yield Check(f"{setup}: queries turned by RoPE", largest(scene.query, scene.turned_query), 4 * allowed)
        yield Check(
            f"{setup}: values written", differing(stored[:, 1].float(), scene.value.to(scene.kv_dtype).float()), 0
        )
        return
    # In another order the comparison would not see keys stored as values.
    written = torch.stack([scene.key, scene.value], 1).to(scene.kv_dtype)
    yield Check(f"{setup}: cache write", differing(stored.float(), written.float()), 0)


def _prefills(scene: Scene, setup: Setup, allowed: float) -> Iterator[Check]:
    """The longest prompt that a reference fits, whole and in chunks; and the end of one longer than that."""
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
        yield Check(f"{setup}: prefill behind {start} tokens", largest(behind, scene.expected(longest, start)), allowed)


def _block_copy(scene: Scene, setup: Setup) -> Iterator[Check]:
    source, target = int(scene.tables[int(np.argmax(scene.lengths)), 0]), int(scene.tables[0, -1])
    if source != target:
        pairs = torch.tensor([[source, target]], dtype=torch.int32, device=scene.machine.device)
        scene.attention.copy_blocks(pairs)
        scene.machine.synchronize()
        bits = scene.pool.view(torch.uint8)
        yield Check(f"{setup}: block copy", differing(bits[source], bits[target]), 0)


def replay_checks(machine: Machine, setup: Setup, replays: int = REPLAYS) -> Iterator[Check]:
    """A recorded step gives the same bits every time: counters of merges come back to zero, nothing races."""
    scene = Scene(machine, setup)
    attend, out = scene.decode_step(range(len(setup.lengths)))
    attend()
    machine.synchronize()
    first, different = out.clone(), 0.0
    replay = machine.recorded(attend)
    for _ in range(replays):
        out.fill_(torch.nan)
        machine.synchronize()
        replay()
        different += differing(out, first)
    yield Check(f"{setup}: {replays} replays of a graph equal the step to the bit", different, 0)


def swap_checks(machine: Machine, variant: Variant = BF16, lengths: Sequence[int] = (1, 17, 300)) -> Iterator[Check]:
    """Sequences leave for host memory and return to other blocks while others are attended to."""
    scene = Scene(machine, Setup(variant, tuple(lengths), spare_sequences=1))
    blocks = scene.tables[len(lengths) - 1].tolist()
    spare = scene.spare_blocks(len(blocks))
    before = scene.decode(range(len(lengths)))
    size = scene.pool[0].numel() * scene.pool.element_size()
    host = machine.pinned(len(blocks) * size).view(scene.pool.dtype).view(len(blocks), *scene.pool.shape[1:])
    swapper = BlockSwapper(machine.streams(), scene.pool, host)
    places = list(range(len(blocks)))
    swapper.swap_out(blocks, places)
    beside = scene.decode(range(len(lengths) - 1))  # needs none of the blocks under way
    swapper.before_compute(blocks)
    scene.pool.view(torch.uint8)[blocks] = 0xFF
    swapper.swap_in(places, spare)
    swapper.before_compute(spare)
    scene.tables[len(lengths) - 1] = spare
    after = scene.decode(range(len(lengths)))
    yield Check("swap: decodes beside a swap under way", differing(beside, before[:-1]), 0)
    yield Check("swap: decode of a sequence that returned to other blocks", differing(after, before), 0)


def smallest_checks(machine: Machine, variant: Variant) -> Iterator[Check]:
    """The smallest launch of each kernel, waited for one by one, so that a fault is known by its kernel."""
    allowed = ALLOWED[variant.dtype]
    short = Scene(machine, Setup(variant, (17,)))
    machine.synchronize()
    yield from _writes(short, short.setup)
    yield Check("decode 1 x 17", largest(short.decode([0]), short.expected_last()), allowed)
    long = Scene(machine, Setup(variant, (5000,), decodes_only=True))
    yield Check("decode 1 x 5000, merged", largest(long.decode([0]), long.expected_last()), allowed)
    yield Check("prefill 17", largest(short.prefill(0, 0, 17), short.expected(0, 0)), allowed)
    yield from _block_copy(short, short.setup)
