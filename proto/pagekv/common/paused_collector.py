"""Imports without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """For imports of large libraries: within this context nothing is collected, and afterwards the collector ignores
    all objects made so far. It finds next to nothing among classes and functions that stay, and would take a fifth of
    the time; each later full collection would go through all of them again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
