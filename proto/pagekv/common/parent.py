"""Ends a child process when its parent has ended, even by SIGKILL.

The parent asks for this with a variable in the child's environment, and holds the other end of the child's standard
input, which the kernel closes when the parent is gone. prctl's death signal is not used, because it is sent as soon as
the parent's thread that started the child ends.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable

# Set in the environment of a child that has to end with its parent.
ENDS_WITH_PARENT = "_PAGEKV_ENDS_WITH_PARENT"


def call_without_parent(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> None:
    """Lets the loop call `stop` when the parent has ended. Does nothing in a process whose parent has not asked."""
    if os.environ.get(ENDS_WITH_PARENT):
        loop.add_reader(0, _read, loop, stop)


def parent_is_gone() -> bool:
    """Whether the parent has asked this process to end with it, and has ended."""
    if not os.environ.get(ENDS_WITH_PARENT):
        return False
    poll = select.poll()
    poll.register(0, 0)
    return bool(poll.poll(0))


def _read(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> None:
    if not os.read(0, 4096):
        loop.remove_reader(0)
        stop()
