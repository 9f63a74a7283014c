"""The oracle backend: no model and no torch, but it knows whether every KV decision of the manager was right.

Its "keys and values" are, per slot, a token id and a 64-bit digest of the sequence up to it. Every step it writes the
slots of the positions it computes, then reads, through the block tables, every slot that attention would read, and
fails when one holds anything but this sequence's own prefix. The next token is a function of what it read.

Full blocks that a sequence has found right once are read again only after a write to one of them, by whomever: every
write leaves its number on its blocks. So a step takes time by its sequences, and not by their lengths.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend import (
    BlockCopies,
    CopyKind,
    Description,
    Sampled,
    Scheduled,
    SequenceState,
    SynchronousBackend,
)
from pagekv.executor.layout import LAYOUT
from pagekv.executor.oracle_truth import (
    FIRST,
    MASK,
    Words,
    choose_token,
    choose_tokens,
    expected_tokens,
    extend_chain,
    extend_chains,
    likeliest,
    mix,
)

__all__ = ["DEFAULT_KV_BYTES", "OracleBackend", "OracleModel", "SlotError", "expected_tokens"]

# What an unwritten slot holds.
POISON_TOKEN = 0xFFFF_FFFF
POISON_DIGEST = 0x5EED_0FDE_ADBE_EF00
BYTES_PER_SLOT = 4 + 8
# The default pool: a million slots.
DEFAULT_KV_BYTES = BYTES_PER_SLOT * 2**20


class SlotError(Exception):
    """A sequence would read a slot that does not hold its own prefix."""


@dataclass(frozen=True, slots=True)
class OracleModel:
    """What the oracle says it is. Without a model directory, `model_id` is empty."""

    model_id: str = ""
    vocab_size: int = 512
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = (0,)
    # Of the model directory; anything at all without one.
    fingerprint: str = ""


@dataclass(slots=True)
class _Pool:
    """Slots of a pool, of shape [num_blocks, block_size]; and the number of the latest write to each block."""

    tokens: npt.NDArray[np.uint32]
    digests: Words
    written: npt.NDArray[np.int64]

    @classmethod
    def poisoned(cls, num_blocks: int, block_size: int) -> _Pool:
        shape = (num_blocks, block_size)
        poisons = np.full(shape, POISON_TOKEN, np.uint32), np.full(shape, POISON_DIGEST, np.uint64)
        return cls(*poisons, np.zeros(num_blocks, np.int64))


class _Truth:
    """What the slots of one sequence must hold, and where they are; grows with the sequence."""

    def __init__(self, state: SequenceState, block_size: int) -> None:
        self.state = state
        self._block_size = block_size
        self._length = 0
        self._chain = FIRST
        self._tokens = np.empty(64, np.uint32)
        self._digests = np.empty(64, np.uint64)
        # Slot of every position: block * block_size + offset, by the block table.
        self._slots = np.empty(64, np.int64)
        # Leading positions, of full blocks, that have been found right; the sum of their digests; and the number of
        # the latest write before that.
        self.found = 0
        self.found_sum = 0
        self.found_after = 0
        sampling = state.sampling
        # Whether `choose_tokens` can do it, and what of the sampling it takes.
        self.plain = sampling.logprobs is None and not (sampling.min_tokens and sampling.banned_until_min)
        self.drawing = sampling.temperature > 0
        self.seed = mix(sampling.seed)
        self.index = mix(sampling.sequence_index)

    @property
    def length(self) -> int:
        """Positions covered."""
        return self._length

    @property
    def chain(self) -> int:
        """The state of the chain behind them."""
        return self._chain

    def append(self, token: int, digest: int, chain: int) -> None:
        """Covers one more position, whose digest and chain are known."""
        at, size = self._length, self._block_size
        if at == len(self._tokens):
            self._widen(2 * at)
        block, offset = divmod(at, size)
        self._tokens[at], self._digests[at] = token, digest
        self._slots[at] = self.state.block_table[block] * size + offset
        self._length, self._chain = at + 1, chain

    def grow(self, length: int) -> None:
        """Covers positions [0, length)."""
        begin = self._length
        if length <= begin:
            return
        if length > len(self._tokens):
            self._widen(max(length, 2 * len(self._tokens)))
        tokens = self.state.token_ids[begin:length]
        self._tokens[begin:length] = tokens
        self._digests[begin:length], self._chain = extend_chain(self._chain, tokens)
        size, table = self._block_size, self.state.block_table
        first = begin // size
        blocks = np.array(table[first : (length - 1) // size + 1], np.int64)
        positions = np.arange(begin, length)
        self._slots[begin:length] = blocks[positions // size - first] * size + positions % size
        self._length = length

    def _widen(self, capacity: int) -> None:
        self._tokens = np.resize(self._tokens, capacity)
        self._digests = np.resize(self._digests, capacity)
        self._slots = np.resize(self._slots, capacity)

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.uint32]:
        return self._tokens[begin:end]

    def digests(self, begin: int, end: int) -> Words:
        return self._digests[begin:end]

    def slots(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        return self._slots[begin:end]


class OracleBackend(SynchronousBackend):
    """A `Backend` that judges. `step_time_s` and `token_time_s` make a step last at least so long (and so much more
    per computed token), as a device would.
    """

    def __init__(
        self,
        model: OracleModel,
        *,
        kv_bytes: int = DEFAULT_KV_BYTES,
        max_sequences: int = 1024,
        step_time_s: float = 0.0,
        token_time_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`kv_bytes` bounds the device pool, and the host pool by as much again."""
        self._model = model
        self._kv_bytes = kv_bytes
        self._max_sequences = max_sequences
        self._step_time_s = step_time_s
        self._token_time_s = token_time_s
        self._sleep = sleep
        self._block_size = 1
        self._device = _Pool.poisoned(0, 1)
        self._host = _Pool.poisoned(0, 1)
        self._truths: dict[int, _Truth] = {}
        # Writes to the device pool so far.
        self._writes = 0

    def describe(self, block_size: int, token_budget: int) -> Description:
        """Identity and bounds; nothing is measured, so the budget does not matter."""
        model = self._model
        # Another fingerprint than the model's own: the oracle goes on in other words than the model would.
        identity = f"oracle {model.fingerprint} {model.vocab_size} {model.eos_token_ids}"
        return Description(
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
        self._truths = {}

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies tokens and digests of whole blocks."""
        source = self._host if copies.kind is CopyKind.SWAP_IN else self._device
        destination = self._host if copies.kind is CopyKind.SWAP_OUT else self._device
        self._writes += 1
        destination.tokens[copies.destinations] = source.tokens[copies.sources]
        destination.digests[copies.destinations] = source.digests[copies.sources]
        destination.written[copies.destinations] = self._writes

    def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
        """Writes, then reads everything the step's positions depend on. Raises SlotError on a wrong slot.

        All writes come before all reads, as every layer of a model writes the keys and values of the whole step before
        it attends: a sequence may read what another one computes in the same step.
        """
        begin = time.perf_counter()
        truths = [self._truth(item.state) for item in scheduled]
        ends = [item.start + item.count for item in scheduled]
        _grow(truths, ends)
        self._write(scheduled, truths, ends)
        read = self._read(truths, ends)
        sampled = self._sample_all(scheduled, truths, read)
        if len(self._truths) > 2 * len(scheduled) + 64:
            self._truths = {truth.state.seq_id: truth for truth in truths}
        target = self._step_time_s + self._token_time_s * sum(item.count for item in scheduled)
        if (left := target - (time.perf_counter() - begin)) > 0:
            self._sleep(left)
        return sampled

    def checksum(self) -> str:
        """A digest of both pools, for tests that nothing was touched."""
        digest = hashlib.sha256()
        for pool in (self._device, self._host):
            digest.update(pool.tokens.tobytes())
            digest.update(pool.digests.tobytes())
        return digest.hexdigest()

    def _truth(self, state: SequenceState) -> _Truth:
        truth = self._truths.get(state.seq_id)
        if truth is None or truth.state is not state:
            truth = self._truths[state.seq_id] = _Truth(state, self._block_size)
        return truth

    def _write(self, scheduled: list[Scheduled], truths: list[_Truth], ends: list[int]) -> None:
        spans = [(truth, item.start, end) for item, truth, end in zip(scheduled, truths, ends, strict=True)]
        slots = np.concatenate([truth.slots(begin, end) for truth, begin, end in spans])
        self._writes += 1
        self._device.tokens.reshape(-1)[slots] = np.concatenate([t.tokens(begin, end) for t, begin, end in spans])
        self._device.digests.reshape(-1)[slots] = np.concatenate([t.digests(begin, end) for t, begin, end in spans])
        self._device.written[slots // self._block_size] = self._writes

    def _read(self, truths: list[_Truth], ends: list[int]) -> Words:
        """The sum of the digests each sequence reads, shape [len(truths)], all of them found right."""
        self._forget_rewritten(truths)
        spans = [(truth, truth.found, end) for truth, end in zip(truths, ends, strict=True)]
        slots = np.concatenate([truth.slots(begin, end) for truth, begin, end in spans])
        tokens = self._device.tokens.reshape(-1)[slots]
        digests = self._device.digests.reshape(-1)[slots]
        wrong = tokens != np.concatenate([truth.tokens(begin, end) for truth, begin, end in spans])
        wrong |= digests != np.concatenate([truth.digests(begin, end) for truth, begin, end in spans])
        firsts = np.cumsum([0, *(end - begin for _, begin, end in spans[:-1])])
        if wrong.any():
            at = int(np.argmax(wrong))
            row = int(np.searchsorted(firsts, at, side="right")) - 1
            truth, begin, _ = spans[row]
            raise self._slot_error(truth, begin + at - int(firsts[row]), int(tokens[at]), int(digests[at]))
        sums: Words = np.add.reduceat(digests, firsts) + np.array([truth.found_sum for truth in truths], np.uint64)
        self._note_found(truths, ends)
        return sums

    def _forget_rewritten(self, truths: list[_Truth]) -> None:
        """Has those read from the start again of whose blocks one has been written to since they were found right."""
        size = self._block_size
        known = [truth for truth in truths if truth.found]
        if not known:
            return
        counts = np.array([truth.found // size for truth in known])
        blocks = np.concatenate([truth.slots(0, truth.found)[::size] for truth in known]) // size
        newest = np.maximum.reduceat(self._device.written[blocks], np.cumsum(counts) - counts)
        for truth, written in zip(known, newest.tolist(), strict=True):
            if written > truth.found_after:
                truth.found = truth.found_sum = 0

    def _note_found(self, truths: list[_Truth], ends: list[int]) -> None:
        """Every full block was found right: new ones count from now on."""
        for truth, end in zip(truths, ends, strict=True):
            truth.found_after = self._writes
            full = end - end % self._block_size
            if full > truth.found:
                more = int(truth.digests(truth.found, full).sum(dtype=np.uint64))
                truth.found, truth.found_sum = full, (truth.found_sum + more) & MASK

    def _slot_error(self, truth: _Truth, position: int, token: int, digest: int) -> SlotError:
        block, offset = divmod(int(truth.slots(position, position + 1)[0]), self._block_size)
        expected = int(truth.tokens(position, position + 1)[0])
        expected_digest = int(truth.digests(position, position + 1)[0])
        if (token, digest) == (POISON_TOKEN, POISON_DIGEST):
            what = "nothing was ever written there"
        elif token == expected:
            what = f"found this token after another prefix (digest {digest:016x})"
        else:
            what = f"found token {token} of another sequence or position (digest {digest:016x})"
        return SlotError(
            f"sequence {truth.state.seq_id} position {position} (block {block} slot {offset}): "
            f"expected token {expected} (digest {expected_digest:016x}), {what}"
        )

    def _sample_all(self, scheduled: list[Scheduled], truths: list[_Truth], read: Words) -> dict[int, Sampled]:
        """A token for everyone whose last known token was computed, by what it read, shape [len(scheduled)]."""
        sampling = [row for row, item in enumerate(scheduled) if item.samples]
        plain = [row for row in sampling if truths[row].plain]
        tokens = choose_tokens(
            read[plain],
            np.array([len(truths[row].state.token_ids) for row in plain], np.uint64),
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            drawing=np.array([truths[row].drawing for row in plain], np.bool_),
            seeds=np.array([truths[row].seed for row in plain], np.uint64),
            indices=np.array([truths[row].index for row in plain], np.uint64),
        ).tolist()
        chosen = {row: Sampled(token) for row, token in zip(plain, tokens, strict=True)}
        return {
            truths[row].state.seq_id: chosen.get(row) or self._sample(truths[row].state, int(read[row]))
            for row in sampling
        }

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


def _grow(truths: list[_Truth], ends: list[int]) -> None:
    """Covers positions [0, end) of each. Decodes, by one position each, all at once."""
    decodes = []
    for truth, end in zip(truths, ends, strict=True):
        if end == truth.length + 1:
            decodes.append(truth)
        else:
            truth.grow(end)
    tokens = [truth.state.token_ids[truth.length] for truth in decodes]
    chains = np.array([truth.chain for truth in decodes], np.uint64)
    digests, chains = extend_chains(chains, np.array(tokens, np.uint64))
    for truth, token, digest, chain in zip(decodes, tokens, digests.tolist(), chains.tolist(), strict=True):
        truth.append(token, digest, chain)
