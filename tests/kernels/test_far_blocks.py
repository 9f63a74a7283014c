"""Blocks at the end of the largest pool: an address that any kernel computed in 32 bits would be another one.

The pool is a terabyte of addresses, of which only what is touched takes memory. A row's bits do not depend on its
blocks, so those of a pool of a few blocks say what is right.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.bench_machine import HostMachine
from support.kernels.host_build import HostLauncher
from support.kernels.planted_faults import Fault, assert_noticed, visible

from pagekv.kernels.attention import MAX_POOL_ROWS, PagedAttention
from pagekv.kernels.attention_plan import StepBatch
from pagekv.kernels.bench.speed import upload
from pagekv.kernels.variants import Variant

NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE = 32, 64, 2, 4, 64
LAYER = NUM_LAYERS - 1
# As many blocks as a pool may have.
MOST_BLOCKS = MAX_POOL_ROWS // (NUM_LAYERS * 2 * BLOCK_SIZE)
# Decodes that see so many keys share the blocks of a whole split; each has a last block of its own.
SHARERS, CONTEXT = 12, 257
SHARED_BLOCKS, OWN_TOKENS = CONTEXT // BLOCK_SIZE, CONTEXT % BLOCK_SIZE
USED = SHARED_BLOCKS + SHARERS
MAP_NORESERVE = 0x4000  # Python has no name for it before 3.13


def sparse_pool(num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros, each page of which begins to exist when it is written."""
    shape = (num_blocks, NUM_LAYERS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape)


@dataclass
class Steps:
    """Prompts, decodes and a copy over blocks of one pool."""

    launcher: HostLauncher
    variant: Variant
    pool: torch.Tensor
    blocks: np.ndarray[Any, np.dtype[np.int32]]
    """[USED]: shared ones, then one of each sequence."""
    wgmma_prefill: bool = False

    def run(self) -> list[torch.Tensor]:
        """The results of every kernel, and the keys and values that are stored."""
        machine = HostMachine()
        machine.launcher = self.launcher  # type: ignore[assignment]  # the emulation in its place
        attention = PagedAttention(
            self.launcher, self.pool, self.variant, num_heads=NUM_HEADS, wgmma_prefill=self.wgmma_prefill
        )
        own = self.blocks[SHARED_BLOCKS:]
        tables = np.concatenate([np.tile(self.blocks[:SHARED_BLOCKS], (SHARERS, 1)), own[:, None]], axis=1)
        generator = torch.Generator().manual_seed(1)

        def step(contexts: list[int], counts: list[int], *, decodes: bool) -> torch.Tensor:
            batch = StepBatch(
                query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
                context_lens=np.array(contexts, np.int32),
                block_tables=tables[: len(contexts)],
                decodes=np.full(len(contexts), decodes),
            )
            plan, held = upload(machine, attention, batch)
            if decodes:
                assert plan.num_wide_items
                assert plan.num_decode_items
            rows = sum(counts)
            key, value, query = (
                torch.randn(rows, heads, HEAD_SIZE, generator=generator).to(getattr(torch, self.variant.dtype))
                for heads in (NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
            )
            attention.write(LAYER, key, value, plan)
            out = torch.full_like(query, torch.nan)
            attention.attend(LAYER, query, out, plan)
            del held
            return out

        prompt = step([CONTEXT - 1], [CONTEXT - 1], decodes=False)
        decoded = step([CONTEXT] * SHARERS, [1] * SHARERS, decodes=True)
        # Both are far in a large pool: the last block of the list is the first of the pool, where every offset is 0.
        attention.copy_blocks(torch.tensor([[self.blocks[0], self.blocks[1]]], dtype=torch.int32))
        stored = self.pool.view(torch.uint8)[torch.from_numpy(self.blocks.astype(np.int64))]
        return [prompt, decoded, stored]


def check(launcher: HostLauncher, variant: Variant, *, wgmma_prefill: bool = False) -> None:
    """Far blocks are among the last, in the middle, and the first."""
    dtype = getattr(torch, variant.kv_dtype)
    near = Steps(launcher, variant, sparse_pool(USED, dtype), np.arange(USED, dtype=np.int32), wgmma_prefill)
    blocks = np.linspace(MOST_BLOCKS - 1, 0, USED).astype(np.int32)
    far = Steps(launcher, variant, sparse_pool(MOST_BLOCKS, dtype), blocks, wgmma_prefill)
    for found, expected in zip(far.run(), near.run(), strict=True):
        assert torch.equal(found, expected)


HALF = Variant("float16", "float16", HEAD_SIZE)


@pytest.mark.parametrize(
    "variant", [HALF, Variant("float32", "float32", HEAD_SIZE), Variant("float16", "float8_e4m3fn", HEAD_SIZE)], ids=str
)
def test_blocks_of_the_largest_pool(launcher: HostLauncher, variant: Variant) -> None:
    check(launcher, variant)


def test_prompts_by_warpgroups_over_the_largest_pool(launcher: HostLauncher) -> None:
    check(launcher, HALF, wgmma_prefill=True)


def narrow(
    kernel: str, old: str, new: str, *, name: str = "addresses of 32 bits", wgmma_prefill: bool = False
) -> Fault:
    """An address that wraps at 32 bits."""
    return Fault(name, kernel, old, new, lambda launcher: check(launcher, HALF, wgmma_prefill=wgmma_prefill))


STRIDE, NARROW = "block * p.block_stride +", "static_cast<u32>(block * p.block_stride) +"
FAULTS = (
    narrow("pagekv_cache_write", STRIDE, NARROW),
    narrow("pagekv_decode", "(u64)row[round] * token_bytes", "(u64)(row[round] * token_bytes)"),
    narrow("pagekv_decode_wide", "(u64)row[round] * token_bytes", "(u64)(row[round] * token_bytes)"),
    narrow("pagekv_prefill", STRIDE, NARROW),
    narrow("pagekv_prefill_wgmma", STRIDE, NARROW, wgmma_prefill=True),
    narrow(
        "pagekv_block_copy",
        "pair[0] * p.block_bytes",
        "static_cast<u32>(pair[0] * p.block_bytes)",
        name="sources of 32 bits",
    ),
    narrow(
        "pagekv_block_copy",
        "pair[1] * p.block_bytes",
        "static_cast<u32>(pair[1] * p.block_bytes)",
        name="destinations of 32 bits",
    ),
)


@pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
def test_addresses_of_32_bits_are_noticed(fault: Fault) -> None:
    assert_noticed(fault)
