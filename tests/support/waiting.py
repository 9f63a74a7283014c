"""Waits of tests that have no event loop (`support.event_loop` has those of coroutines)."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], seconds: float = 240, why: Callable[[], object] = lambda: "it never came true"
) -> None:
    """Returns once the condition holds. Raises AssertionError, with what `why` says, when it does not come to that: the
    time bounds a hang, not a speed.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.01)
