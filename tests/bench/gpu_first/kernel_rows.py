"""Rows beside those of the users' bench: layouts of real pools, what a block table costs, RoPE, torch's attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_first.floors import SMALL, decode_floor, plain
from gpu_first.machine import FirstMachine
from pagekv.kernels.bench import workload
from pagekv.kernels.bench.machine import Arena, CudaMachine, KernelTiming
from pagekv.kernels.bench.report import Row
from pagekv.kernels.bench.speed import (
    PREFILL_ROUNDS,
    layers_and_rounds,
    memory_row,
    paged,
)
from pagekv.kernels.bench.workload import (
    BLOCK_SIZE,
    ELEMENT_BYTES,
    GQA4,
    HEAD_SIZE,
    MIN_LAYERS,
    AttentionCase,
    WriteCase,
)

FP8 = "float8_e4m3fn"
# Backends of torch's attention as peers, with the names of their columns. By itself torch chooses by its version and
# the GPU: cuDNN on Hopper, where that is new enough.
FLASH, CUDNN = ("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)

TABLE_READ = "? table[first + i] : 0"
TABLE_COMPUTED = "? (i32)(table - p.block_tables) + first + i : 0"


@dataclass(frozen=True)
class LayoutCase(AttentionCase):
    """A decode as real pools and loads have it."""

    ragged: bool = False
    """Contexts from 1 to twice the average, as in a real load."""
    pool_layers: int = 0
    """Layers of the pool, block-major as in the executor: blocks of one layer are that many slabs apart. 0: as few as
    keep the cache cold."""

    @property
    def contexts(self) -> np.ndarray:
        """As `AttentionCase.contexts`, in random order."""
        if not self.ragged:
            return super().contexts
        lengths = np.linspace(1, 2 * self.context, self.batch).astype(np.int32)
        return np.random.default_rng(0).permutation(lengths)

    @property
    def pool_bytes(self) -> int:
        """As `AttentionCase.pool_bytes`."""
        return max(self.pool_layers, MIN_LAYERS) * self.kv_bytes * (2 if self.ragged else 1)

    def __str__(self) -> str:
        words = [super().__str__()]
        words += ["ragged"] if self.ragged else []
        words += [f"{self.pool_layers} layers"] if self.pool_layers else []
        return ", ".join(words)


def layout_cases() -> list[AttentionCase]:
    """The executor's layout of a pool, 32 layers block-major (the second pool has 64 GiB); unequal contexts; and what
    the users' bench has beside plain shapes: fp8, other block sizes.
    """
    layers = [LayoutCase(GQA4, 64, context, pool_layers=32) for context in (1024, 8192)]
    ragged = [LayoutCase(GQA4, batch, 4096, ragged=True) for batch in (64, 256)]
    return [*layers, *ragged, *(case for case in workload.decode_cases() if not plain(case))]


def without_table(text: str) -> str:
    """Both decode kernels' texts with block ids computed instead of read: attention over contiguous memory, whose
    blocks lie in order. Other kernels' texts are returned as they are. Raises ValueError where the text is not as
    expected.
    """
    if not any(f"{kernel}(" in text for kernel in ("pagekv_decode", "pagekv_decode_wide")):
        return text
    if TABLE_READ not in text:
        raise ValueError(f"the decode kernel has no {TABLE_READ!r} any more")
    return text.replace(TABLE_READ, TABLE_COMPUTED)


def decode_timing(machine: CudaMachine, arena: Arena, case: AttentionCase, *, scattered: bool = True) -> KernelTiming:
    """Time of one layer."""
    layers = case.pool_layers if isinstance(case, LayoutCase) else 0
    batch = paged(machine, arena, case, num_layers=layers, scattered=scattered)
    return machine.timed(batch.attend, batch.num_rounds)


def decode_row(machine: FirstMachine, arena: Arena, case: AttentionCase, bandwidth: float) -> Row:
    """One decode case: scattered blocks; where paging is judged, without a block table too; torch over contiguous
    memory; and in the executor's layout, the same work in a compact pool.
    """
    timing = decode_timing(machine, arena, case)
    row = memory_row(case, timing, bandwidth)
    counts = {floor: row["share_of_copy"]} if (floor := decode_floor(case)) else {}
    if plain(case) and case.batch >= 64 and case.kv_bytes >= SMALL:  # bound by memory, beside which noise is small
        unpaged = decode_timing(machine.edited(without_table), arena, case, scattered=False)
        counts["paged"] = row["against_no_table"] = unpaged.seconds / timing.seconds
    if case.kv_dtype == FP8 and case.batch >= 64 and case.kv_bytes >= SMALL:
        counts["decode fp8"] = row["share_of_copy"]
    if isinstance(case, LayoutCase) and case.pool_layers:
        compact = decode_timing(machine, arena, AttentionCase(case.heads, case.batch, case.context))
        counts["layers"] = row["against_compact"] = compact.seconds / timing.seconds
    if plain(case):
        row |= against("flash", timing.seconds, partial(sdpa_seconds, machine, arena, FLASH[1], case))
    return {**row, "counts_for": counts}


def prefill_row(machine: CudaMachine, arena: Arena, case: AttentionCase) -> Row:
    """One prefill case, and torch over contiguous memory: by FlashAttention, the peer, and by cuDNN. Prompts of 4k
    count for the floor.
    """
    batch, cached = paged(machine, arena, case), case.context - case.new
    timing = machine.timed(batch.attend, batch.num_rounds)
    row = {"case": str(case), "new": case.new, "cached": cached, **timing.columns()}
    row["tflop_per_s"] = case.flops / timing.seconds / 1e12
    # For a chunk behind a prefix, cuDNN would be timed with a dense mask that torch builds.
    for name, backend in (FLASH,) if cached else (FLASH, CUDNN):
        row |= against(name, timing.seconds, partial(sdpa_seconds, machine, arena, backend, case))
    return {**row, "counts_for": {"prefill": row["against_flash"]} if (case.new, cached) == (4096, 0) else {}}


def wgmma_row(machine: CudaMachine, arena: Arena, case: AttentionCase) -> Row:
    """One prefill case by the kernel of warpgroups, beside the other kernel."""
    seconds, columns = {}, {}
    for by_warpgroups in (False, True):
        batch = paged(machine, arena, case, wgmma_prefill=by_warpgroups)
        timing = machine.timed(batch.attend, batch.num_rounds)
        seconds[by_warpgroups], columns = timing.seconds, timing.columns()
    row = {"case": str(case), "new": case.new, "cached": case.context - case.new, **columns}
    row["tflop_per_s"] = case.flops / seconds[True] / 1e12
    return {**row, "against_mma": seconds[False] / seconds[True]}


@dataclass(frozen=True)
class RopeWriteCase(WriteCase):
    """A cache write that rotates keys on the way and queries in place."""

    @property
    def bytes(self) -> int:
        """Read and written, the queries too."""
        return super().bytes + 2 * self.tokens * self.heads.num_heads * HEAD_SIZE * ELEMENT_BYTES

    def __str__(self) -> str:
        return f"{super().__str__()}, RoPE"


def rope_write_row(machine: CudaMachine, arena: Arena, case: RopeWriteCase, bandwidth: float) -> Row:
    """As `write_row`."""
    write, rounds = rope_write(machine, arena, case)
    return memory_row(case, machine.timed(write, rounds), bandwidth)


def rope_write(machine: CudaMachine, arena: Arena, case: RopeWriteCase) -> tuple[Callable[[int], object], int]:
    """A round of a cache write with RoPE, and the number of rounds of a graph. Each token is a sequence of its own."""
    batch = paged(machine, arena, AttentionCase(case.heads, case.tokens, BLOCK_SIZE))
    shape = (case.tokens, case.heads.num_kv_heads, HEAD_SIZE)
    key, value = (torch.randn(shape, device=machine.device).to(torch.bfloat16) for _ in range(2))
    table = torch.ones(64, HEAD_SIZE, device=machine.device)

    def write(index: int) -> None:
        batch.attention.write(index % batch.num_layers, key, value, batch.plan, query=batch.query, rope=table)

    return write, batch.num_rounds


def sdpa_seconds(machine: CudaMachine, arena: Arena, backend: SDPBackend, case: AttentionCase) -> float:
    """torch's attention at the same shape, over its best layout: keys and values contiguous for each head."""
    # Here, because it imports torch's compiler: two seconds of CPU time, which every other step would wait for.
    from torch.nn.attention.bias import causal_lower_right

    heads, new, context = case.heads, case.new, case.context
    layers, rounds = layers_and_rounds(case.kv_bytes, arena.size, machine.most_rounds)
    cache = arena.view(torch.bfloat16, layers, 2, case.batch, heads.num_kv_heads, context, HEAD_SIZE)
    query = torch.randn(case.batch, heads.num_heads, new, HEAD_SIZE, device=machine.device).to(torch.bfloat16)
    grouped = heads.num_heads != heads.num_kv_heads
    # A single query sees everything; a whole prompt is causal; a chunk behind a prefix is causal from the lower right.
    mask = causal_lower_right(new, context) if 1 < new < context else None

    def run(index: int) -> None:
        key, value = cache[index % layers]
        with sdpa_kernel(backend):
            scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=1 < new == context, enable_gqa=grouped
            )

    return machine.timed(run, rounds if new == 1 else min(layers, PREFILL_ROUNDS)).seconds


def against(peer: str, ours: float, measure: Callable[[], float]) -> Row:
    """Speed in multiples of a peer's; for a peer that fails, the reason. Raises RuntimeError for a fault of the device,
    after which the process cannot use it.
    """
    try:
        return {f"against_{peer}": measure() / ours}
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        if is_fault(error):
            raise
        return {f"against_{peer}": None, f"{peer}_failed": (str(error) or type(error).__name__).splitlines()[0][:200]}


def is_fault(error: Exception) -> bool:
    """Whether it is an error of the device, which is lost to this process, and none of what a recording may have."""
    return "CUDA error" in str(error) and "captur" not in str(error)
