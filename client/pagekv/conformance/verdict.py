"""A rule under test, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class BrokenRule(Exception):
    """The executor did something else than the rule says; the message says what."""


class NotTested(Exception):
    """The rule cannot be tested on this executor; the message says why."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """A rule by its number in executor_service.proto, in words, with the check that raises where it does not hold."""

    number: str
    words: str
    check: Callable[[T], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one rule: "ok", "failed" or "skipped", and why."""

    rule: str
    words: str
    outcome: str
    why: str
    seconds: float

    def __str__(self) -> str:
        """One line, as printed."""
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
