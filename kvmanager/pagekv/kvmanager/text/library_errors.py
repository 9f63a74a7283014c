"""Errors, of any class, of a library that reads what comes with a model."""

from __future__ import annotations


def words_of(error: BaseException) -> str:
    """The error in words. A panic of Rust code is no Exception, so callers catch BaseException; an error that is to end
    this process is raised again.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    return str(error) or type(error).__name__
