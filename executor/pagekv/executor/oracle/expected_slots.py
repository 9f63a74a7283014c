"""Expected contents and places of the slots of every live sequence, in columns with one row per sequence.

A step of many decodes is a few vector operations over columns, which takes about as long as checking its message.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, SequenceState
from pagekv.executor.oracle.reference import FIRST, extend_chain, extend_chains, mix

Numbers = npt.NDArray[np.int64]

# Rows and positions there is room for at first. Both double; memory comes with what is written.
MIN_ROWS, MIN_WIDTH = 64, 256


def spread(rows: Numbers, begins: Numbers, ends: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Positions [begin, end) of each row, concatenated: row and position of every element, and the index of each row's
    first element. With an empty range the last result is of no use.
    """
    counts = ends - begins
    firsts = np.cumsum(counts) - counts
    return np.repeat(rows, counts), np.arange(counts.sum()) - np.repeat(firsts - begins, counts), firsts


class ExpectedSlots:
    """Columns grow with the sequences. Only this class writes them, except `found`, `found_sum` and `found_after`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._row_of: dict[int, int] = {}
        self._states: list[SequenceState | None] = [None] * MIN_ROWS
        self._free = list(reversed(range(MIN_ROWS)))
        # By row and position: token and digest.
        self.tokens = np.empty((MIN_ROWS, MIN_WIDTH), np.uint32)
        self.digests = np.empty((MIN_ROWS, MIN_WIDTH), np.uint64)
        # By row: the block table, as far as positions are covered.
        self.blocks = np.empty((MIN_ROWS, -(-MIN_WIDTH // block_size)), np.int64)
        # By row. Positions covered, and the state of the chain behind them.
        self.length = np.zeros(MIN_ROWS, np.int64)
        self._chain = np.zeros(MIN_ROWS, np.uint64)
        # Leading positions, of full blocks, that were found right; the sum of their digests; and the number of the
        # latest write before that. Written by the oracle.
        self.found = np.zeros(MIN_ROWS, np.int64)
        self.found_sum = np.zeros(MIN_ROWS, np.uint64)
        self.found_after = np.zeros(MIN_ROWS, np.int64)
        # The token sampled last: what an UNKNOWN_TOKEN is.
        self.latest = np.zeros(MIN_ROWS, np.int64)
        # Whether `choose_tokens` can sample for the row, and its arguments.
        self.plain = np.zeros(MIN_ROWS, np.bool_)
        self.drawing = np.zeros(MIN_ROWS, np.bool_)
        self.seed = np.zeros(MIN_ROWS, np.uint64)
        self.index = np.zeros(MIN_ROWS, np.uint64)

    def row(self, state: SequenceState) -> int:
        """The row of a sequence; a new one where it has none."""
        row = self._row_of.get(state.seq_id)
        if row is None or self._states[row] is not state:
            row = self._enter(state)
        return row

    def state(self, row: int) -> SequenceState:
        """The sequence of a row."""
        state = self._states[row]
        assert state is not None
        return state

    def remove(self, state: SequenceState) -> None:
        """Frees the row of a sequence, where it has one."""
        row = self._row_of.pop(state.seq_id, None)
        if row is not None:
            self._states[row] = None
            self._free.append(row)

    def _enter(self, state: SequenceState) -> int:
        self.remove(state)
        if not self._free:
            self._add_rows()
        row = self._row_of[state.seq_id] = self._free.pop()
        self._states[row] = state
        self.length[row] = self.found[row] = self.found_sum[row] = 0
        self._chain[row] = FIRST
        sampling = state.sampling
        self.plain[row] = sampling.logprobs is None and not (sampling.min_tokens and sampling.banned_until_min)
        self.drawing[row] = sampling.temperature > 0
        self.seed[row] = mix(sampling.seed)
        self.index[row] = mix(sampling.sequence_index)
        return row

    def grow(self, rows: Numbers, ends: Numbers) -> None:
        """Covers positions [0, end) of each. Decodes, by one position each, all at once."""
        lengths = self.length[rows]
        if (most := int(ends.max())) > self.tokens.shape[1]:
            self._widen(most)
        for row, end in zip(rows[ends > lengths + 1].tolist(), ends[ends > lengths + 1].tolist(), strict=True):
            self._grow_one(row, end)
        one = ends == lengths + 1
        if one.any():
            self._grow_by_one(rows[one], lengths[one])

    def slots(self, rows: Numbers, positions: Numbers) -> Numbers:
        """Slots of these positions: block * block_size + offset."""
        size = self._block_size
        return self.blocks[rows, positions // size] * size + positions % size

    def _grow_by_one(self, rows: Numbers, at: Numbers) -> None:
        states = list(map(self.state, rows.tolist()))
        given = np.array(
            [state.token_ids[position] for state, position in zip(states, at.tolist(), strict=True)], np.int64
        )
        tokens = np.where(given == UNKNOWN_TOKEN, self.latest[rows], given).astype(np.uint64)
        self.digests[rows, at], self._chain[rows] = extend_chains(self._chain[rows], tokens)
        self.tokens[rows, at] = tokens
        logical = at // self._block_size
        for i in np.flatnonzero(at % self._block_size == 0).tolist():
            self.blocks[rows[i], logical[i]] = states[i].block_table[logical[i]]
        self.length[rows] = at + 1

    def _grow_one(self, row: int, end: int) -> None:
        state, begin, size = self.state(row), int(self.length[row]), self._block_size
        tokens = state.token_ids[begin:end]
        # Only the last token of a sequence may be unknown, and those before were covered when it was sampled.
        assert tokens[-1] != UNKNOWN_TOKEN
        self.tokens[row, begin:end] = tokens
        self.digests[row, begin:end], self._chain[row] = extend_chain(int(self._chain[row]), tokens)
        first, last = begin // size, (end - 1) // size
        self.blocks[row, first : last + 1] = state.block_table[first : last + 1]
        self.length[row] = end

    def _add_rows(self) -> None:
        old = len(self._states)
        for name in (
            "length",
            "_chain",
            "found",
            "found_sum",
            "found_after",
            "latest",
            "plain",
            "drawing",
            "seed",
            "index",
        ):
            setattr(self, name, np.concatenate([getattr(self, name)] * 2))
        self._states += [None] * old
        self._free += reversed(range(old, 2 * old))
        self._reserve(2 * old, self.tokens.shape[1])

    def _widen(self, length: int) -> None:
        self._reserve(len(self._states), max(length, 2 * self.tokens.shape[1]))

    def _reserve(self, num_rows: int, width: int) -> None:
        size = self._block_size
        for name, columns, per_position in (
            ("tokens", width, 1),
            ("digests", width, 1),
            ("blocks", -(-width // size), size),
        ):
            old = getattr(self, name)
            new = np.empty((num_rows, columns), old.dtype)
            # Only known elements: pages that are never written take no memory.
            for row in self._row_of.values():
                known = -(-int(self.length[row]) // per_position)
                new[row, :known] = old[row, :known]
            setattr(self, name, new)
