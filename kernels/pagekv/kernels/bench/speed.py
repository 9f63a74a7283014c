"""Speed of the kernels, and of torch's attention over contiguous keys and values, on the same card in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pagekv.kernels.attention import Rope
from pagekv.kernels.bench.machine import Arena, Machine
from pagekv.kernels.bench.paged import layers_for, paged
from pagekv.kernels.bench.workload import (
    HEAD_SIZE,
    MIB,
    DecodeCase,
    Heads,
    PrefillCase,
    WriteCase,
)

Row = dict[str, Any]


def copy_bandwidth(machine: Machine, arena: Arena) -> float:
    """GB/s of a device to device copy, bytes read and written both counted: what memory can deliver."""
    half = min(arena.size // 2, 1024 * MIB) // 16 * 16
    memory = arena.view(torch.uint8, 2 * half)
    seconds = machine.seconds(lambda _: memory[half:].copy_(memory[:half]), 4)
    return 2 * half / seconds / 1e9


def rounds_for(layers: int, kv_bytes: int) -> int:
    """Small cases several times in a graph; large ones need no more than one look at each layer."""
    return layers if kv_bytes > 64 * MIB else max(layers, 8)


def decode_row(machine: Machine, arena: Arena, case: DecodeCase, bandwidth: float) -> Row:
    """One decode case: scattered blocks, blocks in order, torch over contiguous memory."""
    seconds = {}
    for name, scattered in (("paged", True), ("in_order", False)):
        batch = paged(machine, arena, case.heads, batch=case.batch, context=case.context, scattered=scattered)
        seconds[name] = machine.seconds(batch.attend, rounds_for(batch.num_layers, case.kv_bytes))
    row = {
        "case": case.name,
        "batch": case.batch,
        "context": case.context,
        "microseconds": seconds["paged"] * 1e6,
        "gb_per_s": case.bytes / seconds["paged"] / 1e9,
        "share_of_copy": case.bytes / seconds["paged"] / 1e9 / bandwidth,
        "paged_against_in_order": seconds["in_order"] / seconds["paged"],
    }
    row |= against(
        "sdpa", seconds["paged"], lambda: sdpa_seconds(machine, arena, case.heads, case.batch, 1, case.context)
    )
    return row


def prefill_row(machine: Machine, arena: Arena, case: PrefillCase) -> Row:
    """One prefill case, and torch over contiguous memory."""
    batch = paged(machine, arena, case.heads, batch=case.batch, context=case.context, new=case.new, decode=False)
    seconds = machine.seconds(batch.attend, min(batch.num_layers, 4))
    row = {
        "case": case.name,
        "new": case.new,
        "cached": case.cached,
        "milliseconds": seconds * 1e3,
        "tflop_per_s": case.flops / seconds / 1e12,
    }
    row |= against(
        "sdpa", seconds, lambda: sdpa_seconds(machine, arena, case.heads, case.batch, case.new, case.context)
    )
    return row


def write_row(machine: Machine, arena: Arena, case: WriteCase, bandwidth: float) -> Row:
    """Cache write with RoPE; every token a sequence of its own, so that slots are scattered."""
    batch = paged(machine, arena, case.heads, batch=case.tokens, context=16)
    shape = (case.tokens, case.heads.num_kv_heads, HEAD_SIZE)
    key, value = (torch.randn(shape, device=machine.device).to(torch.bfloat16) for _ in range(2))
    rope = Rope(torch.ones(64, HEAD_SIZE, device=machine.device))
    seconds = machine.seconds(batch.write(key, value, rope), max(8, min(batch.num_layers, 16)))
    gb_per_s = case.bytes / seconds / 1e9
    return {
        "case": case.name,
        "microseconds": seconds * 1e6,
        "gb_per_s": gb_per_s,
        "share_of_copy": gb_per_s / bandwidth,
    }


def block_copy_row(machine: Machine, arena: Arena, heads: Heads, blocks: int, bandwidth: float) -> Row:
    """Copy-on-write of `blocks` blocks of 32 layers."""
    batch = paged(machine, arena, heads, batch=2 * blocks, context=16, num_layers=32)
    pairs = torch.randperm(2 * blocks, device=machine.device).to(torch.int32).view(blocks, 2)
    seconds = machine.seconds(lambda _: batch.attention.copy_blocks(pairs), 4)
    moved = 2 * blocks * 32 * 2 * 16 * heads.num_kv_heads * HEAD_SIZE * 2
    return {
        "case": f"copy of {blocks} blocks of {moved // 2 // blocks // MIB} MiB",
        "microseconds": seconds * 1e6,
        "gb_per_s": moved / seconds / 1e9,
        "share_of_copy": moved / seconds / 1e9 / bandwidth,
    }


def sdpa_seconds(machine: Machine, arena: Arena, heads: Heads, batch: int, new: int, context: int) -> float:
    """torch's attention at the same shape, keys and values contiguous for each head, which suits it best."""
    kv_bytes = batch * context * 2 * heads.num_kv_heads * HEAD_SIZE * 2
    layers = layers_for(kv_bytes, arena.size)
    cache = arena.view(torch.bfloat16, layers, 2, batch, heads.num_kv_heads, context, HEAD_SIZE)
    query = torch.randn(batch, heads.num_heads, new, HEAD_SIZE, device=machine.device).to(torch.bfloat16)
    grouped = heads.num_heads != heads.num_kv_heads
    # A single query sees everything; a whole prompt is causal; a chunk behind a prefix is causal from the lower right.
    mask = causal_lower_right(new, context) if 1 < new < context else None

    def run(index: int) -> None:
        key, value = cache[index % layers]
        scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=1 < new == context, enable_gqa=grouped
        )

    return machine.seconds(run, rounds_for(layers, kv_bytes) if new == 1 else min(layers, 4))


def against(peer: str, ours: float, measure: Callable[[], float]) -> Row:
    """How many times as fast as a peer; a peer that fails is named with its reason and costs nothing else."""
    try:
        return {f"against_{peer}": measure() / ours}
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        return {f"against_{peer}": None, f"{peer}_failed": str(error).splitlines()[0][:200]}


def fitting(cases: Iterable[Any], arena: Arena) -> list[Any]:
    """The cases whose keys and values fit the arena."""
    return [case for case in cases if case.kv_bytes <= arena.size]
