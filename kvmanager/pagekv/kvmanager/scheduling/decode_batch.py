"""The decoding sequences as a struct of arrays: a step touches columns, not one Python object per sequence.

A row's number is the sequence's seq_id, also at the executor. A row is opened when its sequence enters the executor and
decodes from the chunk that completes the known tokens. After its sequence was removed, the row is kept until no step in
flight samples it, so that a late token cannot reach a new sequence.

    opened → decoding → (draining) → removed → free
"""

from __future__ import annotations

import heapq
from array import array

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.kvcache.block_hash import TOKEN_BYTES
from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.scheduling.sequence import NO_SEQ_ID, Seq
from pagekv.kvmanager.scheduling.step_plan import Ending

Rows = NDArray[np.intp]

_NEVER = np.iinfo(np.int32).max
# The tokens of rows without a sequence; never appended to.
_NO_TOKENS = array("I")
_COLUMNS = (
    *("known", "computed", "pending", "passed", "tenants", "slots", "last_input", "stops_from", "eos_from"),
    *("decoding", "alive", "_tail"),
)


class DecodeBatch:
    """Columns by seq_id, which own the counts and tokens of their sequences. Counts are in tokens, int32.

    Invariant of a decoding row: computed == known + pending - 1, and known >= computed when a step is planned, because
    no more than one token is promised then.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sequences: list[Seq | None] = []
        # Known tokens by row. Tokens after the latest full block may be in the ring `_tail` only.
        self._token_ids: list[array[int]] = []
        # Free rows, smallest first, so that rows in use stay close together.
        self._free: list[int] = []
        # Rows whose sequence was removed while a step in flight samples them.
        self._removed: set[int] = set()
        # By row: token ids that end the sequence, besides end-of-sequence.
        self._stops: dict[int, frozenset[int]] = {}
        self._decoding_rows: Rows | None = None
        # The latest result of `span`, and the rows that it is for.
        self._span: Rows | slice = slice(0)
        self._spanned: Rows | None = None
        self.known = np.zeros(0, np.int32)
        self.computed = np.zeros(0, np.int32)
        self.pending = np.zeros(0, np.int32)
        # Consecutive steps in which the decoding sequence was passed over.
        self.passed = np.zeros(0, np.int32)
        self.tenants = np.zeros(0, np.int32)
        # Positions that the block table has slots for.
        self.slots = np.zeros(0, np.int32)
        # Positions that are ever computed: one for each token except the last, which is sampled and ends the sequence.
        self.last_input = np.zeros(0, np.int32)
        # Known tokens from which a stop token, and end-of-sequence, end the sequence.
        self.stops_from = np.zeros(0, np.int32)
        self.eos_from = np.zeros(0, np.int32)
        # True while the sequence decodes one token per step.
        self.decoding = np.zeros(0, np.bool_)
        # False: tokens that arrive for the row are dropped, for example because its sequence has finished.
        self.alive = np.zeros(0, np.bool_)
        # A ring of the latest two blocks of tokens: position p is at [(p // block_size) % 2, p % block_size], so a
        # block's tokens stay until the next block is full.
        self._tail = np.zeros((0, 2, block_size), np.uint32)
        self._grow(64)

    def _grow(self, capacity: int) -> None:
        for seq_id in range(len(self._sequences), capacity):
            heapq.heappush(self._free, seq_id)
        self._sequences += [None] * (capacity - len(self._sequences))
        self._token_ids += [_NO_TOKENS] * (capacity - len(self._token_ids))
        for name in _COLUMNS:
            column = getattr(self, name)
            fresh = np.zeros((capacity, *column.shape[1:]), column.dtype)
            fresh[: len(column)] = column
            setattr(self, name, fresh)

    # -- life of a row

    def open(self, sequence: Seq) -> None:
        if not self._free:
            self._grow(2 * len(self._sequences))
        seq_id = heapq.heappop(self._free)
        self._sequences[seq_id] = sequence
        self._token_ids[seq_id] = sequence.own_token_ids()
        self.known[seq_id] = sequence.num_tokens
        self.computed[seq_id] = sequence.num_computed
        self.pending[seq_id] = self.passed[seq_id] = 0
        self.tenants[seq_id] = sequence.tenant
        self.alive[seq_id] = True
        sequence.seq_id, sequence.batch = seq_id, self

    def start_decoding(self, sequence: Seq) -> None:
        """Starts decoding: every known token is computed or planned and one token is promised, so the sequence takes
        part in every step from now on.
        """
        seq_id, known, size = sequence.seq_id, len(sequence.token_ids), self._block_size
        sampling = sequence.request.command.sampling
        self.pending[seq_id] = 1
        self.slots[seq_id] = len(sequence.block_table) * size
        self.last_input[seq_id] = sequence.max_total - 1
        least = self.stops_from[seq_id] = sequence.num_prompt + sampling.min_tokens
        self.eos_from[seq_id] = _NEVER if sampling.ignore_eos else least
        if sampling.stop_token_ids:
            self._stops[seq_id] = frozenset(sampling.stop_token_ids)
        start = max(0, known - 1) // size * size
        latest = np.frombuffer(sequence.token_ids, np.uint32, known - start, 4 * start)
        self._tail[seq_id, start // size & 1, : len(latest)] = latest
        self.decoding[seq_id] = True
        self._decoding_rows = None

    def expect_candidates(self, sequence: Seq) -> None:
        """Expects one answer for a beam; its sampled token is dropped, because the search chooses the next token."""
        self.pending[sequence.seq_id] = 1
        self.alive[sequence.seq_id] = False

    def drop_promised(self, sequence: Seq) -> None:
        """Drops the tokens that steps in flight promise to the sequence."""
        if sequence.seq_id != NO_SEQ_ID:
            self.alive[sequence.seq_id] = False

    def stop_decoding(self, sequence: Seq) -> None:
        """Ends decoding: the sequence takes part in no further step; promised tokens still arrive."""
        self.decoding[sequence.seq_id] = False
        self._decoding_rows = None

    def remove(self, sequence: Seq, *, finished: bool) -> None:
        """Removes the sequence. Its row is free at once, or when its promised tokens have arrived.

        Promised tokens of a finished sequence are dropped, those of a preempted sequence still count.
        """
        seq_id = sequence.seq_id
        self.stop_decoding(sequence)
        if finished:
            self.alive[seq_id] = False
        if self.pending[seq_id]:
            self._removed.add(seq_id)
        else:
            self._free_row(seq_id)

    def _free_row(self, seq_id: int) -> None:
        sequence = self._sequences[seq_id]
        assert sequence is not None
        self.token_ids(seq_id)
        sequence.seq_id, sequence.batch = NO_SEQ_ID, None
        sequence.num_computed = int(self.computed[seq_id])
        self._removed.discard(seq_id)
        self._sequences[seq_id] = None
        # Otherwise the tokens of an ended sequence would stay in memory until the row is used again, perhaps never.
        self._token_ids[seq_id] = _NO_TOKENS
        self.alive[seq_id] = False
        self._stops.pop(seq_id, None)
        heapq.heappush(self._free, seq_id)

    def settle(self) -> None:
        """Frees the rows of removed sequences whose promised tokens have all arrived."""
        if self._removed:
            for seq_id in [seq_id for seq_id in self._removed if not self.pending[seq_id]]:
                self._free_row(seq_id)

    def clear(self) -> None:
        """Frees every row after the executor was lost: promised tokens never arrive."""
        for seq_id, sequence in enumerate(self._sequences):
            if sequence is not None:
                self.pending[seq_id] = 0
                self.stop_decoding(sequence)
                self._free_row(seq_id)

    # -- whole steps

    def span(self, rows: Rows) -> Rows | slice:
        """An index into columns for these ascending rows: a slice, which copies nothing, if they are consecutive."""
        # In steady state every operation of a step passes the same array.
        if rows is not self._spanned:
            consecutive = len(rows) and rows[-1] - rows[0] + 1 == len(rows)
            self._spanned, self._span = rows, slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else rows
        return self._span

    def sequences(self, rows: Rows) -> list[Seq]:
        """The sequences in these rows, ascending, which must be in use."""
        at = self.span(rows)
        found = self._sequences[at] if isinstance(at, slice) else map(self._sequences.__getitem__, at.tolist())
        return list(found)  # type: ignore[arg-type]  # free rows alone have None

    def members(self) -> list[Seq]:
        """Every sequence that has a row, including removed ones that still have promised tokens."""
        return [sequence for sequence in self._sequences if sequence is not None]

    def member(self, seq_id: int) -> Seq:
        """The sequence in a row, which must be in use."""
        sequence = self._sequences[seq_id]
        assert sequence is not None
        return sequence

    def decoding_rows(self) -> Rows:
        """Rows that decode, ascending. Not to be changed by the caller."""
        if self._decoding_rows is None:
            self._decoding_rows = np.flatnonzero(self.decoding)
        return self._decoding_rows

    def exhausted(self, rows: Rows) -> Rows:
        """Decoding rows whose last allowed token is promised already."""
        at = self.span(rows)
        last = self.computed[at] >= self.last_input[at]
        return rows[last] if np.count_nonzero(last) else rows[:0]

    def full(self, rows: Rows) -> Rows:
        """Decoding rows that need a block for their next position."""
        at = self.span(rows)
        full = self.computed[at] == self.slots[at]
        return rows[full] if np.count_nonzero(full) else rows[:0]

    def promise(self, rows: Rows) -> Rows:
        """Plans one more position for each of these ascending rows, and promises a token. Returns the rows whose last
        block this position fills, if its token is known.
        """
        at = self.span(rows)
        computed, pending = self.computed[at], self.pending[at]
        completed = rows[:0]
        # With a step in flight most rows, often all, have a promised token.
        if np.count_nonzero(pending) < len(rows):
            completed = rows[(pending == 0) & (computed + 1 == self.slots[at])]
        self.computed[at] = computed + 1
        self.pending[at] = pending + 1
        return completed

    def append(self, rows: Rows, tokens: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Adds one token to each row, none finished; returns how many each knows now, which must not be changed."""
        room = 2 * self._block_size
        at = self.span(rows)
        # The ring has two blocks of tokens per row, used in turn.
        self._tail.reshape(-1)[rows * room + (self.known[at] & (room - 1))] = tokens
        self.known[at] += 1
        return self.known[at]

    def check_stop(
        self, rows: Rows, tokens: NDArray[np.uint32], known: NDArray[np.int32], eos: tuple[int, ...]
    ) -> dict[int, Ending]:
        """The rows that end with the token they just got, and why, by position in `rows`: it is their last allowed
        token, end-of-sequence, or one of their stop tokens. `known`: how many tokens each row has now.
        """
        full = known > self.last_input[self.span(rows)]
        # Faster than `np.isin` for a few ids.
        is_eos = np.zeros(len(tokens), np.bool_)
        for token in eos:
            is_eos |= tokens == token
        if np.count_nonzero(is_eos):
            is_eos &= known >= self.eos_from[rows]
        stopped: list[int] = []
        if self._stops:
            for position, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
                if token in self._stops.get(row, ()) and known[position] >= self.stops_from[row]:
                    stopped.append(position)
        if not (stopped or np.count_nonzero(full | is_eos)):
            return {}
        endings = {position: Ending(FinishReason.LENGTH) for position in np.flatnonzero(full).tolist()}
        for position in [*np.flatnonzero(is_eos).tolist(), *stopped]:
            endings[position] = Ending(FinishReason.STOP, int(tokens[position]))
        return endings

    def complete_blocks(self, rows: Rows) -> tuple[NDArray[np.uint32], list[bytes]]:
        """Tokens of the block that ends at each row's computed position, [len(rows), block_size], and the bytes of each
        block; rows in any order. Copies these tokens from the ring to the rows' token ids.
        """
        size, stride = self._block_size, TOKEN_BYTES * self._block_size
        starts = self.computed[rows] - size
        tokens: NDArray[np.uint32] = self._tail.reshape(-1, size)[2 * rows + (starts // size & 1)]
        raw = tokens.tobytes()
        blocks = [raw[at : at + stride] for at in range(0, len(raw), stride)]
        for row, start, block in zip(rows.tolist(), starts.tolist(), blocks, strict=True):
            token_ids = self._token_ids[row]
            del token_ids[start:]
            token_ids.frombytes(block)
        return tokens, blocks

    # -- single rows

    def token_ids(self, seq_id: int) -> array[int]:
        """Every token that the row knows."""
        tokens, known, size = self._token_ids[seq_id], int(self.known[seq_id]), self._block_size
        while (have := len(tokens)) < known:
            end = min(known, (have // size + 1) * size)
            begin = have % size
            tokens.frombytes(self._tail[seq_id, have // size & 1, begin : begin + end - have].tobytes())
        return tokens
