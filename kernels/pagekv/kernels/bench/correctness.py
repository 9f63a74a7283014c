"""The kernels against torch in float64 on the same device, and against themselves: asked before anything is timed.

The pool starts as NaN everywhere, and keys and values get there through the cache write: what was not written must not
be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.bench.machine import Machine
from pagekv.kernels.step_plan import StepBatch, StepPlan, plan_step
from pagekv.kernels.variants import HEAD_SIZES, Variant

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, LAYER, NUM_LAYERS = 8, 2, 16, 1, 2
ALLOWED = {"float32": 5e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest error of a weighted mean of values of size about 1: rounding of weights and of the result."""
LENGTHS = (1, 16, 255, 256, 257, 700, 2049)
CHUNK = 100
"""Rows of the prompt that are computed apart when chunking is checked."""


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    error: float
    """Largest absolute error; for a claim of equal bits, how many elements differ."""
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # false for NaN


def variants_to_check() -> list[Variant]:
    """Every pair of element types, every head size, and the features once: each costs seconds of compilation."""
    return [
        *(Variant(dtype, kv_dtype, 128) for dtype, kv_dtype in PAIRS),
        *(Variant("bfloat16", "bfloat16", size) for size in HEAD_SIZES if size != 128),
        Variant("float16", "float16", 128, features=True),
    ]


PAIRS = (
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float16", "float8_e4m3fn"),
    ("bfloat16", "float8_e4m3fn"),
)


class Scene:
    """Sequences of the given lengths whose keys and values are in a pool, in scattered blocks."""

    def __init__(self, machine: Machine, variant: Variant, lengths: Sequence[int], seed: int = 0) -> None:
        self.machine, self.variant = machine, variant
        self.lengths = np.array(lengths, np.int32)
        self.dtype, self.kv_dtype = getattr(torch, variant.dtype), getattr(torch, variant.kv_dtype)
        self.width = -(-int(self.lengths.max()) // BLOCK_SIZE)
        self.num_blocks = len(lengths) * self.width
        self.generator = torch.Generator(machine.device).manual_seed(seed)
        total = int(self.lengths.sum())
        self.key, self.value = (self.random(total, NUM_KV_HEADS) for _ in range(2))
        self.query = self.random(total, NUM_HEADS)
        self.place(np.random.default_rng(seed).permutation(self.num_blocks))

    def random(self, rows: int, heads: int) -> torch.Tensor:
        shape = (rows, heads, self.variant.head_size)
        made = torch.randn(shape, generator=self.generator, device=self.machine.device)
        if self.kv_dtype.itemsize == 1:  # as fp8 stores them, so that the reference sees the same numbers
            made = made.to(self.kv_dtype).float()
        return made.to(self.dtype)

    def place(self, blocks: np.ndarray) -> None:
        """A fresh pool of NaN, the sequences written into these blocks."""
        shape = (self.num_blocks, NUM_LAYERS, 2, BLOCK_SIZE, NUM_KV_HEADS, self.variant.head_size)
        size = int(np.prod(shape)) * self.variant.kv_element_bytes
        bits = torch.full((size,), 0xFF, dtype=torch.uint8, device=self.machine.device)  # NaN in every element type
        self.pool = bits.view(self.kv_dtype).view(shape)
        self.tables = blocks.reshape(len(self.lengths), self.width).astype(np.int32)
        features = {"windows": [300] * NUM_LAYERS, "soft_cap": 20.0} if self.variant.features else {}
        self.attention = PagedAttention(
            self.machine.launcher,
            self.pool,
            self.variant,
            num_heads=NUM_HEADS,
            **features,  # type: ignore[arg-type]  # by name, of several types
        )
        plan, held = self.plan(range(len(self.lengths)), self.lengths, self.lengths, decode=False)
        self.attention.write(LAYER, self.key, self.value, plan)
        del held

    def plan(
        self, sequences: Sequence[int], counts: np.ndarray, contexts: np.ndarray, *, decode: bool
    ) -> tuple[StepPlan, tuple[torch.Tensor, ...]]:
        """The plan for the last `counts` of the first `contexts` tokens of sequences, and the memory it points to."""
        host = plan_step(
            StepBatch(
                query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
                context_lens=contexts.astype(np.int32),
                block_tables=self.tables[list(sequences)],
                decodes=np.full(len(counts), decode),
            ),
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            variant=self.variant,
            window=self.attention.plan_window,
        )
        words = torch.from_numpy(host.words).to(self.machine.device)
        size = max(16, self.attention.scratch_bytes(host.counts["num_partials"]))
        scratch = torch.empty(size, dtype=torch.uint8, device=self.machine.device)
        return host.bind(words.data_ptr(), scratch.data_ptr()), (words, scratch)

    def first_row(self, sequence: int) -> int:
        return int(self.lengths[:sequence].sum())

    def decode(self, sequences: Sequence[int]) -> torch.Tensor:
        """[n, H, D]: the last token of each sequence."""
        rows = [self.first_row(s) + int(self.lengths[s]) - 1 for s in sequences]
        return self.attend(self.query[rows], sequences, np.ones(len(sequences), np.int32), self.lengths, decode=True)

    def prefill(self, sequence: int, start: int, stop: int) -> torch.Tensor:
        """[stop - start, H, D]: rows of one sequence's prompt, behind its first `start` tokens."""
        first = self.first_row(sequence)
        contexts = np.zeros_like(self.lengths)
        contexts[sequence] = stop
        query = self.query[first + start : first + stop]
        return self.attend(query, [sequence], np.array([stop - start], np.int32), contexts, decode=False)

    def attend(
        self, query: torch.Tensor, sequences: Sequence[int], counts: np.ndarray, contexts: np.ndarray, *, decode: bool
    ) -> torch.Tensor:
        plan, held = self.plan(sequences, counts, contexts[list(sequences)], decode=decode)
        query = query.contiguous()
        out = torch.full_like(query, torch.nan)
        self.attention.attend(LAYER, query, out, plan)
        if self.machine.device.type == "cuda":
            torch.cuda.synchronize(self.machine.device)  # before `held` goes back to the allocator
        del held
        return out

    def expected(self, sequence: int) -> torch.Tensor:
        """[length, H, D] in float64: every row of one sequence."""
        first, length = self.first_row(sequence), int(self.lengths[sequence])
        query, key, value = (t[first : first + length].double() for t in (self.query, self.key, self.value))
        key, value = (t.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for t in (key, value))
        logits = torch.einsum("qhd,khd->hqk", query, key) / self.variant.head_size**0.5
        position = torch.arange(length, device=query.device)
        hidden = position[None, :] > position[:, None]
        if self.variant.features:
            logits = 20.0 * torch.tanh(logits / 20.0)
            hidden = hidden | (position[None, :] <= position[:, None] - 300)
        return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), value)


