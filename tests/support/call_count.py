"""Counts the calls that a piece of work makes: how it grows, the same on every machine, where times would not tell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def count_calls(work: Callable[[], Any]) -> int:
    """Calls of functions written in Python and in C, and of generators for each of their items."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
