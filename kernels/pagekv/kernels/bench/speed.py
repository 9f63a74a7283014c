"""Speed of the kernels, over a pool in the arena and set up as in an executor, beside the card's copy bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.attention_plan import AttentionPlan, StepBatch
from pagekv.kernels.bench.machine import Arena, CudaMachine, KernelTiming
from pagekv.kernels.bench.report import Row
from pagekv.kernels.bench.workload import (
    GIB,
    HEAD_SIZE,
    MIB,
    MIN_LAYERS,
    NUM_LAYERS,
    AttentionCase,
    BlockCopyCase,
    WriteCase,
)
from pagekv.kernels.prefill_plan import PrefillWork
from pagekv.kernels.variants import Variant

COLD_BYTES = 1 * GIB
"""Memory that the rounds of a measurement read before they read the same again: many times the largest L2 cache."""
TARGET_BYTES = 4 * GIB
"""Least bytes that the rounds of one graph read: about a millisecond, so that the graph's start does not count."""
PREFILL_ROUNDS = 4


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
    """Rounds of one graph."""
    held: tuple[torch.Tensor, ...]
    """Tensors that the plan has addresses of."""
    fewer_bytes: float
    """How many times as many keys decodes would read if they shared no reads."""
    prompts: PrefillWork
    """The prefill items of a layer that sees all keys."""

    def attend(self, index: int) -> None:
        """Enqueues round `index`: attention of the whole batch on one layer, into `out`."""
        self.attention.attend(index % self.num_layers, self.query, self.out, self.plan)


