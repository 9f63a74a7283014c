"""The attention plan of one step: the order of its packed rows, and the blocks that each row reads.

Cost model, measured on 2 cores: attention of a decode reads keys and values (a gather copies them, the kernel reads the
copy from cache) at about 1 us per 32 KiB; one more gather and kernel call costs some 40 us. So decodes are batched with
padding as long as padding is cheaper than another call, and blocks that several sequences share are read once for all
their rows (cascade attention) where that saves more than the extra call. `CALL_BYTES` is the exchange rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pagekv.executor.backend.interface import Scheduled
from pagekv.executor.cpu.shared_prefixes import SharedPrefix, shared_prefixes

# Reading this many bytes of keys and values costs as much as one more gather and kernel call.
CALL_BYTES = 2**20
# A gather brings at most this much unless one sequence alone needs more: it should still be in cache when read.
MAX_GATHER_BYTES = 8 * 2**20
# Rows at a time of a chunk under a window: bounds the mask and the older tokens that are read.
WINDOW_ROWS = 512


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows [first, last) are consecutive positions of one sequence that see one another causally."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class WindowedChunk:
    """Rows [first, last) of one sequence see the first `num_keys` slots of `blocks` as `mask` `[1, 1, R, N]` says."""

    first: int
    last: int
    blocks: torch.Tensor
    num_keys: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [first, last) are one sequence each; row i sees the slots of `blocks[i]` as `mask` `[S, 1, 1, N]` says.

    `blocks` `[S * n]` is padded with the null block. `unwritten` are the places among the gathered keys, then values,
    `[2 * S * N]`, that no step has written: they are zeroed, because a NaN passes any mask.
    """

    first: int
    last: int
    blocks: torch.Tensor
    unwritten: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """Rows (a slice, or indices `[R]`) that all see the first `num_keys` slots of `blocks`, besides their own part."""

    rows: slice | torch.Tensor
    blocks: torch.Tensor
    num_keys: int


@dataclass(slots=True)
class Plan:
    """Parts cover every row once, in order; contexts are merged into them."""

    parts: list[PromptChunk | WindowedChunk | DecodeGroup] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    """One scheduled sequence in rows [first, first + count). `shared`: leading blocks in shared prefixes."""

    item: Scheduled
    first: int
    shared: int


