"""The oracle backend: no model and no torch, but every KV decision of the manager is judged.

"Keys and values" are, per slot, a token id and a 64-bit digest of the sequence up to there. A step writes the slots of
the positions it computes, then reads, through the block tables, every slot that attention would read, and fails when
one holds anything but the prefix of its sequence. The next token is a function of the digests read.

Full blocks that a sequence has found right once are read again only after a write to one of them: every write sets its
number on its blocks. So the time of a step grows with its sequences and, a little, with their blocks.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend.interface import (
    BackendDescription,
    BlockCopies,
    CopyDirection,
    Finished,
    Launch,
    Sampled,
    Scheduled,
    SequenceState,
)
from pagekv.executor.backend.layout import LAYOUT
from pagekv.executor.oracle.expected_slots import ExpectedSlots, Numbers, spread
from pagekv.executor.oracle.reference import Words, choose_token, choose_tokens, likeliest

# Contents of an unwritten slot.
POISON_TOKEN = 0xFFFF_FFFF
POISON_DIGEST = 0x5EED_0FDE_ADBE_EF00
BYTES_PER_SLOT = 4 + 8
# The default pool: a million slots.
DEFAULT_KV_BYTES = BYTES_PER_SLOT * 2**20


class SlotError(Exception):
    """A sequence would read a slot that does not hold the sequence's prefix."""


@dataclass(frozen=True, slots=True)
class OracleModel:
    """The model in whose name the oracle answers. Without a model directory, `model_id` is empty."""

    model_id: str = ""
    vocab_size: int = 512
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = (0,)
    # Fingerprint of the model directory; any text without a directory.
    fingerprint: str = ""


@dataclass(slots=True)
class _Pool:
    """Slots of a pool, of shape [num_blocks, block_size]; and the number of the latest write to each block."""

    tokens: npt.NDArray[np.uint32]
    digests: Words
    written: Numbers

    @classmethod
    def poisoned(cls, num_blocks: int, block_size: int) -> _Pool:
        shape = (num_blocks, block_size)
        poisons = np.full(shape, POISON_TOKEN, np.uint32), np.full(shape, POISON_DIGEST, np.uint64)
        return cls(*poisons, np.zeros(num_blocks, np.int64))


@dataclass(frozen=True, slots=True)
class _Due:
    """The `Launch` of a step whose tokens are there already and that lasts until a time (perf_counter)."""

    sampled: dict[int, Sampled]
    end: float
    sleep: Callable[[float], None]

    @property
    def ready(self) -> bool:
        return False

    def collect(self) -> dict[int, Sampled]:
        if (left := self.end - time.perf_counter()) > 0:
            self.sleep(left)
        return self.sampled


