"""Imports without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """For imports of large libraries, before any model is loaded: within this context nothing is collected, and
    afterwards all objects made so far are hidden from the collector. It finds next to nothing among classes and
    functions that stay, and would take a fifth of the time; each later full collection would go through them again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