def largest(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference, NaN where there is one."""
    return float((actual.double() - expected).abs().max())


def differing(actual: torch.Tensor, other: torch.Tensor) -> float:
    """How many elements differ, NaN from anything."""
    return float((actual != other).sum())


def checks(machine: Machine, variant: Variant, lengths: Sequence[int] = LENGTHS) -> Iterator[Check]:
    """Every check of one variant."""
    scene, allowed = Scene(machine, variant, lengths), ALLOWED[variant.dtype]
    everyone = range(len(lengths))
    stored = torch.cat([_stored(scene, sequence) for sequence in everyone])
    # In another order the comparison would not see keys stored as values.
    written = torch.stack([scene.key, scene.value], 1).to(scene.kv_dtype)
    yield Check(f"{variant}: cache write", differing(stored.float(), written.float()), 0)
    decoded = scene.decode(everyone)
    expected = torch.stack([scene.expected(sequence)[-1] for sequence in everyone])
    yield Check(f"{variant}: decode", largest(decoded, expected), allowed)
    longest = int(np.argmax(scene.lengths))
    length = int(scene.lengths[longest])
    whole = scene.prefill(longest, 0, length)
    yield Check(f"{variant}: prefill", largest(whole, scene.expected(longest)), allowed)
    cut = min(CHUNK, length - 1)
    chunks = torch.cat([scene.prefill(longest, 0, cut), scene.prefill(longest, cut, length)])
    yield Check(f"{variant}: prefill does not depend on chunks", differing(chunks, whole), 0)
    alone = torch.cat([scene.decode([sequence]) for sequence in everyone])
    yield Check(f"{variant}: decode does not depend on the batch", differing(alone, decoded), 0)
    scene.place(np.random.default_rng(1).permutation(scene.num_blocks))
    yield Check(f"{variant}: decode does not depend on the blocks", differing(scene.decode(everyone), decoded), 0)
    pairs = torch.tensor([[int(scene.tables[longest, 0]), int(scene.tables[0, -1])]], dtype=torch.int32)
    if scene.tables[0, -1] != scene.tables[longest, 0]:
        scene.attention.copy_blocks(pairs.to(machine.device))
        source, target = (scene.pool[int(block)].view(torch.uint8) for block in pairs[0])
        yield Check(f"{variant}: block copy", differing(source, target), 0)


def _stored(scene: Scene, sequence: int) -> torch.Tensor:
    """[length, 2, G, D]: a sequence's keys and values as the pool has them."""
    blocks = torch.from_numpy(scene.tables[sequence].astype(np.int64)).to(scene.pool.device)
    bits = scene.pool.view(torch.uint8)[blocks, LAYER].view(scene.kv_dtype)  # [blocks, 2, block_size, G, D]
    return bits.transpose(1, 2).flatten(0, 1)[: int(scene.lengths[sequence])]
