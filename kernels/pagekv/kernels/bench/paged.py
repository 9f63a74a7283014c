"""The kernels over a pool in the arena, set up as in an executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pagekv.kernels.attention import PagedAttention, Rope
from pagekv.kernels.attention_plan import AttentionPlan, HostPlan, StepBatch, plan_step
from pagekv.kernels.bench.machine import COLD_BYTES, TARGET_BYTES, Arena, CudaMachine
from pagekv.kernels.bench.workload import BLOCK_SIZE, HEAD_SIZE, MIN_LAYERS, Heads
from pagekv.kernels.launcher import Launcher
from pagekv.kernels.variants import Variant

VARIANT = Variant("bfloat16", "bfloat16", HEAD_SIZE)


@dataclass(frozen=True)
class Rounds:
    """Runs of a case in one graph, and the layers that they take turns on.

    A round must not find the keys of an earlier one in the cache, so the layers together have COLD_BYTES and are never
    fewer than MIN_LAYERS. A graph must take about a millisecond, so it reads TARGET_BYTES.
    """

    layers: int
    count: int

    @classmethod
    def of(cls, kv_bytes: int, room: int, most: int) -> Rounds:
        """`kv_bytes`: of one layer. `room`: bytes for all layers. `most`: rounds of a graph, and layers."""
        layers = max(1, min(most, room // kv_bytes, max(MIN_LAYERS, -(-COLD_BYTES // kv_bytes))))
        wanted = max(layers, -(-TARGET_BYTES // kv_bytes))
        return cls(layers, max(1, min(most, -(-wanted // layers) * layers)))


@dataclass
class Paged:
    """One step's batch, ready to be attended to on any of several layers."""

    attention: PagedAttention
    plan: AttentionPlan
    query: torch.Tensor
    out: torch.Tensor
    num_layers: int
    """Rounds use layers in turn."""
    num_rounds: int
    """Of one graph."""
    held: tuple[torch.Tensor, ...]
    """Tensors that the plan has addresses of."""

    def attend(self, index: int) -> None:
        """Enqueues round `index`: attention of the whole batch on one layer, into `out`."""
        self.attention.attend(index % self.num_layers, self.query, self.out, self.plan)

    def write(self, key: torch.Tensor, value: torch.Tensor, rope: Rope | None) -> Callable[[int], object]:
        """A round that writes `key` and `value` and rotates the queries."""
        query = self.query if rope else None

        def run(index: int) -> None:
            self.attention.write(index % self.num_layers, key, value, self.plan, rope=rope, query=query)

        return run


def upload(
    machine: CudaMachine, attention: PagedAttention, plan: HostPlan
) -> tuple[AttentionPlan, tuple[torch.Tensor, ...]]:
    """The plan on the device, and the memory behind its addresses."""
    words = torch.from_numpy(plan.words).to(machine.device)
    size = max(16, attention.scratch_bytes(plan.counts["num_partials"]))
    scratch = torch.empty(size, dtype=torch.uint8, device=machine.device)
    return plan.bind(words.data_ptr(), scratch.data_ptr()), (words, scratch)


def ragged_lengths(batch: int, context: int, seed: int = 0) -> np.ndarray:
    """[batch]: contexts from 1 to twice the average, in random order."""
    lengths = np.linspace(1, 2 * context, batch).astype(np.int32)
    return np.random.default_rng(seed).permutation(lengths)


def paged(
    machine: CudaMachine,
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
    launcher: Launcher | None = None,
) -> Paged:
    """A batch of equal sequences (or of `lengths` visible tokens each), their last `new` tokens being the step's.

    `scattered`: blocks in random order, else each sequence's blocks in order and side by side. `num_layers`: of the
    pool, default as many as `Rounds` says. `launcher`: default the machine's.
    """
    contexts = np.full(batch, context, np.int32) if lengths is None else lengths.astype(np.int32)
    width = -(-int(contexts.max()) // block_size)
    num_blocks = batch * width
    slab = 2 * block_size * heads.num_kv_heads * variant.head_size * variant.kv_element_bytes
    rounds = Rounds.of(num_blocks * slab, arena.size, machine.most_rounds)
    layers = num_layers or rounds.layers
    dtype, kv_dtype = getattr(torch, variant.dtype), getattr(torch, variant.kv_dtype)
    pool = arena.view(kv_dtype, num_blocks, layers, 2, block_size, heads.num_kv_heads, variant.head_size)
    blocks = np.random.default_rng(seed).permutation(num_blocks) if scattered else np.arange(num_blocks)
    attention = PagedAttention(launcher or machine.launcher, pool, variant, num_heads=heads.num_heads)
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
    shape = (batch * new, heads.num_heads, variant.head_size)
    generator = torch.Generator(machine.device).manual_seed(seed)
    query = torch.randn(shape, generator=generator, device=machine.device).to(dtype)
    out = torch.empty(shape, dtype=dtype, device=machine.device)
    bound, held = upload(machine, attention, plan)
    return Paged(attention, bound, query, out, layers, max(rounds.count, layers), (*held, pool))
