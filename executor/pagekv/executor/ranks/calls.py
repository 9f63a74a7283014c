"""A call of the backend that all ranks make at the same time, and the answer of each rank. If one rank fails alone
while ranks compute together, the others wait for it in a collective: then the group ends with that rank's error.
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
    """A rank failed, and other ranks did not finish the call."""


def failure(error: Exception) -> dict[str, Any]:
    """The answer of a rank that failed. It has `passes` if other ranks or the network may have caused the error."""
    if isinstance(error, InvalidRequest):
        return {"error": error.description, "field": error.field}
    return {"error": words_of(error)} | ({"passes": True} if can_pass(error) else {})


class Call:
    """One call on rank 0 and the `others`. Safe for several threads."""

    def __init__(self, name: str, others: Iterable[int], broken: Callable[[str], None]) -> None:
        """`broken` is called with the reason if some ranks still wait for a failed one after OTHERS_S; it need not
        return.
        """
        self._name, self._broken = name, broken
        self._changed = threading.Condition()
        self._missing = {_OWN, *others}
        self._answers: dict[int, Any] = {}
        self._reason = ""
        self._breaking = False

    @property
    def can_pass(self) -> bool:
        """Whether a rank has failed, and all failures are errors that may be gone after another start."""
        with self._changed:
            failures = [each for each in self._answers.values() if "error" in each]
        return bool(failures) and all("passes" in each for each in failures)

    def answer(self, rank: int, answer: Mapping[str, Any]) -> None:
        """Takes the answer of a rank that has finished the call. An answer with `error` means that the rank failed."""
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
        # Before `wait` raises, because its caller would end this process in another way.
        try:
            self._broken(reason)
        finally:
            with self._changed:
                self._reason = reason
                self._changed.notify_all()

    def wait(self) -> dict[int, Any]:
        """Waits until all ranks have finished the call. Returns the answers of the other ranks, by rank. Raises
        CallBroken.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._reason or not (self._missing or self._breaking))
            if self._reason:
                raise CallBroken(self._reason)
            return {rank: answer for rank, answer in sorted(self._answers.items()) if rank != _OWN}
