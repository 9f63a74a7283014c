"""The kernels over a pool cut from the arena, set up as an executor would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pagekv.kernels.attention import PagedAttention, Rope
from pagekv.kernels.bench.machine import COLD_BYTES, Arena, Machine
from pagekv.kernels.bench.workload import BLOCK_SIZE, HEAD_SIZE, Heads
from pagekv.kernels.step_plan import StepBatch, StepPlan, plan_step
from pagekv.kernels.variants import Variant

VARIANT = Variant("bfloat16", "bfloat16", HEAD_SIZE)
MOST_LAYERS = 64


@dataclass
class Paged:
    """One step's batch, ready to be attended to on any of several layers."""

    attention: PagedAttention
    plan: StepPlan
    query: torch.Tensor
    out: torch.Tensor
    num_layers: int
    """Rounds use layers in turn, so that no round finds its keys in the cache of the one before."""
    held: tuple[torch.Tensor, ...]
    """What the plan has addresses of."""

    def attend(self, index: int) -> None:
        self.attention.attend(index % self.num_layers, self.query, self.out, self.plan)

    def write(self, key: torch.Tensor, value: torch.Tensor, rope: Rope | None) -> Callable[[int], object]:
        """A round that writes `key` and `value` and rotates the queries."""
        query = self.query if rope else None

        def run(index: int) -> None:
            self.attention.write(index % self.num_layers, key, value, self.plan, rope=rope, query=query)

        return run


def layers_for(kv_bytes: int, room: int) -> int:
    """Layers of `kv_bytes` each, so that together they are cold; as many as there is room for."""
    return max(1, min(MOST_LAYERS, -(-COLD_BYTES // kv_bytes), room // kv_bytes))


def paged(
    machine: Machine,
    arena: Arena,
    heads: Heads,
    *,
    batch: int,
    context: int,
    new: int = 1,
    decode: bool = True,
    scattered: bool = True,
    variant: Variant = VARIANT,
    block_size: int = BLOCK_SIZE,
    lengths: np.ndarray | None = None,
    seed: int = 0,
    num_layers: int | None = None,
) -> Paged:
    """A batch of equal sequences (or of `lengths` visible tokens each), their last `new` tokens being the step's.

    `scattered`: blocks in random order, else each sequence's blocks in order and side by side.
    """
    contexts = np.full(batch, context, np.int32) if lengths is None else lengths.astype(np.int32)
    width = -(-int(contexts.max()) // block_size)
    num_blocks = batch * width
    slab = 2 * block_size * heads.num_kv_heads * variant.head_size * variant.kv_element_bytes
    layers = num_layers or layers_for(num_blocks * slab, arena.size)
    dtype, kv_dtype = getattr(torch, variant.dtype), getattr(torch, variant.kv_dtype)
    pool = arena.view(kv_dtype, num_blocks, layers, 2, block_size, heads.num_kv_heads, variant.head_size)
    blocks = np.random.default_rng(seed).permutation(num_blocks) if scattered else np.arange(num_blocks)
    attention = PagedAttention(machine.launcher, pool, variant, num_heads=heads.num_heads)
    plan = plan_step(
        StepBatch(
            query_start=np.arange(batch + 1, dtype=np.int32) * new,
            context_lens=contexts,
            block_tables=blocks.reshape(batch, width).astype(np.int32),
            decodes=np.full(batch, decode),
        ),
        num_blocks=num_blocks,
        block_size=block_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        variant=variant,
    )
    words = torch.from_numpy(plan.words).to(machine.device)
    scratch = torch.empty(
        max(16, attention.scratch_bytes(plan.counts["num_partials"])), dtype=torch.uint8, device=machine.device
    )
    shape = (batch * new, heads.num_heads, variant.head_size)
    generator = torch.Generator(machine.device).manual_seed(seed)
    query = torch.randn(shape, generator=generator, device=machine.device).to(dtype)
    out = torch.empty(shape, dtype=dtype, device=machine.device)
    bound = plan.bind(words.data_ptr(), scratch.data_ptr())
    return Paged(attention, bound, query, out, layers, (words, scratch, pool))
