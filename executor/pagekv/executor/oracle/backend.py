"""The oracle backend: it checks every KV decision of the manager, without a model and without torch.

The "keys and values" of a slot are a token id and a 64-bit digest of the sequence up to that position. A step writes
the slots of the positions that it computes. Then it reads, through the block tables, every slot that attention would
read, and fails if a slot does not hold the prefix of its sequence. The next token is a function of the digests read.

A sequence does not read its full blocks again once they were found right. If a step or copy writes to such a block, all
sequences read again from their start. Such a write is either an error of the manager or restores equal contents. So the
time of a step grows with the number of sequences, not with their lengths.
"""

from __future__ import annotations

import hashlib
import platform
import time
from array import array
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend.interface import (
    LAYOUT,
    NOT_A_NUMBER,
    UNKNOWN_TOKEN,
    BackendDescription,
    BackendFeature,
    BlockCopies,
    CopyDirection,
    Finished,
    Launch,
    Sampled,
    Sampling,
    Scheduled,
    SequenceState,
)
from pagekv.executor.backend.sampling import banned_tokens
from pagekv.executor.oracle.reference import (
    FIRST,
    MASK,
    Numbers,
    Words,
    choose_tokens,
    extend_chains,
    likeliest,
    logprob_of,
    mix,
    num_kept,
    spread,
)

SLOT = np.dtype([("token", np.uint32), ("digest", np.uint64)])
# The content of an unwritten slot.
POISON = np.array((0xFFFF_FFFF, 0x5EED_0FDE_ADBE_EF00), SLOT)
# Without LOGIT_BIAS and PENALTIES: tokens come from digests, and there are no logits to change.
FEATURES = (BackendFeature.HOST_POOL, BackendFeature.LOGPROBS, BackendFeature.MIN_TOKENS)
SAMPLER = "oracle-1"
# The default pool: a million slots.
DEFAULT_KV_BYTES = SLOT.itemsize * 2**20


