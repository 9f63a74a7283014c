"""Log-probabilities of generated tokens, as objects and packed."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar, overload

# Positions that are put into a message between two turns of the event loop. A position with the 20 likeliest tokens
# takes some 20 microseconds.
LOGPROBS_AT_ONCE = 64

Position = TypeVar("Position")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position; `top` are (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PackedLogprobs(Sequence[TokenLogprobs]):
    """TokenLogprobs of many positions, with 8 bytes for each of their tokens: those that no reader has taken yet.
    Values are rounded to 32 bits, because both the steps' and the clients' messages have float fields.
    """

    __slots__ = ("_ends", "_ids", "_values")

    def __init__(self, positions: Iterable[TokenLogprobs] = ()) -> None:
        # For each position the chosen token and then the likeliest ones.
        self._ids, self._values = array("I"), array("f")
        # End of each position in these two arrays.
        self._ends = array("I")
        self.extend(positions)

    def append(self, position: TokenLogprobs) -> None:
        self._ids.append(position.token_id)
        self._values.append(position.logprob)
        for token_id, logprob in position.top:
            self._ids.append(token_id)
            self._values.append(logprob)
        self._ends.append(len(self._ids))

    def extend(self, positions: Iterable[TokenLogprobs]) -> None:
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
            return self if whole else PackedLogprobs(self[at] for at in range(*index.indices(len(self))))
        at = range(len(self))[index]
        begin, end = self._ends[at - 1] if at else 0, self._ends[at]
        top = zip(self._ids[begin + 1 : end], self._values[begin + 1 : end], strict=True)
        return TokenLogprobs(self._ids[begin], self._values[begin], tuple(top))


async def in_turns(positions: Iterable[Position]) -> AsyncIterator[list[Position]]:
    """Yields all positions in order, LOGPROBS_AT_ONCE at a time; the event loop has a turn after each list."""
    left = iter(positions)
    while some := list(islice(left, LOGPROBS_AT_ONCE)):
        yield some
        await asyncio.sleep(0)
