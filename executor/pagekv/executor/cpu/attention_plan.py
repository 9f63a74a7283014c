"""The attention plan of one step: the order of its packed rows, the slots they write, and the prefixes that are read
once for several sequences (cascade attention). `paged_reads` and `gathered_reads` make a layer's reads of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagekv.executor.backend.interface import Scheduled, SequenceState

# Reading this many bytes of keys and values costs as much as one more gather and kernel call (`gathered_reads` has the
# figures): a prefix is read for all its sequences together where that saves more.
CALL_BYTES = 2**20
# Blocks of two tables that are compared in about the time that it takes to begin.
FEW_BLOCKS = 16


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
    """One step: rows in packed order, the slots they write, and what their sequences share."""

    def __init__(self, scheduled: Sequence[Scheduled], block_size: int, block_bytes: int) -> None:
        """`block_bytes`: keys and values of one block and one layer."""
        self._block_size = block_size
        tables = [item.state.block_table[: item.start // block_size] for item in scheduled]
        prefixes = shared_prefixes(tables, max(1, CALL_BYTES // block_bytes))
        members = [ScheduledRows(item) for item in scheduled]
        for prefix in prefixes:
            for member in prefix.members:
                members[member].shared = max(members[member].shared, prefix.last)
        # Chunks first, then decodes by how much each reads alone, so that neighbours make good groups.
        rows = sorted(members, key=self._place)
        self.step = StepRows(rows, members, prefixes)
        self._longest = max(item.start + item.count for item in scheduled)
        ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        # Rows whose logits are sampled, each with its sequence.
        self.sampling: list[tuple[int, SequenceState]] = []
        for row in rows:
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
        self.input_ids = torch.from_numpy(np.array(ids)[None])
        self.position_ids = torch.from_numpy(places_of_rows[None])
        # Block and offset in it of every row, [T] each.
        self.slots = torch.from_numpy(np.array(blocks)), torch.from_numpy(places_of_rows % block_size)

    @property
    def sampled(self) -> StepRows:
        """The sampled rows alone, each a row of its own, numbered as in `sampling`."""
        numbers = {row: number for number, (row, _) in enumerate(self.sampling)}
        rows: dict[int, ScheduledRows] = {}
        # By place in `members`.
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
        """The window, or None for one that hides nothing in this step."""
        return None if window is not None and window >= self._longest else window


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
            last = _common([tables[member] for member in bucket], depth)
            if (len(bucket) - 1) * (last - first) >= min_saving:
                found.append(SharedPrefix(bucket, first, last))
                pending.append((bucket, last, last))
            else:
                pending.append((bucket, first, last))
    return found


def _common(tables: list[list[int]], depth: int) -> int:
    """How many leading blocks all tables have in common, of which `depth` are known. Not many more are looked at than
    are found: where conversations part one behind the other, a block would else be looked at for each of them.
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