def _is_narrow(sampling: Sampling) -> bool:
    """Whether top-k, top-p or min-p may exclude tokens."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


class SlotError(Exception):
    """A sequence would read a slot that does not hold its prefix."""


@dataclass(frozen=True, slots=True)
class OracleModel:
    """The model that the oracle pretends to serve. Without a model directory, `model_id` is empty."""

    model_id: str = ""
    vocab_size: int = 512
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = (0,)
    # The fingerprint of the model directory; any text without a directory.
    fingerprint: str = ""


@dataclass(slots=True)
class _Reader:
    """The oracle's state of a live sequence."""

    state: SequenceState
    # The tokens of all positions computed so far; and the token sampled last, for which UNKNOWN_TOKEN stands.
    tokens: array[int] = field(default_factory=lambda: array("I"))
    latest: int = UNKNOWN_TOKEN
    # The leading positions, in full blocks, that were found right; the hash chain after them; the sum of their digests.
    found: int = 0
    chain: int = FIRST
    sum: int = 0

    def blocks(self, first: int, end: int, block_size: int) -> list[int]:
        return self.state.block_table[first // block_size : -(-end // block_size)]


@dataclass(frozen=True, slots=True)
class _Due:
    """The `Launch` of a step with a pretended duration: its tokens are known, and it lasts until `end`
    (perf_counter).
    """

    sampled: dict[int, Sampled]
    end: float
    sleep: Callable[[float], None]
    ready: ClassVar[bool] = False

    def collect(self) -> dict[int, Sampled]:
        if (left := self.end - time.perf_counter()) > 0:
            self.sleep(left)
        return self.sampled


class OracleBackend:
    """A `Backend` that checks. With `step_time_s` steps take as long as on a device: each lasts for that time from its
    launch or, if that is later, from the end of the step before.
    """

    def __init__(
        self,
        model: OracleModel,
        *,
        kv_bytes: int = DEFAULT_KV_BYTES,
        max_sequences: int = 1024,
        step_time_s: float = 0.0,
        failing: Container[int] = (),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`kv_bytes`: the most bytes of the device pool, and of the host pool. `failing`: tokens after which a sequence
        fails when it would sample, as if its logits were NaN.
        """
        self._model = model
        self._kv_bytes = kv_bytes
        self._max_sequences = max_sequences
        self._step_time_s = step_time_s
        self._sleep = sleep
        self._failing = failing
        self._block_size = 1
        # [num_blocks, block_size]
        self._device = self._host = np.full((0, 1), POISON)
        # By seq_id.
        self._readers: dict[int, _Reader] = {}
        # For each device block: how many sequences count it in their `found`.
        self._num_found = np.zeros(0, np.int64)
        # The begin and end of the step launched last, perf_counter.
        self._begin = self._end = 0.0

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        """Identity and bounds. Nothing is measured, so the token budget does not matter."""
        model = self._model
        # Not the model's fingerprint, because the oracle generates other tokens than the model.
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
            bytes_per_block=block_size * SLOT.itemsize,
            device_kv_bytes=self._kv_bytes,
            host_kv_bytes=self._kv_bytes,
            layout=LAYOUT,
            backend="oracle",
            eos_token_ids=model.eos_token_ids,
            max_sequences=self._max_sequences,
            versions={"python": platform.python_version(), "numpy": np.__version__},
            features=FEATURES,
            sampler=SAMPLER,
        )

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        """Replaces the pools by poisoned ones. Raises MemoryError if a pool exceeds its bound."""
        most = self._kv_bytes // (block_size * SLOT.itemsize)
        if max(num_device_blocks, num_host_blocks) > most:
            raise MemoryError(f"a pool may have {most} blocks of {block_size} slots, asked for {num_device_blocks}")
        self._block_size = block_size
        self._device = np.full((num_device_blocks, block_size), POISON)
        self._host = np.full((num_host_blocks, block_size), POISON)
        self._readers.clear()
        self._num_found = np.zeros(num_device_blocks, np.int64)

    def copy_blocks(self, copies: BlockCopies) -> None:
        source = self._host if copies.direction is CopyDirection.SWAP_IN else self._device
        destination = self._host if copies.direction is CopyDirection.SWAP_OUT else self._device
        if destination is self._device and self._num_found[copies.destinations].any():
            self._read_all_again()
        destination[copies.destinations] = source[copies.sources]

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        """Checks the step at once. If steps have a duration, the result comes later, and the call returns when the step
        before begins: at most one step waits while another runs.
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
        """Writes the step's slots, then reads all slots that its positions depend on. Raises SlotError on a wrong slot.

        All writes come before all reads, because every layer of a model writes the keys and values of the whole step
        before it attends: a sequence may read slots that another sequence computes in the same step.
        """
        readers = [self._reader(item) for item in scheduled]
        sums = self._write_and_read(readers, np.array([item.start for item in scheduled]))
        sampling = [at for at, item in enumerate(scheduled) if item.samples]
        return self._sample([readers[at] for at in sampling], sums[sampling]) if sampling else {}

    def finish(self, states: list[SequenceState]) -> None:
        """Drops the state of these sequences."""
        for state in states:
            reader = self._readers.pop(state.seq_id, None)
            if reader is not None:
                self._num_found[reader.blocks(0, reader.found, self._block_size)] -= 1

    def is_lost(self, error: Exception) -> bool:
        """False: there is no device."""
        return False

    def _reader(self, item: Scheduled) -> _Reader:
        """The state of a sequence, with the tokens that this step computes added."""
        state = item.state
        reader = self._readers.get(state.seq_id)
        if reader is None or reader.state is not state:
            self.finish([state])
            reader = self._readers[state.seq_id] = _Reader(state)
        tokens = list(state.token_ids[len(reader.tokens) : item.start + item.count])
        # Only the last token can be unknown: earlier ones were added in earlier steps.
        if tokens[-1] == UNKNOWN_TOKEN:
            tokens[-1] = reader.latest
        reader.tokens.extend(tokens)
        return reader

    def _read_all_again(self) -> None:
        self._num_found[:] = 0
        for reader in self._readers.values():
            reader.found, reader.chain, reader.sum = 0, FIRST, 0

    def _write_and_read(self, readers: list[_Reader], starts: Numbers) -> Words:
        """Writes the positions from `starts` on, then reads all positions after `found`. Returns the sum of the digests
        of all positions of each sequence, shape [len(readers)].
        """
        size, pool = self._block_size, self._device.reshape(-1)
        begins = np.array([reader.found for reader in readers])
        ends = np.array([len(reader.tokens) for reader in readers])
        rows, places, firsts = spread(ends - begins)
        tables = [reader.blocks(reader.found, len(reader.tokens), size) for reader in readers]
        blocks = np.array([block for table in tables for block in table])
        first_blocks = spread(np.array(list(map(len, tables))))[2]
        slots = blocks[first_blocks[rows] + places // size] * size + places % size
        written = places >= (starts - begins)[rows]
        if self._num_found[slots[written] // size].any():
            self._read_all_again()
            return self._write_and_read(readers, starts)
        expected = np.empty(len(rows), SLOT)
        expected["token"] = np.frombuffer(b"".join([r.tokens[r.found :] for r in readers]), np.uint32)
        states = np.array([reader.chain for reader in readers], np.uint64)
        chains = extend_chains(states, expected["token"].astype(np.uint64), ends - begins)
        expected["digest"] = mix(chains)
        pool[slots[written]] = expected[written]
        wrong = pool[slots] != expected
        if wrong.any():
            at = int(np.argmax(wrong))
            reader = readers[rows[at]]
            raise self._slot_error(reader.state, reader.found + int(places[at]), int(slots[at]), expected[at])
        sums: Words = np.add.reduceat(expected["digest"], firsts) + np.array([r.sum for r in readers], np.uint64)
        full = ends - ends % size
        for row in np.flatnonzero(full > begins).tolist():
            reader, first = readers[row], int(firsts[row])
            last = first + int(full[row] - begins[row])
            self._num_found[reader.blocks(reader.found, int(full[row]), size)] += 1
            reader.found, reader.chain = int(full[row]), int(chains[last - 1])
            reader.sum = (reader.sum + int(expected["digest"][first:last].sum())) & MASK
        return sums

    def _slot_error(self, state: SequenceState, position: int, slot: int, expected: np.void) -> SlotError:
        found = self._device.reshape(-1)[slot]
        if found == POISON:
            what = "nothing was ever written there"
        elif found["token"] == expected["token"]:
            what = f"found this token after another prefix (digest {found['digest']:016x})"
        else:
            what = f"found token {found['token']} of another sequence or position (digest {found['digest']:016x})"
        return SlotError(
            f"sequence {state.seq_id} position {position} "
            f"(block {slot // self._block_size} slot {slot % self._block_size}): "
            f"expected token {expected['token']} (digest {expected['digest']:016x}), {what}"
        )

    def _sample(self, readers: list[_Reader], reads: Words) -> dict[int, Sampled]:
        """A token for each of these sequences. `reads`: sums of digests, [len(readers)]."""
        states = [reader.state for reader in readers]
        drawing = np.array([state.sampling.temperature > 0 for state in states])
        chosen, draws = (words.tolist() for words in self._choose(reads, states, drawing))
        likely: list[tuple[int, int]] = []
        narrow = [at for at in np.flatnonzero(drawing).tolist() if _is_narrow(states[at].sampling)]
        if narrow or any(state.sampling.logprobs is not None for state in states):
            # Log-probabilities depend on the prefix alone, not on draws or bans.
            greedy, drawn = self._choose(reads, states, np.zeros_like(drawing))
            likely = list(zip(greedy.tolist(), drawn.tolist(), strict=True))
        sampled, vocab_size = {}, self._model.vocab_size
        for at in narrow:
            chosen[at] = (likely[at][0] + draws[at] % num_kept(states[at].sampling, vocab_size)) % vocab_size
        for at, (reader, token) in enumerate(zip(readers, chosen, strict=True)):
            state, num_logprobs = reader.state, reader.state.sampling.logprobs
            if reader.tokens[-1] in self._failing:
                reader.latest, sampled[state.seq_id] = 0, NOT_A_NUMBER
                continue
            banned = banned_tokens(state, vocab_size)
            while token in banned:
                token = (token + 1) % vocab_size
            reader.latest = token
            if num_logprobs is None:
                sampled[state.seq_id] = Sampled(token)
            else:
                logprob = logprob_of(token, *likely[at], vocab_size)
                sampled[state.seq_id] = Sampled(token, logprob, likeliest(*likely[at], vocab_size, num_logprobs))
        return sampled

    def _choose(self, reads: Words, states: list[SequenceState], drawing: npt.NDArray[np.bool_]) -> tuple[Words, Words]:
        return choose_tokens(
            reads,
            np.array([len(state.token_ids) for state in states], np.uint64),
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            drawing=drawing,
            seeds=np.array([state.sampling.seed for state in states], np.uint64),
            indices=np.array([state.sampling.sequence_index for state in states], np.uint64),
        )
