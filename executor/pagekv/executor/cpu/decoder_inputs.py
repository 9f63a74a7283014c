"""The inputs of a step of `FusedDecoder`: all that differs between steps, in tensors that compiled loops read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagekv.executor.cpu.attention_plan import CpuAttentionPlan, StepRows
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native.step_attention import least_runs
from pagekv.executor.cpu.paged_reads import PagedReads, paged_reads
from pagekv.executor.cpu.rotations import Rotations, StepRotations

# The most rows of a step that is recorded.
RECORDED_ROWS = 64


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """Inputs of a step with T rows, of which S are sampled.

    token_ids: of each row, `[T]`
    rotations: of the rows
    places: where a layer's pool takes the keys and values of each row, an offset in elements, `[T]`
    windows: the window of each layer
    reads: by window
    sampled: the numbers `[S]` of the sampled rows and their reads in the last layer; None if all rows are sampled
    """

    token_ids: torch.Tensor
    rotations: StepRotations
    places: torch.Tensor
    windows: list[int | None]
    reads: dict[int | None, PagedReads]
    sampled: tuple[torch.Tensor, PagedReads] | None

    @property
    def is_recordable(self) -> bool:
        """Whether a step of this shape is likely to come again: few rows, all of them sampled decodes."""
        decodes = all(reads.chunks is None for reads in self.reads.values())
        return decodes and self.sampled is None and len(self.token_ids) <= RECORDED_ROWS

    @property
    def shape(self) -> tuple[object, ...]:
        """Two inputs with equal shapes differ only in the content of their tensors."""
        reads = ((window, self.reads[window].shape) for window in {*self.windows})
        return len(self.token_ids), self.rotations.fixed, *self.windows, *reads

    def copy_(self, other: DecoderInputs) -> None:
        """Copies the content of other inputs, which have the same shape."""
        self.token_ids.copy_(other.token_ids)
        self.rotations.copy_(other.rotations)
        self.places.copy_(other.places)
        for window, reads in self.reads.items():
            reads.copy_(other.reads[window])

    def advance(self, plan: CpuAttentionPlan, cache: KvCache, rotations: Rotations) -> bool:
        """Turns recordable inputs, those of the plan before it last advanced, into those of the plan. False if there
        is no room for them; then the inputs are of no more use.
        """
        self.token_ids.numpy()[:] = plan.input_ids.numpy()[0]
        _write_places(plan, cache, self.places.numpy())
        return rotations.advance(self.rotations, plan.longest) and all(
            reads.advance(plan.step, plan.entered, cache.block_size, window) for window, reads in self.reads.items()
        )


def decoder_inputs(
    plan: CpuAttentionPlan,
    cache: KvCache,
    windows: list[int | None],
    rotations: Rotations,
    num_heads: int,
    num_kv_heads: int,
) -> DecoderInputs:
    """`windows`: the window of each layer in this step."""
    count = plan.input_ids.shape[1]

    def reads(step: StepRows, window: int | None) -> PagedReads:
        return paged_reads(step, cache.block_size, window, num_heads // num_kv_heads, least_runs(num_kv_heads))

    places = np.empty(count, np.int64)
    _write_places(plan, cache, places)
    sampled = None
    if len(plan.sampling) < count:
        sampled = (
            torch.tensor([row for row, _ in plan.sampling], dtype=torch.int64),
            reads(plan.sampled, windows[-1]),
        )
    return DecoderInputs(
        # The plan changes its own ids when it advances.
        plan.input_ids[0].clone(),
        rotations.of(plan.position_ids),
        torch.from_numpy(places),
        windows,
        {each: reads(plan.step, each) for each in {*windows}},
        sampled,
    )


def _write_places(plan: CpuAttentionPlan, cache: KvCache, places: np.ndarray) -> None:
    keys, _ = cache.layer(0)
    blocks, offsets = (each.numpy() for each in plan.slots)
    np.multiply(blocks, keys.stride(0), out=places)
    places += offsets * keys.stride(1)
