"""The outcome of a rule under test, and the exceptions that it comes of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class BrokenRule(Exception):
    """The executor did something else than the rule says; the message says what."""


class NotTested(Exception):
    """The rule cannot be tested on this executor; the message says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one rule: "ok", "failed" or "skipped", and why."""

    rule: str
    words: str
    outcome: str
    why: str
    seconds: float

    def __str__(self) -> str:
        if self.outcome == "failed":
            return f"{self.rule} FAILED {self.words}: {self.why}"
        return f"{self.rule} skipped: {self.why}" if self.why else f"{self.rule} ok {self.words}"


def require(holds: object, what: str) -> None:
    """Raises BrokenRule with these words unless it holds."""
    if not holds:
        raise BrokenRule(what)


@contextmanager
def during(what: str) -> Iterator[None]:
    """Says in front of a broken rule's message what was being done."""
    try:
        yield
    except BrokenRule as error:
        raise BrokenRule(f"{what}: {error}") from error
