"""The results of one request on their way from the engine loop to its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.request.logprobs import LOGPROBS_AT_ONCE, PackedLogprobs, TokenLogprobs
from pagekv.kvmanager.request.wakeups import Wakeups

# Tokens of a sequence that are turned into text at once, which takes a millisecond. A reader that waits for the end of
# a sequence is also woken by this many tokens.
MOST_AT_ONCE = 256


@dataclass(slots=True)
class SequenceDelta:
    """Results of one sequence since its reader last took some. Tokens are a delta, counts are cumulative."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: Sequence[TokenLogprobs] = ()
    cached_tokens: int = 0
    preemptions: int = 0
    finish: FinishReason | None = None
    # The end-of-sequence or stop token that ended it; the last of token_ids.
    stop_token_id: int | None = None
    # Sum over all tokens of the sequence; set by beam search alone, with the finish.
    cumulative_logprob: float | None = None

    def parts(self) -> Iterable[SequenceDelta]:
        """The same results in order, in parts of at most MOST_AT_ONCE tokens, or LOGPROBS_AT_ONCE with
        log-probabilities. The last part has the end.
        """
        most = LOGPROBS_AT_ONCE if self.logprobs else MOST_AT_ONCE
        return (self,) if len(self.token_ids) <= most else self._cut(most)

    def _cut(self, most: int) -> Iterator[SequenceDelta]:
        for start in range(0, len(self.token_ids), most):
            here = slice(start, start + most)
            part = replace(self, token_ids=self.token_ids[here], logprobs=self.logprobs[here])
            if here.stop < len(self.token_ids):
                part.finish = part.stop_token_id = part.cumulative_logprob = None
            yield part


class RequestStream:
    """Carries deltas from the engine loop to one reader. The engine never waits for the reader: deltas that it has not
    taken yet are merged into one for each sequence, which max_tokens bounds.
    """

    def __init__(self, request_id: str, num_sequences: int, wakeups: Wakeups | None = None) -> None:
        """`wakeups` wakes the reader; all streams of an engine share it. None: this stream has its own."""
        self.request_id = request_id
        self._wakeups = wakeups or Wakeups()
        self._pending: dict[int, SequenceDelta] = {}
        # Future of a reader that waits for results. When there are some, it waits for its turn in `wakeups`.
        self._reader: asyncio.Future[None] | None = None
        # Whether the reader waits for the end of a sequence; and whether an end, or an error, is pending.
        self._at_ends = self._end_pending = False
        self._open = set(range(num_sequences))
        self._error: Exception | None = None

    def push(self, delta: SequenceDelta) -> None:
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
            self._end_pending = True
        self._notify()

    def push_token(self, index: int, token_id: int, cached_tokens: int, preemptions: int) -> None:
        """Adds one token of a sequence; faster than `push`."""
        held = self._pending.get(index)
        if held is None:
            self._pending[index] = SequenceDelta(index, [token_id], (), cached_tokens, preemptions)
        else:
            held.token_ids.append(token_id)
            held.cached_tokens, held.preemptions = cached_tokens, preemptions
        if not self._at_ends or (held is not None and len(held.token_ids) >= MOST_AT_ONCE):
            self._notify()

    def push_logprobs(self, index: int, logprobs: TokenLogprobs) -> None:
        """Adds the log-probabilities of the token pushed last."""
        held = self._pending[index]
        if not isinstance(held.logprobs, PackedLogprobs):
            held.logprobs = PackedLogprobs(held.logprobs)
        held.logprobs.append(logprobs)

    def push_end(self, index: int, finish: FinishReason, stop_token_id: int | None) -> None:
        """Says that the token pushed last ended the sequence."""
        held = self._pending[index]
        held.finish, held.stop_token_id = finish, stop_token_id
        self._open.discard(index)
        self._end_pending = True
        self._notify()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, which the reader gets after the results that were pushed before."""
        self._error = error
        self._end_pending = True
        self._notify()

    def _notify(self) -> None:
        if self._reader is not None:
            self._wakeups.add(self._reader)
            self._reader = None

    async def take(self, *, at_ends: bool = False) -> list[SequenceDelta]:
        """Waits for results and for the reader's turn; returns one delta for each sequence that has results, by index.
        An empty list means the end. Raises the error that the stream failed with. For one reader at a time.

        `at_ends`: waits until a sequence ends or has MOST_AT_ONCE tokens.
        """
        self._at_ends = at_ends
        while True:
            reader = self._wakeups.reader()
            if self._pending and (self._end_pending or not at_ends):
                self._wakeups.add(reader)
            elif self._error is not None:
                raise self._error
            elif not self._open:
                return []
            else:
                self._reader = reader
            await reader
            if self._pending:
                taken = list(self._pending.values())
                self._pending, self._end_pending = {}, False
                if len(taken) > 1:
                    taken.sort(key=lambda delta: delta.index)
                return taken
