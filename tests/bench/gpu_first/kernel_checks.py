"""Checks of the kernels beside those of the users' bench: replays of a graph, swaps, the smallest launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from support.kernels.plain_norm import PlainNorm

from gpu_first.machine import FirstMachine
from pagekv.kernels.bench.correctness import (
    ALLOWED,
    BF16,
    Check,
    block_copy_checks,
    differing,
    largest,
    write_checks,
)
from pagekv.kernels.bench.scene import LAYER, Scene, Setup
from pagekv.kernels.prefill_splits import SPLIT_RULE
from pagekv.kernels.swap import BlockSwapper
from pagekv.kernels.variants import Variant

REPLAYS = 200


def replay_checks(machine: FirstMachine, setup: Setup, replays: int = REPLAYS) -> Iterator[Check]:
    """A recorded step gives the same bits every time: counters of merges return to zero, nothing races."""
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


def swap_checks(
    machine: FirstMachine, variant: Variant = BF16, lengths: Sequence[int] = (1, 17, 300)
) -> Iterator[Check]:
    """Sequences are swapped out and in again to other blocks, beside decodes of other sequences."""
    # One sequence more, as the spare blocks.
    scene = Scene(machine, Setup(variant, (*lengths, 1)))
    blocks, spare = scene.tables[len(lengths) - 1].tolist(), scene.tables[len(lengths)].tolist()
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


ROPE_BASE, NORM_EPS = 10_000.0, 1e-6


def rope_checks(machine: FirstMachine, setup: Setup, rotary_dim: int, *, normed: str = "") -> Iterator[Check]:
    """Cache writes that rotate the first `rotary_dim` elements of keys on the way and of queries in place, by Llama's
    angles; values are stored as they are. `normed`: behind norms, "each" of a head or "all" of one kind together.
    """
    scene = Scene(machine, setup)
    half = rotary_dim // 2
    frequencies = ROPE_BASE ** (-torch.arange(half, device=machine.device, dtype=torch.float64) / half)
    angles = torch.arange(max(setup.lengths), device=machine.device)[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], 1).float()
    position = torch.cat([torch.arange(length, device=machine.device) for length in setup.lengths])
    cosine, sine = table.double()[position][:, None].chunk(2, -1)
    first, second = slice(0, half), slice(half, rotary_dim)

    num_heads, num_kv_heads = scene.query.shape[1], scene.key.shape[1]
    made = torch.Generator().manual_seed(12)
    weight = 1 + torch.randn(num_heads + num_kv_heads, scene.query.shape[2], generator=made).to(machine.device) / 4

    def rotated(heads: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        before = heads.double()
        if normed:
            together = (1, 2) if normed == "all" else -1
            scale = (before.square().mean(together, keepdim=True) + NORM_EPS).rsqrt()
            before = (before * scale * weights).to(heads.dtype).double()
        after = before.clone()
        after[..., first] = before[..., first] * cosine - before[..., second] * sine
        after[..., second] = before[..., second] * cosine + before[..., first] * sine
        return after

    query, everyone = scene.query.clone(), range(len(setup.lengths))
    plan, held = scene.plan(everyone, scene.lengths, scene.lengths, decode=False)
    norm = PlainNorm(weight.flatten() if normed == "all" else weight, NORM_EPS) if normed else None
    scene.attention.write(LAYER, scene.key, scene.value, plan, query=query, norm=norm, rope=table)
    machine.synchronize()
    del held
    stored = torch.cat([scene.stored(sequence) for sequence in everyone])
    # Numbers of size about 1, rounded to the pool's type.
    allowed = 4 * (2.0**-7 if scene.kv_dtype.itemsize == 2 else 2.0**-22)
    label = f"{setup}, RoPE of {rotary_dim}" + (f" behind norms of {normed}" if normed else "")
    yield Check(f"{label}: keys rotated", largest(stored[:, 0], rotated(scene.key, weight[num_heads:])), allowed)
    yield Check(f"{label}: queries rotated", largest(query, rotated(scene.query, weight[:num_heads])), allowed)
    values = scene.value.to(scene.kv_dtype).float()
    yield Check(f"{label}: values written", differing(stored[:, 1].float(), values), 0)


def smallest_checks(machine: FirstMachine, variant: Variant) -> Iterator[Check]:
    """The smallest launch of each kernel, each waited for, so that a fault names its kernel."""
    allowed = ALLOWED[variant.dtype]
    short = Scene(machine, Setup(variant, (17,)))
    machine.synchronize()
    yield from write_checks(short)
    yield Check("decode 1 x 17", largest(short.decode([0]), short.expected_last()), allowed)
    long = Scene(machine, Setup(variant, (5000,), decodes_only=True))
    yield Check("decode 1 x 5000, merged", largest(long.decode([0]), long.expected_last()), allowed)
    yield Check("prefill 17", largest(short.prefill(0, 0, 17), short.expected(0, 0)), allowed)
    cached = SPLIT_RULE.most_whole
    behind = Scene(machine, Setup(variant, (cached + 3,), decodes_only=True))
    rows = behind.prefill(0, cached, cached + 3)
    yield Check(f"prefill 3 behind {cached}, split and merged", largest(rows, behind.expected(0, cached)), allowed)
    yield from block_copy_checks(short)