class CpuAttentionPlan:
    """One step: rows in packed order, the slots they write, and per window length the blocks they read."""

    def __init__(
        self, scheduled: Sequence[Scheduled], block_size: int, null_block: int, block_bytes: int, dtype: torch.dtype
    ) -> None:
        """`block_bytes`: keys and values of one block and one layer."""
        self._block_size, self._null_block, self._block_bytes, self._dtype = block_size, null_block, block_bytes, dtype
        tables = [item.state.block_table[: item.start // block_size] for item in scheduled]
        self._shared = shared_prefixes(tables, max(1, CALL_BYTES // block_bytes))
        self._rows = self._pack(scheduled)
        self._longest = max(item.start + item.count for item in scheduled)
        self._plans: dict[int | None, Plan] = {}
        self._index_tokens()

    def _pack(self, scheduled: Sequence[Scheduled]) -> list[_Row]:
        """Chunks first, then decodes by how much each reads alone, so that neighbours make good groups."""
        shared = [0] * len(scheduled)
        for prefix in self._shared:
            for member in prefix.members:
                shared[member] = max(shared[member], prefix.last)

        def place(member: int) -> tuple[bool, int]:
            item = scheduled[member]
            return item.count == 1, 0 if item.count > 1 else item.start // self._block_size - shared[member]

        rows: list[_Row] = []
        first = 0
        self._row_of = [0] * len(scheduled)
        for member in sorted(range(len(scheduled)), key=place):
            self._row_of[member] = len(rows)
            rows.append(_Row(scheduled[member], first, shared[member]))
            first += scheduled[member].count
        return rows

    def _index_tokens(self) -> None:
        ids: list[int] = []
        positions, blocks = [], []
        for row in self._rows:
            item = row.item
            ids += item.state.token_ids[item.start : item.start + item.count]
            position = np.arange(item.start, item.start + item.count)
            positions.append(position)
            low = item.start // self._block_size
            table = np.array(item.state.block_table[low : (item.start + item.count - 1) // self._block_size + 1])
            blocks.append(table[position // self._block_size - low])
        all_positions = np.concatenate(positions)
        # Packed token ids and positions, [1, T].
        self.input_ids = torch.tensor(ids, dtype=torch.int64)[None]
        self.position_ids = torch.from_numpy(all_positions)[None]
        # Block and offset in it of every row, [T] each.
        self.slots = (torch.from_numpy(np.concatenate(blocks)), torch.from_numpy(all_positions % self._block_size))
        # Rows whose logits are sampled, each with its sequence.
        self.sampling = [(row.first + row.item.count - 1, row.item.state) for row in self._rows if row.item.samples]

    def reads(self, window: int | None) -> Plan:
        """The reads of a layer with this window; built once per step and distinct window."""
        if window is not None and window >= self._longest:
            window = None
        if window not in self._plans:
            self._plans[window] = self._full_plan() if window is None else self._windowed_plan(window)
        return self._plans[window]

    def _full_plan(self) -> Plan:
        plan = Plan()
        for row in self._rows:
            if row.item.count > 1:
                plan.parts.append(PromptChunk(row.first, row.first + row.item.count))
                own = row.item.start - row.shared * self._block_size
                if own > 0:
                    last = -(-row.item.start // self._block_size)
                    rows = slice(row.first, row.first + row.item.count)
                    plan.contexts.append(Context(rows, _ids(row.item.state.block_table[row.shared : last]), own))
        plan.parts += self._decode_groups(None)
        plan.contexts += [self._context(prefix) for prefix in self._shared]
        return plan

    def _context(self, prefix: SharedPrefix) -> Context:
        members = sorted((self._rows[self._row_of[member]] for member in prefix.members), key=lambda row: row.first)
        indices = np.concatenate([np.arange(row.first, row.first + row.item.count) for row in members])
        begin, end = int(indices[0]), int(indices[-1]) + 1
        rows = slice(begin, end) if end - begin == len(indices) else torch.from_numpy(indices)
        blocks = members[0].item.state.block_table[prefix.first : prefix.last]
        return Context(rows, _ids(blocks), len(blocks) * self._block_size)

    def _windowed_plan(self, window: int) -> Plan:
        plan = Plan()
        for row in self._rows:
            item = row.item
            if item.count == 1:
                continue
            if item.start == 0 and item.count <= window:
                plan.parts.append(PromptChunk(row.first, row.first + item.count))
                continue
            for begin in range(0, item.count, WINDOW_ROWS):
                end = min(begin + WINDOW_ROWS, item.count)
                plan.parts.append(self._windowed_chunk(row, item.start + begin, item.start + end, window))
        plan.parts += self._decode_groups(window)
        return plan

    def _windowed_chunk(self, row: _Row, start: int, end: int, window: int) -> WindowedChunk:
        """Positions [start, end) of a row."""
        low = max(0, start - window + 1) // self._block_size
        blocks = row.item.state.block_table[low : (end - 1) // self._block_size + 1]
        query = np.arange(start, end)[:, None]
        key = np.arange(low * self._block_size, end)[None]
        mask = self._mask((key <= query) & (key > query - window))[None, None]
        first = row.first + start - row.item.start
        return WindowedChunk(first, first + end - start, _ids(blocks), mask.shape[-1], mask)

    def _decode_groups(self, window: int | None) -> list[DecodeGroup]:
        groups: list[DecodeGroup] = []
        members: list[tuple[int, list[int], int, int]] = []
        used = 0
        for row in self._rows:
            if row.item.count > 1:
                continue
            position = row.item.start
            low = row.shared if window is None else max(0, position - window + 1) // self._block_size
            visible = 0 if window is None else max(0, position - window + 1) - low * self._block_size
            blocks = row.item.state.block_table[low : position // self._block_size + 1]
            widest = max([len(blocks), *(len(other[1]) for other in members)])
            size = widest * (len(members) + 1)
            padding = size - used - len(blocks)
            if members and (padding * self._block_bytes > CALL_BYTES or size * self._block_bytes > MAX_GATHER_BYTES):
                groups.append(self._decode_group(members))
                members, used = [], 0
            members.append((row.first, blocks, visible, position + 1 - low * self._block_size))
            used += len(blocks)
        if members:
            groups.append(self._decode_group(members))
        return groups

    def _decode_group(self, members: list[tuple[int, list[int], int, int]]) -> DecodeGroup:
        """Members are (row, blocks, first visible slot, one past the last)."""
        width = max(len(blocks) for _, blocks, _, _ in members)
        padded = [blocks + [self._null_block] * (width - len(blocks)) for _, blocks, _, _ in members]
        begin = np.array([begin for _, _, begin, _ in members])[:, None]
        end = np.array([end for _, _, _, end in members])[:, None]
        held = np.array([len(blocks) * self._block_size for _, blocks, _, _ in members])[:, None]
        slot = np.arange(width * self._block_size)[None]
        unwritten = np.flatnonzero((slot >= end) & (slot < held))
        first = members[0][0]
        return DecodeGroup(
            first,
            first + len(members),
            torch.tensor(padded, dtype=torch.int64).flatten(),
            torch.from_numpy(np.concatenate([unwritten, unwritten + len(members) * slot.size])),
            self._mask((slot >= begin) & (slot < end))[:, None, None],
        )

    def _mask(self, visible: np.ndarray) -> torch.Tensor:
        """Added to scores: 0 where visible, else minus infinity."""
        return torch.from_numpy(np.where(visible, np.float32(0), np.float32(-math.inf))).to(self._dtype)


def _ids(blocks: list[int]) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int64)