def layers_and_rounds(kv_bytes: int, room: int, most: int) -> tuple[int, int]:
    """The number of layers that the rounds of a graph use in turn, and the number of rounds. `kv_bytes`: keys and
    values of one layer. `room`: bytes for all layers. `most`: the most rounds, and the most layers.

    A round must not find the keys of an earlier round in the cache, so the layers together have COLD_BYTES, and there
    are at least MIN_LAYERS. A graph must take about a millisecond, so it reads TARGET_BYTES. `most` and `room` may
    allow less.
    """
    layers = max(1, min(most, room // kv_bytes, max(MIN_LAYERS, -(-COLD_BYTES // kv_bytes))))
    wanted = max(layers, -(-TARGET_BYTES // kv_bytes))
    return layers, max(1, min(most, -(-wanted // layers) * layers))


def upload(
    machine: CudaMachine, attention: PagedAttention, batch: StepBatch
) -> tuple[AttentionPlan, tuple[torch.Tensor, ...]]:
    """The batch's plan on the device, and the memory behind its addresses."""
    plan = attention.planner.step(batch)
    words = torch.from_numpy(plan.words).to(machine.device)
    size = max(16, attention.scratch_bytes(plan.counts["num_partials"]))
    scratch = torch.empty(size, dtype=torch.uint8, device=machine.device)
    return plan.bind(words.data_ptr(), scratch.data_ptr()), (words, scratch)


def paged(
    machine: CudaMachine,
    arena: Arena,
    case: AttentionCase,
    *,
    num_layers: int = 0,
    scattered: bool = True,
    wgmma_prefill: bool = False,
) -> Paged:
    """The batch of a case. `num_layers`: of the pool; 0: as many as `layers_and_rounds` says. `scattered`: blocks in
    random order, else each sequence's blocks in order and side by side. `wgmma_prefill`: as for `PagedAttention`.
    """
    variant = Variant("bfloat16", case.kv_dtype, HEAD_SIZE)
    num_blocks, rows = case.num_blocks, case.batch * case.new
    slab = 2 * case.block_size * case.heads.num_kv_heads * HEAD_SIZE * variant.kv_element_bytes
    layers, rounds = layers_and_rounds(num_blocks * slab, arena.size, machine.most_rounds)
    layers = num_layers or layers
    kv_dtype = getattr(torch, case.kv_dtype)
    pool = arena.view(kv_dtype, num_blocks, layers, 2, case.block_size, case.heads.num_kv_heads, HEAD_SIZE)
    blocks = np.random.default_rng(0).permutation(num_blocks) if scattered else np.arange(num_blocks)
    attention = PagedAttention(
        machine.launcher, pool, variant, num_heads=case.heads.num_heads, wgmma_prefill=wgmma_prefill
    )
    step = StepBatch(
        query_start=np.arange(0, rows + 1, case.new, dtype=np.int32),
        context_lens=case.contexts,
        block_tables=case.tables(blocks),
        decodes=np.full(case.batch, case.new == 1),
    )
    query = torch.randn(rows, case.heads.num_heads, HEAD_SIZE, device=machine.device).to(torch.bfloat16)
    bound, held = upload(machine, attention, step)
    rounds = max(rounds, layers) if case.new == 1 else min(layers, PREFILL_ROUNDS)
    work = attention.planner.decodes(step)
    apart = work.num_splits and int(case.contexts.sum()) / max(work.keys_read, 1)
    out, prompts = torch.empty_like(query), attention.planner.prefills(step)
    return Paged(attention, bound, query, out, layers, rounds, (*held, pool), apart, prompts)


def copy_bandwidth(machine: CudaMachine, arena: Arena) -> float:
    """GB/s of a device to device copy, bytes read and written both counted: the most that memory delivers."""
    half = min(arena.size // 2, 1024 * MIB) // 16 * 16
    memory = arena.view(torch.uint8, 2 * half)
    took = machine.timed(lambda _: memory[half:].copy_(memory[:half]), 4)
    return 2 * half / took.seconds / 1e9


def memory_row(case: AttentionCase | WriteCase | BlockCopyCase, timing: KernelTiming, bandwidth: float) -> Row:
    """A case's time beside the least that its bytes take at the bandwidth of a copy, in GB/s."""
    gb_per_s = case.bytes / timing.seconds / 1e9
    return {
        "case": str(case),
        **timing.columns(),
        "floor_microseconds": case.bytes / bandwidth / 1e3,
        "gb_per_s": gb_per_s,
        "share_of_copy": gb_per_s / bandwidth,
    }


def attention_row(machine: CudaMachine, arena: Arena, case: AttentionCase, bandwidth: float) -> Row:
    """A decode or prefill case over scattered blocks. Decodes are bound by bytes, prompts by operations."""
    batch = paged(machine, arena, case)
    timing = machine.timed(batch.attend, batch.num_rounds)
    row = memory_row(case, timing, bandwidth)
    if case.shared:
        row["times_fewer_bytes"] = batch.fewer_bytes
    if case.new > 1:
        work, heads = batch.prompts, case.heads
        row["tflop_per_s"] = case.flops / timing.seconds / 1e12
        row["thread_blocks"] = work.walks * heads.num_kv_heads
        row["partial_mib"] = work.partial_bytes(heads.num_heads, HEAD_SIZE) / MIB
    return row


def write_row(machine: CudaMachine, arena: Arena, case: WriteCase, bandwidth: float) -> Row:
    """Cache write; each token is a sequence of its own, so that slots are scattered."""
    batch = paged(machine, arena, AttentionCase(case.heads, case.tokens, 16))
    shape = (case.tokens, case.heads.num_kv_heads, HEAD_SIZE)
    key, value = (torch.randn(shape, device=machine.device).to(torch.bfloat16) for _ in range(2))

    def write(index: int) -> None:
        batch.attention.write(index % batch.num_layers, key, value, batch.plan)

    return memory_row(case, machine.timed(write, batch.num_rounds), bandwidth)


def block_copy_row(machine: CudaMachine, arena: Arena, case: BlockCopyCase, bandwidth: float) -> Row:
    """Copies between random blocks of one pool."""
    batch = paged(machine, arena, AttentionCase(case.heads, 2 * case.blocks, 16), num_layers=NUM_LAYERS)
    pairs = torch.randperm(2 * case.blocks, device=machine.device).to(torch.int32).view(case.blocks, 2)
    return memory_row(case, machine.timed(lambda _: batch.attention.copy_blocks(pairs), 4), bandwidth)
