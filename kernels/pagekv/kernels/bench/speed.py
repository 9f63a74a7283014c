"""Speed of the kernels, and of torch's attention over contiguous keys and values, on the same card in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pagekv.kernels.attention import Rope
from pagekv.kernels.bench.machine import Arena, CudaMachine, KernelTiming
from pagekv.kernels.bench.paged import VARIANT, Paged, Rounds, paged, ragged_lengths
from pagekv.kernels.bench.workload import (
    BLOCK_SIZE,
    COMPACT_CASES,
    HEAD_SIZE,
    MIB,
    BlockCopyCase,
    DecodeCase,
    Heads,
    PrefillCase,
    WriteCase,
    counts_for_paging,
)
from pagekv.kernels.variants import Variant

Row = dict[str, Any]

# Backends of torch's attention as peers, with the names of their columns. By itself torch chooses by its version and
# the GPU: cuDNN on Hopper, where that is new enough.
FLASH, CUDNN = ("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)

TABLE_READ = "max(table[first + i], 0)"
TABLE_COMPUTED = "(i32)(table - p.block_tables) + first + i"


def without_table(text: str) -> str:
    """The decode kernel's text with block ids computed instead of read: attention over contiguous memory, whose blocks
    lie in order. Other kernels' texts are returned as they are. Raises ValueError where the text is not as expected.
    """
    if "pagekv_decode(" not in text:
        return text
    if TABLE_READ not in text:
        raise ValueError(f"the decode kernel has no {TABLE_READ!r} any more")
    return text.replace(TABLE_READ, TABLE_COMPUTED)


def copy_bandwidth(machine: CudaMachine, arena: Arena) -> float:
    """GB/s of a device to device copy, bytes read and written both counted: the most that memory delivers."""
    half = min(arena.size // 2, 1024 * MIB) // 16 * 16
    memory = arena.view(torch.uint8, 2 * half)
    took = machine.timed(lambda _: memory[half:].copy_(memory[:half]), 4)
    return 2 * half / took.seconds / 1e9


def decode_row(machine: CudaMachine, arena: Arena, case: DecodeCase, bandwidth: float) -> Row:
    """One decode case: scattered blocks; where paging is judged, without a block table too; torch over contiguous
    memory; and in the executor's layout, the same work in a compact pool.
    """
    timing = decode_timing(machine, arena, case)
    gb_per_s = case.bytes / timing.seconds / 1e9
    row = {
        "case": case.name,
        "batch": case.batch,
        "context": case.context,
        **timing.columns(),
        "gb_per_s": gb_per_s,
        "share_of_copy": gb_per_s / bandwidth,
    }
    if counts_for_paging(case):
        plain = decode_timing(machine, arena, case, scattered=False, launcher=machine.edited(without_table))
        row["against_no_table"] = plain.seconds / timing.seconds
    if case in COMPACT_CASES:
        row["against_compact"] = decode_timing(machine, arena, COMPACT_CASES[case]).seconds / timing.seconds
    if case.plain:
        row |= against(
            "flash",
            timing.seconds,
            lambda: sdpa_timing(machine, arena, FLASH[1], case.heads, case.batch, 1, case.context).seconds,
        )
    return row


def decode_timing(machine: CudaMachine, arena: Arena, case: DecodeCase, **options: Any) -> KernelTiming:
    """`options` as of `paged`."""
    batch = decode_batch(machine, arena, case, **options)
    return machine.timed(batch.attend, batch.num_rounds)


def decode_batch(machine: CudaMachine, arena: Arena, case: DecodeCase, **options: Any) -> Paged:
    """The batch of a decode case."""
    return paged(
        machine,
        arena,
        case.heads,
        batch=case.batch,
        context=case.context,
        block_size=case.block_size,
        variant=Variant("bfloat16", case.kv_dtype, HEAD_SIZE) if case.kv_dtype != VARIANT.kv_dtype else VARIANT,
        lengths=ragged_lengths(case.batch, case.context) if case.ragged else None,
        num_layers=case.pool_layers or None,
        **options,
    )


def prefill_row(machine: CudaMachine, arena: Arena, case: PrefillCase) -> Row:
    """One prefill case, and torch over contiguous memory: by FlashAttention, the peer, and by cuDNN."""
    batch = prefill_batch(machine, arena, case)
    timing = machine.timed(batch.attend, min(batch.num_layers, PREFILL_ROUNDS))
    row = {
        "case": case.name,
        "new": case.new,
        "cached": case.cached,
        **timing.columns("milliseconds", 1e3),
        "tflop_per_s": case.flops / timing.seconds / 1e12,
    }
    # For a chunk behind a prefix, cuDNN would be timed with a dense mask that torch builds.
    for name, backend in (FLASH,) if case.cached else (FLASH, CUDNN):

        def peer(backend: SDPBackend = backend) -> float:
            return sdpa_timing(machine, arena, backend, case.heads, case.batch, case.new, case.context).seconds

        row |= against(name, timing.seconds, peer)
    return row


PREFILL_ROUNDS = 4


def prefill_batch(machine: CudaMachine, arena: Arena, case: PrefillCase) -> Paged:
    """The batch of a prefill case."""
    return paged(machine, arena, case.heads, batch=case.batch, context=case.context, new=case.new, decode=False)


def write_row(machine: CudaMachine, arena: Arena, case: WriteCase, bandwidth: float) -> Row:
    """Cache write with RoPE; each token is a sequence of its own, so that slots are scattered."""
    write, rounds = write_round(machine, arena, case)
    timing = machine.timed(write, rounds)
    gb_per_s = case.bytes / timing.seconds / 1e9
    return {"case": case.name, **timing.columns(), "gb_per_s": gb_per_s, "share_of_copy": gb_per_s / bandwidth}


def write_round(machine: CudaMachine, arena: Arena, case: WriteCase) -> tuple[Callable[[int], object], int]:
    """A round of a cache write, and the number of rounds of a graph."""
    batch = paged(machine, arena, case.heads, batch=case.tokens, context=16)
    shape = (case.tokens, case.heads.num_kv_heads, HEAD_SIZE)
    key, value = (torch.randn(shape, device=machine.device).to(torch.bfloat16) for _ in range(2))
    rope = Rope(torch.ones(64, HEAD_SIZE, device=machine.device))
    return batch.write(key, value, rope), batch.num_rounds


def block_copy_row(machine: CudaMachine, arena: Arena, case: BlockCopyCase, bandwidth: float) -> Row:
    """Copies between random blocks of one pool."""
    batch = paged(machine, arena, case.heads, batch=2 * case.blocks, context=BLOCK_SIZE, num_layers=case.LAYERS)
    pairs = torch.randperm(2 * case.blocks, device=machine.device).to(torch.int32).view(case.blocks, 2)
    timing = machine.timed(lambda _: batch.attention.copy_blocks(pairs), 4)
    gb_per_s = case.bytes / timing.seconds / 1e9
    return {"case": case.name, **timing.columns(), "gb_per_s": gb_per_s, "share_of_copy": gb_per_s / bandwidth}


def sdpa_timing(
    machine: CudaMachine, arena: Arena, backend: SDPBackend, heads: Heads, batch: int, new: int, context: int
) -> KernelTiming:
    """torch's attention at the same shape, over its best layout: keys and values contiguous for each head."""
    kv_bytes = batch * context * 2 * heads.num_kv_heads * HEAD_SIZE * 2
    rounds = Rounds.of(kv_bytes, arena.size, machine.most_rounds)
    cache = arena.view(torch.bfloat16, rounds.layers, 2, batch, heads.num_kv_heads, context, HEAD_SIZE)
    query = torch.randn(batch, heads.num_heads, new, HEAD_SIZE, device=machine.device).to(torch.bfloat16)
    grouped = heads.num_heads != heads.num_kv_heads
    # A single query sees everything; a whole prompt is causal; a chunk behind a prefix is causal from the lower right.
    mask = causal_lower_right(new, context) if 1 < new < context else None

    def run(index: int) -> None:
        key, value = cache[index % rounds.layers]
        with sdpa_kernel(backend):
            scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=1 < new == context, enable_gqa=grouped
            )

    return machine.timed(run, rounds.count if new == 1 else min(rounds.layers, PREFILL_ROUNDS))


def against(peer: str, ours: float, measure: Callable[[], float]) -> Row:
    """Speed in multiples of a peer's; for a peer that fails, the reason. Raises RuntimeError for a fault of the device,
    after which the process cannot use it.
    """
    try:
        return {f"against_{peer}": measure() / ours}
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        if "CUDA error" in str(error):
            raise
        return {f"against_{peer}": None, f"{peer}_failed": (str(error) or type(error).__name__).splitlines()[0][:200]}
