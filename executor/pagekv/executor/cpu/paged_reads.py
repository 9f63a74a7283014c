"""The reads of one step's rows directly from the block pool, for the compiled loops of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch

from pagekv.executor.cpu.attention_plan import ScheduledRows, SharedPrefix, StepRows

# Most queries of a run for one KV head: rows times query heads per KV head. Their sums should stay in a core's cache;
# a panel of keys is packed once for all of them.
RUN_QUERIES = 256
# Runs of this many rows or fewer are not split further, even if threads are left without a run.
LEAST_ROWS = 8
# The table of a decode has room for up to so many blocks more, and at least for one.
ROOM_BLOCKS = 8
_ROOM = [0] * ROOM_BLOCKS


@dataclass(frozen=True, slots=True)
class PagedDecodes:
    """Each of the rows [first, last) is one sequence; the i-th of them sees the slots [begins[i], ends[i]) of the
    blocks `tables[offsets[i]:offsets[i + 1]]`, of which the last ones are room for later steps. Entries of `tables`
    after the last offset are padding. All int64.
    """

    first: int
    last: int
    tables: torch.Tensor
    offsets: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.tables, self.offsets, self.begins, self.ends

    @property
    def shape(self) -> tuple[int, ...]:
        return self.first, self.last, len(self.tables)

    def advance(
        self, rows: Sequence[ScheduledRows], entered: Sequence[int], block_size: int, window: int | None
    ) -> bool:
        """Turns the reads of a step into those of the next one, in which each of the `rows` has one more token. The
        rows with the numbers `entered` have reached a new block. False if there is no room for it; then the reads are
        of no more use.
        """
        for number in entered:
            item = rows[number].item
            index = item.start // block_size
            place = self.offsets.numpy()[number] + index
            if place >= self.offsets.numpy()[number + 1]:
                return False
            self.tables.numpy()[place] = item.state.block_table[index]
        ends = self.ends.numpy()
        ends += 1
        if window is not None:
            np.maximum(ends - window, 0, out=self.begins.numpy())
        return True


@dataclass(frozen=True, slots=True)
class PagedRuns:
    """Runs of rows over the same blocks. Run i has the places [firsts[i], firsts[i + 1]). The packed row `rows[j]` at
    place j of run i sees the slots [begins[j], ends[j]) of the blocks that start at `tables[offsets[i]]`. Within a run
    neither `begins` nor `ends` decreases. No row is in two places. All int64.
    """

    firsts: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    tables: torch.Tensor
    # Rows of the longest run.
    most_rows: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.firsts, self.offsets, self.rows, self.begins, self.ends, self.tables

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.firsts), len(self.rows), len(self.tables), self.most_rows


@dataclass(frozen=True, slots=True)
class PagedReads:
    """The reads of one layer: `chunks` and `decodes` together have every row once; the results of `prefixes` are
    merged into theirs, one after the other.
    """

    chunks: PagedRuns | None
    decodes: PagedDecodes | None
    prefixes: list[PagedRuns]

    @property
    def shape(self) -> tuple[object, ...]:
        """Two reads with equal shapes differ only in the content of their tensors."""
        chunks = None if self.chunks is None else self.chunks.shape
        decodes = None if self.decodes is None else self.decodes.shape
        return chunks, decodes, *(prefix.shape for prefix in self.prefixes)

    def advance(self, step: StepRows, entered: Sequence[int], block_size: int, window: int | None) -> bool:
        """As `PagedDecodes.advance`, for reads of decodes alone. Prefixes stay as they are."""
        assert self.decodes is not None  # and no chunk is there
        return self.decodes.advance(step.rows, entered, block_size, window)

    def copy_(self, other: PagedReads) -> None:
        """Copies the content of other reads, which have the same shape."""
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            for tensor, new in zip(mine.tensors, theirs.tensors, strict=True):
                tensor.copy_(new)

    @property
    def _parts(self) -> list[PagedRuns | PagedDecodes]:
        return [part for part in (self.chunks, self.decodes, *self.prefixes) if part is not None]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Packed rows with the slots [begin, end) of `blocks` that each sees; neither bound decreases over the rows."""

    rows: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    blocks: Sequence[int]