class OracleBackend:
    """A `Backend` that judges. With `step_time_s` steps take a device's time: each lasts for so long from when it was
    launched, or from the end of the one before.
    """

    def __init__(
        self,
        model: OracleModel,
        *,
        kv_bytes: int = DEFAULT_KV_BYTES,
        max_sequences: int = 1024,
        step_time_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`kv_bytes` bounds the device pool, and the host pool by as much again."""
        self._model = model
        self._kv_bytes = kv_bytes
        self._max_sequences = max_sequences
        self._step_time_s = step_time_s
        self._sleep = sleep
        self._block_size = 1
        self._device = _Pool.poisoned(0, 1)
        self._host = _Pool.poisoned(0, 1)
        self._rows = ExpectedSlots(1)
        # Writes to the device pool so far.
        self._writes = 0
        # When the last step launched begins and ends, perf_counter.
        self._begin = self._end = 0.0

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        """Identity and bounds; nothing is measured, so the budget does not matter."""
        model = self._model
        # Another fingerprint than the model's: the oracle generates other tokens than the model would.
        identity = f"oracle {model.fingerprint} {model.vocab_size} {model.eos_token_ids}"
        return BackendDescription(
            model_id=model.model_id,
            model_fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
            num_layers=1,
            num_kv_heads=1,
            head_size=1,
            kv_dtype="digest",
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            bytes_per_block=block_size * BYTES_PER_SLOT,
            device_kv_bytes=self._kv_bytes,
            host_kv_bytes=self._kv_bytes,
            layout=LAYOUT,
            backend="oracle",
            eos_token_ids=model.eos_token_ids,
            max_sequences=self._max_sequences,
            versions={"python": platform.python_version(), "numpy": np.__version__},
        )

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        """Replaces the pools by poisoned ones. Raises MemoryError beyond the bound."""
        most = self._kv_bytes // (block_size * BYTES_PER_SLOT)
        if max(num_device_blocks, num_host_blocks) > most:
            raise MemoryError(f"a pool may have {most} blocks of {block_size} slots, asked for {num_device_blocks}")
        self._block_size = block_size
        self._device = _Pool.poisoned(num_device_blocks, block_size)
        self._host = _Pool.poisoned(num_host_blocks, block_size)
        self._rows = ExpectedSlots(block_size)

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies tokens and digests of whole blocks."""
        source = self._host if copies.direction is CopyDirection.SWAP_IN else self._device
        destination = self._host if copies.direction is CopyDirection.SWAP_OUT else self._device
        self._writes += 1
        destination.tokens[copies.destinations] = source.tokens[copies.sources]
        destination.digests[copies.destinations] = source.digests[copies.sources]
        destination.written[copies.destinations] = self._writes

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        """The step is judged at once. Where steps have a time, the result comes later, and the call returns when the
        step before begins: at most one step waits behind the one that runs.
        """
        if not self._step_time_s:
            return Finished(self.execute(scheduled))
        if (left := self._begin - time.perf_counter()) > 0:
            self._sleep(left)
        self._begin = max(time.perf_counter(), self._end)
        sampled = self.execute(scheduled)
        self._end = self._begin + self._step_time_s
        return _Due(sampled, self._end, self._sleep)

    def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
        """Writes, then reads everything the step's positions depend on. Raises SlotError on a wrong slot.

        All writes come before all reads, as every layer of a model writes the keys and values of the whole step before
        it attends: a sequence may read what another one computes in the same step.
        """
        rows = np.array([self._rows.row(item.state) for item in scheduled], np.int64)
        starts = np.array([item.start for item in scheduled], np.int64)
        ends = starts + np.array([item.count for item in scheduled], np.int64)
        self._rows.grow(rows, ends)
        self._write(rows, starts, ends)
        return self._sample_all(scheduled, rows, ends, self._read(rows, ends))

    def finish(self, states: list[SequenceState]) -> None:
        """Frees the rows of these sequences."""
        for state in states:
            self._rows.remove(state)

    def is_lost(self, error: Exception) -> bool:
        """False: there is no device."""
        return False

    def _write(self, rows: Numbers, starts: Numbers, ends: Numbers) -> None:
        of_rows, positions, _ = spread(rows, starts, ends)
        slots = self._rows.slots(of_rows, positions)
        self._writes += 1
        self._device.tokens.reshape(-1)[slots] = self._rows.tokens[of_rows, positions]
        self._device.digests.reshape(-1)[slots] = self._rows.digests[of_rows, positions]
        self._device.written[slots // self._block_size] = self._writes

    def _read(self, rows: Numbers, ends: Numbers) -> Words:
        """The sum of the digests each sequence reads, shape [len(rows)], all of them found right."""
        known = self._rows
        self._invalidate_rewritten(rows[known.found[rows] > 0])
        of_rows, positions, firsts = spread(rows, known.found[rows], ends)
        slots = known.slots(of_rows, positions)
        tokens = self._device.tokens.reshape(-1)[slots]
        digests = self._device.digests.reshape(-1)[slots]
        wrong = (tokens != known.tokens[of_rows, positions]) | (digests != known.digests[of_rows, positions])
        if wrong.any():
            at = int(np.argmax(wrong))
            raise self._slot_error(int(of_rows[at]), int(positions[at]), int(tokens[at]), int(digests[at]))
        sums: Words = np.add.reduceat(digests, firsts) + known.found_sum[rows]
        self._note_found(rows, ends)
        return sums

    def _invalidate_rewritten(self, rows: Numbers) -> None:
        """Rows with a block that was written to since it was found right are read from the start again."""
        if not len(rows):
            return
        known, size = self._rows, self._block_size
        of_rows, places, firsts = spread(rows, np.zeros_like(rows), known.found[rows] // size)
        written = self._device.written[known.blocks[of_rows, places]]
        rewritten = rows[np.maximum.reduceat(written, firsts) > known.found_after[rows]]
        known.found[rewritten] = known.found_sum[rewritten] = 0

    def _note_found(self, rows: Numbers, ends: Numbers) -> None:
        """Keeps that every full block of these rows was found right, up to `ends`."""
        known = self._rows
        known.found_after[rows] = self._writes
        full = ends - ends % self._block_size
        more = full > known.found[rows]
        if more.any():
            rows, full = rows[more], full[more]
            of_rows, positions, firsts = spread(rows, known.found[rows], full)
            known.found_sum[rows] += np.add.reduceat(known.digests[of_rows, positions], firsts)
            known.found[rows] = full

    def _slot_error(self, row: int, position: int, token: int, digest: int) -> SlotError:
        known = self._rows
        block, offset = int(known.blocks[row, position // self._block_size]), position % self._block_size
        expected, expected_digest = int(known.tokens[row, position]), int(known.digests[row, position])
        if (token, digest) == (POISON_TOKEN, POISON_DIGEST):
            what = "nothing was ever written there"
        elif token == expected:
            what = f"found this token after another prefix (digest {digest:016x})"
        else:
            what = f"found token {token} of another sequence or position (digest {digest:016x})"
        return SlotError(
            f"sequence {known.state(row).seq_id} position {position} (block {block} slot {offset}): "
            f"expected token {expected} (digest {expected_digest:016x}), {what}"
        )

    def _sample_all(self, scheduled: list[Scheduled], rows: Numbers, ends: Numbers, read: Words) -> dict[int, Sampled]:
        """A token for each sequence whose last known token was computed. `read`: sums of digests, [len(scheduled)]."""
        known = self._rows
        lengths = np.array([len(item.state.token_ids) for item in scheduled], np.int64)
        sampling = np.flatnonzero(ends == lengths)
        plain = sampling[known.plain[rows[sampling]]]
        tokens = choose_tokens(
            read[plain],
            lengths[plain].astype(np.uint64),
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            drawing=known.drawing[rows[plain]],
            seeds=known.seed[rows[plain]],
            indices=known.index[rows[plain]],
        )
        known.latest[rows[plain]] = tokens
        sampled = dict(zip(plain.tolist(), map(Sampled, tokens.tolist()), strict=True))
        for at in sampling[~known.plain[rows[sampling]]].tolist():
            sampled[at] = self._sample(scheduled[at].state, int(read[at]))
            known.latest[rows[at]] = sampled[at].token_id
        return {scheduled[at].state.seq_id: sampled[at] for at in sampling.tolist()}

    def _sample(self, state: SequenceState, read: int) -> Sampled:
        sampling, model = state.sampling, self._model
        num_output = len(state.token_ids) - state.num_prompt_tokens
        token, drawn = choose_token(
            read,
            len(state.token_ids),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            banned=sampling.banned_until_min if num_output < sampling.min_tokens else (),
            temperature=sampling.temperature,
            seed=sampling.seed,
            sequence_index=sampling.sequence_index,
        )
        if sampling.logprobs is None:
            return Sampled(token)
        top = likeliest(token, drawn, model.vocab_size, max(1, sampling.logprobs))
        return Sampled(token, top[0][1], top[: sampling.logprobs])
