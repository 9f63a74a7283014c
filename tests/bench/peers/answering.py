"""A player's side of the talk over its pipes: `ready`, then for every line a round, with one line about it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TextIO

READY = "ready"


def own_output() -> TextIO:
    """The standard output that was; standard error takes its place, since libraries print where they like."""
    kept = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return kept


def answer(play: Callable[[], tuple[float, int]], asked: TextIO, out: TextIO) -> None:
    """Plays a round for every line until there are no more; `play` returns seconds and output tokens."""
    print(READY, file=out, flush=True)
    for _ in asked:
        seconds, tokens = play()
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=out, flush=True)


def serve(play: Callable[[], tuple[float, int]], out: TextIO) -> None:
    """As `answer`, for what comes over standard input."""
    answer(play, sys.stdin, out)