def paged_reads(step: StepRows, block_size: int, window: int | None, group: int, least_runs: int) -> PagedReads:
    """The reads of layers with this window; shared prefixes are used only without a window. `group`: query heads per
    KV head. `least_runs`: the number of runs that chunks, and prefixes, are split into if they have enough rows.
    """
    most = max(1, RUN_QUERIES // group)
    prefixes = step.prefixes if window is None else []
    chunks = [_chunk(row, block_size, window) for row in step.rows if row.item.count > 1]
    decodes = [row for row in step.rows if row.item.count == 1]
    return PagedReads(
        _runs(chunks, most, least_runs) if chunks else None,
        _decodes(decodes, block_size, window) if decodes else None,
        [_runs(level, most, least_runs) for level in _levels(prefixes, step.members, block_size)],
    )


def _chunk(row: ScheduledRows, block_size: int, window: int | None) -> _Reader:
    start, count = row.item.start, row.item.count
    ends = np.arange(start + 1, start + count + 1)
    begins = np.full(count, row.shared * block_size) if window is None else np.maximum(ends - window, 0)
    blocks = row.item.state.block_table[: -(-(start + count) // block_size)]
    return _Reader(np.arange(row.first, row.first + count), begins, ends, blocks)


def _levels(prefixes: Sequence[SharedPrefix], members: Sequence[ScheduledRows], block_size: int) -> list[list[_Reader]]:
    """Groups prefixes into levels in which no row has two prefixes: each prefix goes into the first level that none of
    its members is in yet.
    """
    levels: list[tuple[set[int], list[_Reader]]] = []
    for prefix in prefixes:
        sharing = sorted((members[member] for member in prefix.members), key=lambda row: row.first)
        rows = np.array([number for row in sharing for number in range(row.first, row.first + row.item.count)])
        begin, end = (np.full(len(rows), blocks * block_size) for blocks in (prefix.first, prefix.last))
        reader = _Reader(rows, begin, end, sharing[0].item.state.block_table[: prefix.last])
        taken, readers = next((level for level in levels if level[0].isdisjoint(prefix.members)), (None, None))
        if taken is None or readers is None:
            levels.append((set(prefix.members), [reader]))
        else:
            taken.update(prefix.members)
            readers.append(reader)
    return [readers for _, readers in levels]


def _runs(readers: Sequence[_Reader], most: int, least_runs: int) -> PagedRuns:
    """Splits readers into runs of at most `most` rows. Runs with the most work come first, so that threads which take
    one run after the other finish at about the same time.
    """
    while most > LEAST_ROWS and sum(-(-len(reader.rows) // most) for reader in readers) < least_runs:
        most //= 2
    tables = list(chain.from_iterable(reader.blocks for reader in readers))
    starts = np.cumsum([0, *(len(reader.blocks) for reader in readers)])
    pieces = [
        (int(start), reader, slice(low, min(low + most, len(reader.rows))))
        for start, reader in zip(starts, readers, strict=False)
        for low in range(0, len(reader.rows), most)
    ]
    pieces.sort(key=lambda piece: _work(*piece[1:]), reverse=True)
    firsts = np.cumsum([0, *(places.stop - places.start for _, _, places in pieces)])

    def joined(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(reader, name)[places] for _, reader, places in pieces]))

    return PagedRuns(
        torch.from_numpy(firsts),
        torch.from_numpy(np.array([start for start, _, _ in pieces])),
        joined("rows"),
        joined("begins"),
        joined("ends"),
        _padded(tables),
        max(after - before for before, after in pairwise(firsts.tolist())),
    )


def _work(reader: _Reader, places: slice) -> int:
    """The number of keys that these rows see together."""
    return int((reader.ends[places] - reader.begins[places]).sum())


def _decodes(rows: Sequence[ScheduledRows], block_size: int, window: int | None) -> PagedDecodes:
    ends = np.array([row.item.start + 1 for row in rows])
    begins = np.array([row.shared * block_size for row in rows]) if window is None else np.maximum(ends - window, 0)
    tables = []
    for row in rows:
        count = row.item.start // block_size + 1
        tables.append([*row.item.state.block_table[:count], *_ROOM[count % ROOM_BLOCKS :]])
    offsets = np.cumsum([0, *map(len, tables)])
    first = rows[0].first
    arrays = map(torch.from_numpy, (offsets, begins, ends))
    return PagedDecodes(first, first + len(rows), _padded(list(chain.from_iterable(tables))), *arrays)


def _padded(tables: list[int]) -> torch.Tensor:
    """The tables, padded with zeros to a power of two, so that shapes repeat from step to step."""
    found = np.zeros(1 << (len(tables) - 1).bit_length(), np.int64)
    found[: len(tables)] = tables
    return torch.from_numpy(found)
