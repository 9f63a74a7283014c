"""Errors that keep a rank, or an executor of one process, from starting: in words, and whether they can pass."""

from __future__ import annotations

from collections.abc import Iterator

from pagekv.common.extras import missing_modules, missing_words
from pagekv.common.models import ModelNotFound


class MayPass(Exception):
    """An error that others cause: where all ranks start anew it may be gone."""


class CannotStart(ValueError):
    """The ranks cannot start, and if they started anew they would find the same; the message names the rank."""


def expected_words(error: Exception) -> str:
    """Words for people of an error that keeps an executor from starting; empty of an unexpected one."""
    if isinstance(error, ModelNotFound):
        return f"--model cannot be used: {error}"
    if isinstance(error, ImportError):
        if missing := missing_modules("executor"):
            return str(missing_words("executor", missing))
        return f"a package is missing; pip install 'pagekv[executor]': {error}"
    # Some that Python and numpy raise have no words.
    return (str(error) or type(error).__name__) if isinstance(error, (OSError, ValueError, MemoryError)) else ""


def words_of(error: Exception) -> str:
    """The same of any error, in one line."""
    return expected_words(error) or f"{type(error).__name__}: {error}".partition("\n")[0]


def can_pass(error: BaseException) -> bool:
    """Whether other ranks, or the network, may have caused it, and not this rank's flags, files or memory."""
    return any(
        isinstance(each, (MayPass, ConnectionError, TimeoutError)) or _is_of_collective(each) for each in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_collective(error: BaseException) -> bool:
    """Known without torch: NCCL's errors and those of stores have a type, gloo's say where in its code they were
    found.
    """
    if any(each.__name__ == "DistError" for each in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)
