"""Errors that keep a rank, or an executor of one process, from starting: their messages, and whether another start may
succeed.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagekv.common.extras import missing_modules, missing_words
from pagekv.common.models import ModelNotFound


class MayPass(Exception):
    """An error with a cause outside this rank: if all ranks are started again, it may be gone."""


class CannotStart(ValueError):
    """The ranks cannot start, and another start would fail in the same way; the message names the rank."""


def expected_words(error: Exception) -> str:
    """A message for users about an expected error that keeps an executor from starting; empty for an unexpected
    error.
    """
    if isinstance(error, ModelNotFound):
        return f"--model cannot be used: {error}"
    if isinstance(error, ImportError):
        if missing := missing_modules("executor"):
            return str(missing_words("executor", missing))
        if isinstance(error, ModuleNotFoundError):
            return f"a package is missing; pip install 'pagekv[executor]': {error}"
        # Such as a shared library that the address space has no room for, or a package that is too old.
        return f"an installed package cannot be imported; pip install -U 'pagekv[executor]' may help: {error}"
    # Some errors of Python and NumPy have no message.
    return (str(error) or type(error).__name__) if isinstance(error, (OSError, ValueError, MemoryError)) else ""


def words_of(error: Exception) -> str:
    """`expected_words`, or one line for an unexpected error."""
    return expected_words(error) or f"{type(error).__name__}: {error}".partition("\n")[0]


def can_pass(error: BaseException) -> bool:
    """Whether other ranks or the network may have caused the error, rather than this rank's flags, files or memory."""
    return any(
        isinstance(each, (MayPass, ConnectionError, TimeoutError)) or _is_of_collective(each) for each in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_collective(error: BaseException) -> bool:
    """Whether the error comes from a collective or the store, told without importing torch: errors of NCCL and of
    stores have the type DistError, and messages of gloo contain a path of its source.
    """
    if any(each.__name__ == "DistError" for each in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)
