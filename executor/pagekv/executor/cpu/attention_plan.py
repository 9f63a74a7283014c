"""The attention plan of one step: the order of its packed rows, the slots they write, and the prefixes that are read
once for several sequences (cascade attention). `paged_reads` and `gathered_reads` turn the plan into the reads of one
layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagekv.executor.backend.interface import Scheduled, SequenceState

# Reading this many bytes of keys and values costs as much as one more gather and kernel call (`gathered_reads` has the
# figures). A prefix is read once for all its sequences only if that saves more bytes than this.
CALL_BYTES = 2**20
# Comparing this many blocks of two tables takes about as long as the fixed cost of one comparison.
FEW_BLOCKS = 16


@dataclass(slots=True)
class ScheduledRows:
    """One scheduled sequence, in rows [first, first + count) of the packed batch. `shared`: how many of its leading
    blocks are in shared prefixes.
    """

    item: Scheduled
    first: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Entries [first, last) of the block tables of `members` are the same physical blocks."""

    members: list[int]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step in two orders: `rows` in packed order, `members` in the order that the member numbers of
    `prefixes` refer to.
    """

    rows: list[ScheduledRows]
    members: list[ScheduledRows]
    prefixes: list[SharedPrefix]


class CpuAttentionPlan:
    """One step: rows in packed order, the slots they write, and the prefixes that their sequences share. A step of
    decodes becomes the next one by `advance`, in a fraction of the time that a new plan takes.
    """

    def __init__(self, scheduled: Sequence[Scheduled], block_size: int, block_bytes: int) -> None:
        """`block_bytes`: bytes of the keys and values of one block in one layer."""
        self._block_size = block_size
        tables = [item.state.block_table[: item.start // block_size] for item in scheduled]
        prefixes = shared_prefixes(tables, max(1, CALL_BYTES // block_bytes))
        members = [ScheduledRows(item) for item in scheduled]
        for prefix in prefixes:
            for member in prefix.members:
                members[member].shared = max(members[member].shared, prefix.last)
        # Chunks first, then decodes in order of the number of blocks that each reads alone: neighbours then need little
        # padding in a group.
        rows = sorted(members, key=self._place)
        self.step = StepRows(rows, members, prefixes)
        # One past the last position of the step.
        self.longest = max(item.start + item.count for item in scheduled)
        ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        # The rows whose logits are sampled, each with its sequence.
        self.sampling: list[tuple[int, SequenceState]] = []
        for row in rows:
            row.first, item, state = len(ids), row.item, row.item.state
            places = range(item.start, item.start + item.count)
            ids += state.token_ids[places.start : places.stop]
            positions += places
            blocks += [state.block_table[place // block_size] for place in places]
            if item.samples:
                self.sampling.append((len(ids) - 1, state))
        # NumPy's calls on so few numbers take a fraction of the time of torch's. The tensors share the arrays' memory.
        self._ids, self._positions, self._blocks = np.array(ids), np.array(positions), np.array(blocks)
        self._offsets = self._positions % block_size
        # Packed token ids and positions, [1, T].
        self.input_ids = torch.from_numpy(self._ids[None])
        self.position_ids = torch.from_numpy(self._positions[None])
        # The block of every row, and the offset within that block; [T] each.
        self.slots = torch.from_numpy(self._blocks), torch.from_numpy(self._offsets)
        # The highest block that is written by this step, or by those from which the plan has advanced.
        self.highest_block = max(blocks)
        # How often the plan has advanced; and the numbers of the rows that have reached a new block by that.
        self.num_advances, self.entered = 0, list[int]()

    def advance(self, scheduled: Sequence[Scheduled]) -> bool:
        """Turns this plan into that of the next step if both are steps of decodes of the same sequences, in the same
        order. Returns whether they are; otherwise nothing changes. Prefixes stay as they are: one that sequences
        have begun to share since is read for each of them.
        """
        rows, members = self.step.rows, self.step.members
        if len(scheduled) != len(members) or len(self.sampling) != len(self._ids):
            return False
        for row, item in zip(members, scheduled, strict=True):
            last = row.item
            if item.state is not last.state or item.start != last.start + 1 or item.count != 1:
                return False
        for row, item in zip(members, scheduled, strict=True):
            row.item = item
        self._ids[:] = [row.item.state.token_ids[row.item.start] for row in rows]
        self._positions += 1
        self._offsets += 1
        self.entered = np.flatnonzero(self._offsets == self._block_size).tolist()
        for number in self.entered:
            item = rows[number].item
            self._offsets[number] = 0
            block = item.state.block_table[item.start // self._block_size]
            self._blocks[number], self.highest_block = block, max(self.highest_block, block)
        self.longest += 1
        self.num_advances += 1
        return True

    @property
    def sampled(self) -> StepRows:
        """The sampled rows alone, each as a sequence of one row, numbered as in `sampling`."""
        numbers = {row: number for number, (row, _) in enumerate(self.sampling)}
        rows: dict[int, ScheduledRows] = {}
        # From a place in `self.step.members` to the place in the new `members`.
        places: dict[int, int] = {}
        members: list[ScheduledRows] = []
        for place, row in enumerate(self.step.members):
            last = row.item.count - 1
            number = numbers.get(row.first + last)
            if number is not None:
                rows[number] = ScheduledRows(Scheduled(row.item.state, row.item.start + last, 1), number, row.shared)
                places[place] = len(members)
                members.append(rows[number])
        prefixes = [
            SharedPrefix(kept, prefix.first, prefix.last)
            for prefix in self.step.prefixes
            if (kept := [places[each] for each in prefix.members if each in places])
        ]
        return StepRows([rows[number] for number in range(len(rows))], members, prefixes)

    def _place(self, row: ScheduledRows) -> tuple[int, int]:
        return (1, row.item.start // self._block_size - row.shared) if row.item.count == 1 else (0, 0)

    def effective_window(self, window: int | None) -> int | None:
        """The window, or None if it hides no position in this step."""
        return None if window is not None and window >= self.longest else window


def shared_prefixes(tables: list[list[int]], min_saving: int) -> list[SharedPrefix]:
    """The shared prefixes that are worth reading once: each saves at least `min_saving` block reads.

    `tables[i]` holds the leading blocks that member i sees in full. The prefixes of a member cover its leading blocks
    from block 0 without a gap. The blocks after its last prefix are read for this member alone.
    """
    found: list[SharedPrefix] = []
    # (members, first, depth): the members agree on blocks [0, depth), and prefixes already cover [0, first).
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
            last = _common([tables[member] for member in bucket], depth)
            if (len(bucket) - 1) * (last - first) >= min_saving:
                found.append(SharedPrefix(bucket, first, last))
                pending.append((bucket, last, last))
            else:
                pending.append((bucket, first, last))
    return found


def _common(tables: list[list[int]], depth: int) -> int:
    """How many leading blocks all tables have in common; at least `depth` is known already. The search compares in
    growing pieces, so it reads only a few blocks beyond the common ones. Otherwise sequences that diverge one after
    another would have the same blocks compared again for each of them.
    """
    first, *others = tables
    most = min(map(len, tables))
    width, ended = FEW_BLOCKS, False
    while width and depth < most:
        end = min(depth + width, most)
        here = first[depth:end]
        if all(other[depth:end] == here for other in others):
            depth = end
        else:
            ended = True
        width = width // 2 if ended else width * 2
    return depth
