"""The attention plan of one step: the order of its packed rows, and the blocks that each row reads.

Cost model, measured on 2 cores: attention of a decode reads keys and values (a gather copies them, the kernel reads the
copy from cache) at about 1 us per 32 KiB; one more gather and kernel call costs some 40 us. So decodes are batched with
padding as long as padding is cheaper than another call, and blocks that several sequences share are read once for all
their rows (cascade attention) where that saves more than the extra call. `CALL_BYTES` is the exchange rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pagekv.executor.backend.interface import Scheduled, SequenceState

# Reading this many bytes of keys and values costs as much as one more gather and kernel call.
CALL_BYTES = 2**20
# A gather brings at most this much unless one sequence alone needs more: it should still be in cache when read.
MAX_GATHER_BYTES = 8 * 2**20
# Rows at a time of a chunk under a window: bounds the mask and the older tokens that are read.
WINDOW_ROWS = 512


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows [first, last) are consecutive positions of one sequence that see one another causally. Under a window they
    see the first N slots of the blocks `window[0]` instead, as the mask `window[1]` `[1, 1, R, N]` says.
    """

    first: int
    last: int
    window: tuple[torch.Tensor, torch.Tensor] | None = None


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

    parts: list[PromptChunk | DecodeGroup] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)


@dataclass(slots=True)
class ScheduledRows:
    """One scheduled sequence in rows [first, first + count). `shared`: leading blocks in shared prefixes."""

    item: Scheduled
    first: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Blocks [first, last) of these members' block tables are the same physical blocks."""

    members: list[int]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step: `rows` in packed order, the same ones as `members` in the order that `prefixes` count in."""

    rows: list[ScheduledRows]
    members: list[ScheduledRows]
    prefixes: list[SharedPrefix]


class CpuAttentionPlan:
    """One step: rows in packed order, the slots they write, and per window length the blocks they read."""

    def __init__(
        self,
        scheduled: Sequence[Scheduled],
        block_size: int,
        null_block: int,
        block_bytes: int,
        dtype: torch.dtype,
    ) -> None:
        """`block_bytes`: keys and values of one block and one layer."""
        self._block_size, self._null_block, self._block_bytes, self._dtype = block_size, null_block, block_bytes, dtype
        tables = [item.state.block_table[: item.start // block_size] for item in scheduled]
        self.shared = shared_prefixes(tables, max(1, CALL_BYTES // block_bytes))
        # In the order of `scheduled`, whose places `shared` has, and in packed order.
        self.members = [ScheduledRows(item) for item in scheduled]
        for prefix in self.shared:
            for member in prefix.members:
                self.members[member].shared = max(self.members[member].shared, prefix.last)
        # Chunks first, then decodes by how much each reads alone, so that neighbours make good groups.
        self.rows = sorted(self.members, key=self._place)
        self._longest = max(item.start + item.count for item in scheduled)
        self._plans: dict[int | None, Plan] = {}
        ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        # Rows whose logits are sampled, each with its sequence.
        self.sampling: list[tuple[int, SequenceState]] = []
        for row in self.rows:
            row.first, item, state = len(ids), row.item, row.item.state
            places = range(item.start, item.start + item.count)
            ids += state.token_ids[places.start : places.stop]
            positions += places
            blocks += [state.block_table[place // block_size] for place in places]
            if item.samples:
                self.sampling.append((len(ids) - 1, state))
        # By NumPy, whose calls on so few numbers take a fraction of torch's time.
        places_of_rows = np.array(positions)
        # Packed token ids and positions, [1, T].
        self.input_ids, self.position_ids = (
            torch.from_numpy(np.array(ids)[None]),
            torch.from_numpy(places_of_rows[None]),
        )
        # Block and offset in it of every row, [T] each.
        self.slots = torch.from_numpy(np.array(blocks)), torch.from_numpy(places_of_rows % block_size)

    @property
    def step(self) -> StepRows:
        """All rows."""
        return StepRows(self.rows, self.members, self.shared)

    @property
    def sampled(self) -> StepRows:
        """The sampled rows alone, each a row of its own, numbered as in `sampling`."""
        numbers = {row: number for number, (row, _) in enumerate(self.sampling)}
        rows: dict[int, ScheduledRows] = {}
        # By place in `members`.
        places: dict[int, int] = {}
        members: list[ScheduledRows] = []
        for place, row in enumerate(self.members):
            last = row.item.count - 1
            number = numbers.get(row.first + last)
            if number is not None:
                rows[number] = ScheduledRows(Scheduled(row.item.state, row.item.start + last, 1), number, row.shared)
                places[place] = len(members)
                members.append(rows[number])
        kept = [([places[each] for each in of.members if each in places], of.first, of.last) for of in self.shared]
        prefixes = [SharedPrefix(*each) for each in kept if each[0]]
        return StepRows([rows[number] for number in range(len(rows))], members, prefixes)

    def _place(self, row: ScheduledRows) -> tuple[int, int]:
        return (1, row.item.start // self._block_size - row.shared) if row.item.count == 1 else (0, 0)

    def effective_window(self, window: int | None) -> int | None:
        """The window, or None for one that hides nothing in this step."""
        return None if window is not None and window >= self._longest else window

    def reads(self, window: int | None) -> Plan:
        """The reads of a layer with this window; built once per step and distinct window."""
        window = self.effective_window(window)
        if window not in self._plans:
            self._plans[window] = self._plan(window)
        return self._plans[window]

    def _plan(self, window: int | None) -> Plan:
        plan, size = Plan(), self._block_size
        for row in self.rows:
            start, count = row.item.start, row.item.count
            if count == 1:
                continue
            if window is not None and (start > 0 or count > window):
                for begin in range(start, start + count, WINDOW_ROWS):
                    end = min(begin + WINDOW_ROWS, start + count)
                    plan.parts.append(self._windowed_chunk(row, begin, end, window))
                continue
            plan.parts.append(PromptChunk(row.first, row.first + count))
            own = start - row.shared * size
            if own > 0:
                blocks = row.item.state.block_table[row.shared : -(-start // size)]
                plan.contexts.append(Context(slice(row.first, row.first + count), torch.tensor(blocks), own))
        plan.parts += self._decode_groups(window)
        if window is None:
            plan.contexts += [self._context(prefix) for prefix in self.shared]
        return plan

    def _context(self, prefix: SharedPrefix) -> Context:
        members = sorted((self.members[member] for member in prefix.members), key=lambda row: row.first)
        indices = [index for row in members for index in range(row.first, row.first + row.item.count)]
        begin, end = indices[0], indices[-1] + 1
        rows = slice(begin, end) if end - begin == len(indices) else torch.tensor(indices)
        blocks = members[0].item.state.block_table[prefix.first : prefix.last]
        return Context(rows, torch.tensor(blocks), len(blocks) * self._block_size)

    def _windowed_chunk(self, row: ScheduledRows, start: int, end: int, window: int) -> PromptChunk:
        """Positions [start, end) of a row."""
        low = max(0, start - window + 1) // self._block_size
        blocks = row.item.state.block_table[low : (end - 1) // self._block_size + 1]
        query = np.arange(start, end)[:, None]
        key = np.arange(low * self._block_size, end)[None]
        mask = self._mask((key <= query) & (key > query - window))[None, None]
        first = row.first + start - row.item.start
        return PromptChunk(first, first + end - start, (torch.tensor(blocks), mask))

    def _decode_groups(self, window: int | None) -> list[DecodeGroup]:
        groups: list[DecodeGroup] = []
        members: list[tuple[int, list[int], int, int]] = []
        used = 0
        for row in self.rows:
            if row.item.count > 1:
                continue
            position = row.item.start
            first_seen = row.shared * self._block_size if window is None else max(0, position - window + 1)
            low, begin = divmod(first_seen, self._block_size)
            blocks = row.item.state.block_table[low : position // self._block_size + 1]
            widest = max([len(blocks), *(len(other[1]) for other in members)])
            size = widest * (len(members) + 1)
            padding = size - used - len(blocks)
            if members and (padding * self._block_bytes > CALL_BYTES or size * self._block_bytes > MAX_GATHER_BYTES):
                groups.append(self._decode_group(members))
                members, used = [], 0
            members.append((row.first, blocks, begin, position + 1 - low * self._block_size))
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
            torch.tensor(padded).flatten(),
            torch.from_numpy(np.concatenate([unwritten, unwritten + len(members) * slot.size])),
            self._mask((slot >= begin) & (slot < end))[:, None, None],
        )

    def _mask(self, visible: np.ndarray) -> torch.Tensor:
        """Added to scores: 0 where visible, else minus infinity."""
        return torch.from_numpy(np.where(visible, np.float32(0), np.float32(-math.inf))).to(self._dtype)


def shared_prefixes(tables: list[list[int]], min_saving: int) -> list[SharedPrefix]:
    """The shared prefixes worth reading once: each saves at least `min_saving` block reads.

    `tables[i]` are the leading blocks that member i sees in full. The ranges of a member cover its leading blocks from
    block 0 without a gap; blocks behind the last range are read for the member alone.
    """
    found: list[SharedPrefix] = []
    # Members that agree on blocks [0, depth); their ranges end at `first`.
    pending = [(list(range(len(tables))), 0, 0)]
    while pending:
        members, first, depth = pending.pop()
        buckets: dict[int, list[int]] = defaultdict(list)
        for member in members:
            if len(tables[member]) > depth:
                buckets[tables[member][depth]].append(member)
        for bucket in buckets.values():
            if len(bucket) < 2:
                continue
            last = _common([tables[member] for member in bucket])
            if (len(bucket) - 1) * (last - first) >= min_saving:
                found.append(SharedPrefix(bucket, first, last))
                pending.append((bucket, last, last))
            else:
                pending.append((bucket, first, last))
    return found


def _common(tables: list[list[int]]) -> int:
    """How many leading blocks all tables have in common: as many as the least and the greatest of them have."""
    pairs = list(zip(min(tables), max(tables), strict=False))
    return next((index for index, (left, right) in enumerate(pairs) if left != right), len(pairs))
