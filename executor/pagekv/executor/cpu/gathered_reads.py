"""The reads of one step's rows through gathers, for attention by torch's operators.

Cost model, measured on 2 cores: attention of a decode reads keys and values (a gather copies them, the kernel reads the
copy from cache) at about 1 us per 32 KiB; one more gather and kernel call costs some 40 us. So decodes are padded and
batched as long as the padding is cheaper than another call. `CALL_BYTES` is the number of padded bytes that cost as
much as one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pagekv.executor.cpu.attention_plan import CALL_BYTES, ScheduledRows, SharedPrefix, StepRows
from pagekv.executor.cpu.kv_cache import KvCache

# A gather copies at most this many bytes, unless one sequence alone needs more: the copy should still be in cache when
# the kernel reads it.
MAX_GATHER_BYTES = 8 * 2**20
# Rows of a windowed chunk that are computed at a time: this bounds the mask and the older tokens that are read.
WINDOW_ROWS = 512


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows [first, last) are consecutive positions of one sequence, with causal attention among themselves. With a
    sliding window they see the first N slots of the blocks `window[0]` instead, under the mask `window[1]`
    `[1, 1, R, N]`.
    """

    first: int
    last: int
    window: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Each of the rows [first, last) is one sequence; row i sees the slots of its blocks under `mask` `[S, 1, 1, N]`.

    `blocks` `[S * n]` is padded with the null block. `unwritten` are the slots that no step has written, as indices
    into the gathered keys and then values, `[2 * S * N]`, and are zeroed: a NaN stays NaN under any mask.
    """

    first: int
    last: int
    blocks: torch.Tensor
    unwritten: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """Rows (a slice, or indices `[R]`) that all see the first `num_keys` slots of `blocks`, in addition to their own
    part.
    """

    rows: slice | torch.Tensor
    blocks: torch.Tensor
    num_keys: int


@dataclass(slots=True)
class GatheredReads:
    """The reads of one layer: the parts cover every row once, in order; the contexts are merged into the result."""

    parts: list[PromptChunk | DecodeGroup] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)


def gathered_reads(step: StepRows, pools: KvCache, window: int | None) -> GatheredReads:
    """The reads of layers with this window. With a window, every row reads its own blocks and shared prefixes are not
    used.
    """
    reads, size = GatheredReads(), pools.block_size
    for row in step.rows:
        start, count = row.item.start, row.item.count
        if count == 1:
            continue
        if window is not None and (start > 0 or count > window):
            for begin in range(start, start + count, WINDOW_ROWS):
                end = min(begin + WINDOW_ROWS, start + count)
                reads.parts.append(_windowed_chunk(row, begin, end, window, pools))
            continue
        reads.parts.append(PromptChunk(row.first, row.first + count))
        own = start - row.shared * size
        if own > 0:
            blocks = row.item.state.block_table[row.shared : -(-start // size)]
            reads.contexts.append(Context(slice(row.first, row.first + count), torch.tensor(blocks), own))
    reads.parts += _decode_groups(step.rows, window, pools)
    if window is None:
        reads.contexts += [_context(prefix, step.members, size) for prefix in step.prefixes]
    return reads


def _context(prefix: SharedPrefix, members: Sequence[ScheduledRows], block_size: int) -> Context:
    sharing = sorted((members[member] for member in prefix.members), key=lambda row: row.first)
    indices = [index for row in sharing for index in range(row.first, row.first + row.item.count)]
    begin, end = indices[0], indices[-1] + 1
    rows = slice(begin, end) if end - begin == len(indices) else torch.tensor(indices)
    blocks = sharing[0].item.state.block_table[prefix.first : prefix.last]
    return Context(rows, torch.tensor(blocks), len(blocks) * block_size)


def _windowed_chunk(row: ScheduledRows, start: int, end: int, window: int, pools: KvCache) -> PromptChunk:
    """Positions [start, end) of a scheduled sequence."""
    size = pools.block_size
    low = max(0, start - window + 1) // size
    blocks = row.item.state.block_table[low : (end - 1) // size + 1]
    query = np.arange(start, end)[:, None]
    key = np.arange(low * size, end)[None]
    mask = _mask((key <= query) & (key > query - window), pools)[None, None]
    first = row.first + start - row.item.start
    return PromptChunk(first, first + end - start, (torch.tensor(blocks), mask))


def _decode_groups(rows: Sequence[ScheduledRows], window: int | None, pools: KvCache) -> list[DecodeGroup]:
    groups: list[DecodeGroup] = []
    members: list[tuple[int, list[int], int, int]] = []
    used, block_size, block_bytes = 0, pools.block_size, pools.layer_block_bytes
    for row in rows:
        if row.item.count > 1:
            continue
        position = row.item.start
        first_seen = row.shared * block_size if window is None else max(0, position - window + 1)
        low, begin = divmod(first_seen, block_size)
        blocks = row.item.state.block_table[low : position // block_size + 1]
        widest = max([len(blocks), *(len(other[1]) for other in members)])
        size = widest * (len(members) + 1)
        padding = size - used - len(blocks)
        if members and (padding * block_bytes > CALL_BYTES or size * block_bytes > MAX_GATHER_BYTES):
            groups.append(_decode_group(members, pools))
            members, used = [], 0
        members.append((row.first, blocks, begin, position + 1 - low * block_size))
        used += len(blocks)
    if members:
        groups.append(_decode_group(members, pools))
    return groups


def _decode_group(members: list[tuple[int, list[int], int, int]], pools: KvCache) -> DecodeGroup:
    """The group of these members: (row, blocks, first visible slot, one past the last visible slot)."""
    width = max(len(blocks) for _, blocks, _, _ in members)
    padded = [blocks + [pools.null_block] * (width - len(blocks)) for _, blocks, _, _ in members]
    begin = np.array([begin for _, _, begin, _ in members])[:, None]
    end = np.array([end for _, _, _, end in members])[:, None]
    held = np.array([len(blocks) * pools.block_size for _, blocks, _, _ in members])[:, None]
    slot = np.arange(width * pools.block_size)[None]
    unwritten = np.flatnonzero((slot >= end) & (slot < held))
    first = members[0][0]
    return DecodeGroup(
        first,
        first + len(members),
        torch.tensor(padded).flatten(),
        torch.from_numpy(np.concatenate([unwritten, unwritten + len(members) * slot.size])),
        _mask((slot >= begin) & (slot < end), pools)[:, None, None],
    )


def _mask(visible: np.ndarray, pools: KvCache) -> torch.Tensor:
    """Added to scores: 0 where visible, else minus infinity."""
    return torch.from_numpy(np.where(visible, np.float32(0), np.float32(-math.inf))).to(pools.geometry.dtype)
