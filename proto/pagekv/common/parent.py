"""A process that ends with the one that started it, however that one ended.

The parent says so in the environment, and holds the other end of the child's standard input: the kernel closes that
when the parent is gone, SIGKILL or not. No thread of the parent matters, as it would to prctl's death signal.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable

# Set in the environment of such a process.
ENDS_WITH_PARENT = "_PAGEKV_ENDS_WITH_PARENT"


def call_without_parent(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> None:
    """Has the loop call `stop` once the parent has gone; never in a process that no parent has asked."""
    if os.environ.get(ENDS_WITH_PARENT):
        loop.add_reader(0, _read, loop, stop)


def parent_is_gone() -> bool:
    """Whether the parent of a process that was asked to end with it has gone."""
    if not os.environ.get(ENDS_WITH_PARENT):
        return False
    poll = select.poll()
    poll.register(0, 0)
    return bool(poll.poll(0))


def _read(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> None:
    if not os.read(0, 4096):
        loop.remove_reader(0)
        stop()
