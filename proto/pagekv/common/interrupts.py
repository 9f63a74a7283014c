"""Ctrl-C while a command still imports its modules, and once it has done its work."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_interrupts() -> Iterator[None]:
    """Within the context SIGINT ends the process at once, without a traceback. For the main thread. A process that was
    started with SIGINT ignored goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def quiet_interrupts_to_the_end() -> None:
    """From now on SIGINT ends the process at once, without a traceback: for a command whose work is done, while Python
    and gRPC clean up. Does nothing where another handler is set, or SIGINT is ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
