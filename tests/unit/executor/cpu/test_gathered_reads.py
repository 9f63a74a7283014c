"""Reads through gathers: every row is in one part, and what a step costs is bounded."""

from __future__ import annotations

import math
import random

import torch
from support.executor.scheduled_items import BLOCK_SIZE, COMMON_BLOCKS, behind_common_blocks, scheduled

from pagekv.executor.backend.interface import Scheduled
from pagekv.executor.cpu.attention_plan import CALL_BYTES, CpuAttentionPlan
from pagekv.executor.cpu.gathered_reads import (
    MAX_GATHER_BYTES,
    DecodeGroup,
    GatheredReads,
    PromptChunk,
    gathered_reads,
)
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.model.loading import BlockGeometry


def gathered(items: list[Scheduled], window: int | None = None, block_bytes: int = 2**15) -> GatheredReads:
    """Over a pool of as many blocks as are named, behind which comes the null block."""
    size = block_bytes // (2 * BLOCK_SIZE * 4)
    num_blocks = 1 + max(max(item.state.block_table) for item in items)
    pools = KvCache(BlockGeometry(1, 1, size, torch.float32), BLOCK_SIZE, num_blocks)
    return gathered_reads(CpuAttentionPlan(items, BLOCK_SIZE, block_bytes).step, pools, window)


def test_parts_cover_every_row_in_order() -> None:
    rng = random.Random(0)
    for _ in range(50):
        items = [
            scheduled(seq_id, list(range(20 * seq_id, 20 * seq_id + 20)), rng.randrange(40), rng.choice([1, 1, 5, 30]))
            for seq_id in range(rng.randint(1, 12))
        ]
        block_bytes = rng.choice([2**10, 2**18, 2**22])
        for window in (None, 1, 7, 1000):
            at = 0
            for part in gathered(items, window, block_bytes).parts:
                assert part.first == at < part.last
                at = part.last
            assert at == sum(item.count for item in items)


def test_a_group_pads_with_the_null_block_and_names_what_nobody_wrote() -> None:
    (group,) = gathered([scheduled(1, [7, 3], 5, 1), scheduled(2, [9], 2, 1)]).parts
    assert isinstance(group, DecodeGroup)
    assert group.blocks.tolist() == [9, 10, 7, 3]
    assert group.unwritten.tolist() == [3, 14, 15, 16 + 3, 16 + 14, 16 + 15]
    hidden = -math.inf
    assert group.mask.tolist() == [[[[0, 0, 0] + [hidden] * 5]], [[[0] * 6 + [hidden] * 2]]]


def test_padding_is_cheaper_than_another_group() -> None:
    """Lengths far apart are not padded to one another, and no group is larger than the cache likes."""
    block_bytes = 2**15
    lengths = [1] * 30 + [100] * 40
    items, block = [], 0
    for seq_id, length in enumerate(lengths):
        items.append(scheduled(seq_id, list(range(block, block + length)), length * BLOCK_SIZE - 1, 1))
        block += length
    groups = [part for part in gathered(items, None, block_bytes).parts if isinstance(part, DecodeGroup)]
    for group in groups:
        padding = int((group.blocks == block).sum())
        assert padding * block_bytes <= CALL_BYTES
        assert len(group.blocks) * block_bytes <= MAX_GATHER_BYTES
    assert sum(int((group.blocks != block).sum()) for group in groups) == sum(lengths)


def test_a_window_reads_only_its_blocks() -> None:
    chunk, group = gathered([scheduled(1, list(range(10)), 30, 1), scheduled(2, list(range(20, 30)), 20, 6)], 6).parts
    assert isinstance(chunk, PromptChunk)
    assert chunk.window is not None
    blocks, mask = chunk.window
    assert blocks.tolist() == [23, 24, 25, 26]
    assert mask.shape == (1, 1, 6, 14)
    visible = (mask[0, 0] == 0).tolist()
    for row, position in enumerate(range(20, 26)):
        assert [12 + key for key in range(14) if visible[row][key]] == list(range(position - 5, position + 1))
    assert isinstance(group, DecodeGroup)
    assert group.blocks.tolist() == [6, 7]
    assert (group.mask[0, 0, 0] == 0).tolist() == [False, True, True, True, True, True, True, False]


def test_shared_blocks_are_read_once_for_all_rows() -> None:
    """Rows of two chunks and a decode behind 32 common blocks; the rest of a context is read for one sequence alone."""
    reads = gathered(behind_common_blocks(), None, CALL_BYTES // 16)
    assert [type(part) for part in reads.parts] == [PromptChunk, PromptChunk, PromptChunk, DecodeGroup]
    own, shared = reads.contexts
    assert own.rows == slice(3, 7)
    assert (own.blocks.tolist(), own.num_keys) == ([2], 2)
    assert isinstance(shared.rows, torch.Tensor)
    assert shared.rows.tolist() == [*range(7), 9]
    assert (shared.blocks.tolist(), shared.num_keys) == (COMMON_BLOCKS, 128)
    group = reads.parts[-1]
    assert isinstance(group, DecodeGroup)
    assert group.blocks.tolist() == [4]


def test_sharing_that_saves_less_than_a_call_is_left() -> None:
    common = list(range(100, 132))
    items = [scheduled(seq_id, [*common, seq_id], 129, 1) for seq_id in (1, 2)]
    assert gathered(items, None, CALL_BYTES // 64).contexts == []
