"""Sequences with keys and values in a pool, for the checks of the kernels, and a reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.attention_plan import AttentionPlan, StepBatch
from pagekv.kernels.bench.machine import CudaMachine
from pagekv.kernels.bench.speed import upload
from pagekv.kernels.variants import Variant

LAYER, NUM_LAYERS = 1, 2
WINDOW, SOFT_CAP = 300, 20.0
SUBNORMAL = 2.0**-8
"""Below 2**-6 numbers of e4m3 are subnormal: multiples of 2**-9."""


@dataclass(frozen=True)
class Setup:
    """Parameters of a scene."""

    variant: Variant
    lengths: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    block_size: int = 16
    subnormal: bool = False
    """Keys and values are too small for normal fp8 numbers; queries are larger for it."""
    wgmma_prefill: bool = False
    """Prompts are multiplied by warpgroups."""
    decodes_only: bool = False
    """Too many sequences, or too long ones, for a reference of all their rows."""
    spare_blocks: int = 0
    """Blocks of no sequence, in front of all others: with many of them offsets into the pool are large."""

    def __str__(self) -> str:
        words = [str(self.variant)]
        if (self.num_heads, self.num_kv_heads) != (8, 2):
            words.append(f"{self.num_heads}/{self.num_kv_heads} heads")
        if self.block_size != 16:
            words.append(f"block size {self.block_size}")
        if self.subnormal:
            words.append("subnormals")
        if self.wgmma_prefill:
            words.append("by warpgroups")
        if self.decodes_only:
            words.append(f"{len(self.lengths)} decodes")
        if self.spare_blocks:
            words.append(f"behind {self.spare_blocks} blocks")
        return ", ".join(words)


class Scene:
    """Sequences of a setup, in scattered blocks of a pool that holds NaN in unwritten slots."""

    def __init__(self, machine: CudaMachine, setup: Setup) -> None:
        self.machine, self.setup = machine, setup
        self.lengths = np.array(setup.lengths, np.int32)
        self.first_rows = np.cumsum(self.lengths) - self.lengths  # of each sequence in `key`, `value` and `query`
        self.dtype, self.kv_dtype = getattr(torch, setup.variant.dtype), getattr(torch, setup.variant.kv_dtype)
        self.width = -(-int(self.lengths.max()) // setup.block_size)
        self.num_blocks = len(setup.lengths) * self.width
        self.generator = torch.Generator(machine.device).manual_seed(0)
        self.magnitude = SUBNORMAL if setup.subnormal else 1.0
        self.key, self.value = (self._random(setup.num_kv_heads, self.magnitude) for _ in range(2))
        self.query = self._random(setup.num_heads, 1 / self.magnitude)
        self.place(np.random.default_rng(0).permutation(self.num_blocks))

    def _random(self, heads: int, magnitude: float) -> torch.Tensor:
        """[rows of all sequences, heads, head_size]: normal numbers."""
        shape = (int(self.lengths.sum()), heads, self.setup.variant.head_size)
        made = torch.randn(shape, generator=self.generator, device=self.machine.device) * magnitude
        if self.kv_dtype.itemsize == 1:  # rounded to fp8, so that the reference sees the same numbers
            made = made.clamp(-448, 448).to(self.kv_dtype).float()
        return made.to(self.dtype)

    def sinks(self) -> torch.Tensor:
        """float32 [NUM_LAYERS, H]: a sink of each head, below and above usual logits; each layer has others."""
        of_layers = torch.arange(NUM_LAYERS, device=self.machine.device)[:, None]
        return torch.linspace(-2, 5, self.setup.num_heads, device=self.machine.device) - of_layers

    def place(self, blocks: np.ndarray) -> None:
        """A fresh pool of NaN, the sequences written into these blocks, of those behind the spare ones."""
        setup, variant = self.setup, self.setup.variant
        num_blocks = setup.spare_blocks + self.num_blocks
        shape = (num_blocks, NUM_LAYERS, 2, setup.block_size, setup.num_kv_heads, variant.head_size)
        size = int(np.prod(shape)) * variant.kv_element_bytes
        bits = torch.full((size,), 0xFF, dtype=torch.uint8, device=self.machine.device)  # NaN in every element type
        self.pool = bits.view(self.kv_dtype).view(shape)
        self.tables = (setup.spare_blocks + blocks.reshape(-1, self.width)).astype(np.int32)
        features: dict[str, Any] = {}
        if variant.features:
            features = {"windows": [WINDOW] * NUM_LAYERS, "soft_cap": SOFT_CAP, "sinks": self.sinks()}
        self.attention = PagedAttention(
            self.machine.launcher,
            self.pool,
            variant,
            num_heads=setup.num_heads,
            wgmma_prefill=setup.wgmma_prefill,
            **features,
        )
        plan, held = self.plan(range(len(self.lengths)), self.lengths, self.lengths, decode=False)
        self.attention.write(LAYER, self.key, self.value, plan)
        self.machine.synchronize()  # before `held` goes back to the allocator
        del held

    def plan(
        self, sequences: Sequence[int], counts: np.ndarray, contexts: np.ndarray, *, decode: bool | np.ndarray
    ) -> tuple[AttentionPlan, tuple[torch.Tensor, ...]]:
        """The plan for the last `counts` of the first `contexts` tokens of sequences, and the memory behind its
        addresses. `decode`: whether sequences are decodes, for all or for each."""
        batch = StepBatch(
            query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_lens=contexts.astype(np.int32),
            block_tables=self.tables[list(sequences)],
            decodes=np.full(len(counts), decode),
        )
        return upload(self.machine, self.attention, batch)

    def stored(self, sequence: int) -> torch.Tensor:
        """[length, 2, G, D]: a sequence's keys and values in the pool."""
        blocks = torch.from_numpy(self.tables[sequence].astype(np.int64)).to(self.pool.device)
        bits = self.pool.view(torch.uint8)[blocks, LAYER].view(self.kv_dtype)  # [blocks, 2, block_size, G, D]
        return bits.transpose(1, 2).flatten(0, 1)[: int(self.lengths[sequence])]

    def decode(self, sequences: Sequence[int]) -> torch.Tensor:
        """[n, H, D]: the last token of each sequence."""
        return self._run(*self.decode_step(sequences))

    def decode_step(self, sequences: Sequence[int]) -> tuple[Callable[[], None], torch.Tensor]:
        """A function that enqueues the attention of each sequence's last token, and its output: [n, H, D]."""
        chosen = list(sequences)
        last = torch.from_numpy((self.first_rows + self.lengths)[chosen] - 1).to(self.machine.device)
        return self._step(self.query[last], chosen, np.ones(len(chosen), np.int32), self.lengths[chosen], decode=True)

    def prefill(self, sequence: int, start: int, stop: int) -> torch.Tensor:
        """[stop - start, H, D]: rows of one sequence's prompt, behind its first `start` tokens."""
        first = int(self.first_rows[sequence])
        counts, contexts = (np.array([count], np.int32) for count in (stop - start, stop))
        query = self.query[first + start : first + stop]
        return self._run(*self._step(query, [sequence], counts, contexts, decode=False))

    def decode_beside_prefill(self, sequence: int, start: int) -> torch.Tensor:
        """[1 + length - start, H, D]: in one step the last token of a sequence as a decode, and as rows of a prompt
        those from position `start` on."""
        first, length = int(self.first_rows[sequence]), int(self.lengths[sequence])
        query = self.query[first + start : first + length]
        counts, contexts = np.array([1, length - start], np.int32), np.array([length, length], np.int32)
        decode = np.array([True, False])
        return self._run(*self._step(torch.cat([query[-1:], query]), [sequence] * 2, counts, contexts, decode=decode))

    def _step(
        self,
        query: torch.Tensor,
        sequences: Sequence[int],
        counts: np.ndarray,
        contexts: np.ndarray,
        *,
        decode: bool | np.ndarray,
    ) -> tuple[Callable[[], None], torch.Tensor]:
        plan, held = self.plan(sequences, counts, contexts, decode=decode)
        out = torch.full_like(query, torch.nan)

        def attend(held: tuple[torch.Tensor, ...] = held) -> None:  # keeps the memory as long as the function
            self.attention.attend(LAYER, query, out, plan)

        return attend, out

    def _run(self, attend: Callable[[], None], out: torch.Tensor) -> torch.Tensor:
        attend()
        self.machine.synchronize()
        return out

    def expected(self, sequence: int, start: int) -> torch.Tensor:
        """[length - start, H, D] in float64: the rows of one sequence from position `start` on."""
        setup = self.setup
        first, length = int(self.first_rows[sequence]), int(self.lengths[sequence])
        group = setup.num_heads // setup.num_kv_heads
        query = self.query[first + start : first + length].double()
        key, value = (
            tensor[first : first + length].double().repeat_interleave(group, 1) for tensor in (self.key, self.value)
        )
        logits = torch.einsum("qhd,khd->hqk", query, key) / setup.variant.head_size**0.5
        if setup.variant.features:
            logits = SOFT_CAP * torch.tanh(logits / SOFT_CAP)
        position = torch.arange(length, device=query.device)
        hidden = position[None, :] > position[start:, None]
        if setup.variant.features:
            hidden = hidden | (position[None, :] <= position[start:, None] - WINDOW)
        logits = logits.masked_fill(hidden, -torch.inf)
        if setup.variant.features:
            sinks = self.sinks()[LAYER].double()[:, None, None].expand(*logits.shape[:2], 1)
            logits = torch.cat([logits, sinks], 2)
        return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[:, :, :length], value)

    def expected_last(self) -> torch.Tensor:
        """[n, H, D] in float64: the last token of every sequence."""
        return torch.cat([self.expected(s, int(length) - 1) for s, length in enumerate(self.lengths)])
