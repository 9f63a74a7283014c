"""A call of the backend that all ranks make at once, and how each of them fares. One that fails alone, in the middle of
what ranks compute together, leaves the others waiting for it: it is named, and the group ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pagekv.common.errors import InvalidRequest
from pagekv.executor.ranks.start_errors import can_pass, words_of
from pagekv.executor.world import OTHERS_S

_OWN = 0


class CallBroken(RuntimeError):
    """A rank failed, and others did not come to the end of the call."""


def failure(error: Exception) -> dict[str, Any]:
    """The answer of a rank that failed; with `passes` where others, or the network, may have caused it."""
    if isinstance(error, InvalidRequest):
        return {"error": error.description, "field": error.field}
    return {"error": words_of(error)} | ({"passes": True} if can_pass(error) else {})


class Call:
    """Of rank 0 and the `others`. Used by several threads."""

    def __init__(self, name: str, others: Iterable[int], broken: Callable[[str], None]) -> None:
        """`broken` is called with the reason when some ranks wait for one that failed; it need not return."""
        self._name, self._broken = name, broken
        self._changed = threading.Condition()
        self._missing = {_OWN, *others}
        self._answers: dict[int, Any] = {}
        self._reason = ""
        self._breaking = False

    @property
    def can_pass(self) -> bool:
        """Whether some rank has failed, and each that has by an error that can pass."""
        with self._changed:
            failures = [each for each in self._answers.values() if "error" in each]
        return bool(failures) and all("passes" in each for each in failures)

    def answer(self, rank: int, answer: Mapping[str, Any]) -> None:
        """A rank has come to the end; an answer with `error` says that it failed."""
        with self._changed:
            first = "error" in answer and not any("error" in each for each in self._answers.values())
            self._missing.discard(rank)
            self._answers[rank] = answer
            self._changed.notify_all()
        if first:
            timer = threading.Timer(OTHERS_S, self._break, (f"rank {rank} failed to {self._name}: {answer['error']}",))
            timer.daemon = True
            timer.start()

    def _break(self, reason: str) -> None:
        with self._changed:
            if not self._missing:
                return
            self._breaking = True
            waiting = f"rank {', '.join(map(str, sorted(self._missing)))}"
        reason = f"{reason}; left waiting for it: {waiting}"
        # First, since the caller that `wait` raises in would end this process in its own way.
        try:
            self._broken(reason)
        finally:
            with self._changed:
                self._reason = reason
                self._changed.notify_all()

    def wait(self) -> dict[int, Any]:
        """The answers of the others, by rank, once all ranks have come to the end. Raises CallBroken."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason or not (self._missing or self._breaking))
            if self._reason:
                raise CallBroken(self._reason)
            return {rank: answer for rank, answer in sorted(self._answers.items()) if rank != _OWN}
