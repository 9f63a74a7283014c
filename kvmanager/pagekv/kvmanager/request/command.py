"""A request as the manager knows it after validation, and the stream of what becomes of it. No protobuf."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, overload

from pagekv.kvmanager.request.wakeups import Fanout

T = TypeVar("T")


class FinishReason(Enum):
    """Why a sequence ended; names as in the contract."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked and complete sampling parameters; meanings and bounds as in types.proto."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    # 0: no beam search, and the two below mean nothing.
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False

    def end_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end a sequence, of a model whose own are `eos_token_ids`."""
        return frozenset(self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_token_ids))


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Prompt positions [position, position + length) stand for a medium whose content has this digest."""

    position: int
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What a block's identity covers besides its tokens, and whether the request reads and writes the cache."""

    namespace: str = ""
    adapter_id: str = ""
    media: tuple[MediaSpan, ...] = ()
    read: bool = True
    write: bool = True


@dataclass(frozen=True, slots=True)
class GenerateCommand:
    """One validated Generate call. The last `resumed_tokens` of `prompt_ids` count as output."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    resumed_tokens: int = 0
    identity: CacheIdentity = CacheIdentity()
    priority: int = 0
    # Of the model it was read for; empty: any.
    model_fingerprint: str = ""
    # W3C traceparent of the span of its caller; unchecked, and empty where there is none.
    trace_parent: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position; `top` are (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class KeptLogprobs(Sequence[TokenLogprobs]):
    """TokenLogprobs of many positions, in 8 bytes for each of their tokens: what nobody has read yet is kept as this.

    Values are rounded to 32 bits, as both wires carry them.
    """

    __slots__ = ("_ends", "_ids", "_values")

    def __init__(self, positions: Iterable[TokenLogprobs] = ()) -> None:
        # Of each position the chosen token and then the likeliest ones.
        self._ids, self._values = array("I"), array("f")
        # Where each position ends in the two.
        self._ends = array("I")
        self.extend(positions)

    def append(self, position: TokenLogprobs) -> None:
        """Adds a position."""
        self._ids.append(position.token_id)
        self._values.append(position.logprob)
        for token_id, logprob in position.top:
            self._ids.append(token_id)
            self._values.append(logprob)
        self._ends.append(len(self._ids))

    def extend(self, positions: Iterable[TokenLogprobs]) -> None:
        """Adds positions."""
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if isinstance(index, slice):
            whole = index.indices(len(self)) == (0, len(self), 1)
            return self if whole else KeptLogprobs(self[at] for at in range(*index.indices(len(self))))
        at = range(len(self))[index]
        begin, end = self._ends[at - 1] if at else 0, self._ends[at]
        top = zip(self._ids[begin + 1 : end], self._values[begin + 1 : end], strict=True)
        return TokenLogprobs(self._ids[begin], self._values[begin], tuple(top))


@dataclass(slots=True)
class SequenceDelta:
    """What happened to one sequence since the reader last looked. Tokens are a delta, counts are cumulative."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: Sequence[TokenLogprobs] = ()
    cached_tokens: int = 0
    preemptions: int = 0
    finish: FinishReason | None = None
    # The end-of-sequence or stop token that ended it; the last of token_ids.
    stop_token_id: int | None = None
    # Sum over all of its tokens; of beam search alone, with the finish.
    cumulative_logprob: float | None = None


class RequestStream:
    """Engine loop to handler: one delta per sequence, coalesced until the reader takes it.

    The engine never waits for a reader: what a slow reader has not taken grows into one delta, bounded by max_tokens.
    """

    def __init__(self, request_id: str, num_sequences: int, fanout: Fanout | None = None) -> None:
        """`fanout` wakes the reader; streams of one engine share it. None: one of its own."""
        self.request_id = request_id
        self._fanout = fanout or Fanout()
        self._pending: dict[int, SequenceDelta] = {}
        # The reader while it waits for news. From then on it waits for its turn.
        self._reader: asyncio.Future[None] | None = None
        self._open = set(range(num_sequences))
        self._error: Exception | None = None
        # What the reader makes of the deltas.
        self._make_of: Callable[[list[SequenceDelta]], Any] = list

    def push(self, delta: SequenceDelta) -> None:
        """Adds a delta; called by the engine loop."""
        held = self._pending.get(delta.index)
        if held is None:
            self._pending[delta.index] = delta
        else:
            held.token_ids += delta.token_ids
            for logprobs in delta.logprobs:
                self.push_logprobs(delta.index, logprobs)
            held.cached_tokens, held.preemptions = delta.cached_tokens, delta.preemptions
            held.finish, held.stop_token_id = delta.finish, delta.stop_token_id
            held.cumulative_logprob = delta.cumulative_logprob
        if delta.finish is not None:
            self._open.discard(delta.index)
        self._notify()

    def push_token(self, index: int, token_id: int, cached_tokens: int, preemptions: int) -> None:
        """One more token of a sequence: `push` for what happens most."""
        held = self._pending.get(index)
        if held is None:
            self._pending[index] = SequenceDelta(index, [token_id], (), cached_tokens, preemptions)
        else:
            held.token_ids.append(token_id)
            held.cached_tokens, held.preemptions = cached_tokens, preemptions
        self._notify()

    def push_logprobs(self, index: int, logprobs: TokenLogprobs) -> None:
        """Log-probabilities of the token pushed last."""
        held = self._pending[index]
        if not isinstance(held.logprobs, KeptLogprobs):
            held.logprobs = KeptLogprobs(held.logprobs)
        held.logprobs.append(logprobs)

    def push_end(self, index: int, finish: FinishReason, stop_token_id: int | None) -> None:
        """The token pushed last ended the sequence."""
        held = self._pending[index]
        held.finish, held.stop_token_id = finish, stop_token_id
        self._open.discard(index)

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error for its reader, after what was pushed before."""
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._reader is not None:
            self._fanout.add(self._reader, self._make)
            self._reader = None

    async def take(self) -> list[SequenceDelta]:
        """Waits for news and for its turn, and returns one delta per sequence that has any; an empty list means the
        end. For one reader at a time.
        """
        return await self.read(list) or []

    async def read(self, make: Callable[[list[SequenceDelta]], T]) -> T | None:
        """Like `take`, but returns what `make` makes of them, never None; that means the end. Raises what `make` raises
        and what the stream failed with. `make` is called in a row with other streams', when the news are taken: a
        reader that is cancelled must not read again.
        """
        self._make_of = make
        while True:
            reader = self._fanout.reader()
            if self._pending:
                self._fanout.add(reader, self._make)
            elif self._error is not None:
                raise self._error
            elif not self._open:
                return None
            else:
                self._reader = reader
            made: T | None = await reader
            if made is not None:
                return made

    def _make(self) -> Any:
        if not self._pending:
            return None
        taken = list(self._pending.values())
        self._pending = {}
        if len(taken) > 1:
            taken.sort(key=lambda delta: delta.index)
        return self._make_of(taken)
