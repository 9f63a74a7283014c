"""A server with a clock in its event loop: how long the loop was silent, and what memory the process took.

The clock ticks every millisecond. On a machine with other work the time between two ticks has the others' time in it,
the processor time that the loop's own thread used between them has not. Imports nothing that the server would not: its
process is to be as it always is.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TICK_S = 0.001


class Figures(NamedTuple):
    """Of the time since the figures before these."""

    # Seconds between two ticks at most, beyond the tick's own millisecond.
    silence_s: float
    # Seconds of a processor that the loop's thread used between two ticks, at most.
    own_s: float
    # Resident bytes when the time began, and at most.
    before_bytes: int
    peak_bytes: int

    @property
    def taken_bytes(self) -> int:
        """Memory that was taken beyond what there was before."""
        return self.peak_bytes - self.before_bytes


def main(argv: Sequence[str]) -> int:
    """Runs the server of a package with a clock in its event loop, `argv` behind the package's name. A line on
    standard input asks for the figures since the line before it.
    """
    # Any: its `run_async` is set.
    server: Any = importlib.import_module(f"{argv[0]}.server")
    run_async, worst = server.run_async, [0.0, 0.0]

    async def tick() -> None:
        last, cpu = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            now, used = time.perf_counter(), time.thread_time()
            worst[:] = max(worst[0], now - last - TICK_S), max(worst[1], used - cpu)
            last, cpu = now, used

    def beside(serve: Callable[[], Awaitable[int]]) -> int:
        async def both() -> int:
            ticking = asyncio.create_task(tick())
            try:
                return await serve()
            finally:
                ticking.cancel()

        status: int = run_async(both)
        return status

    def answer() -> None:
        before = _memory("VmRSS")
        for _ in sys.stdin:
            print(json.dumps(Figures(worst[0], worst[1], before, _memory("VmHWM"))), flush=True)
            # From here on VmHWM is that of the next time: proc(5).
            Path("/proc/self/clear_refs").write_text("5")
            before, worst[:] = _memory("VmRSS"), [0.0, 0.0]

    threading.Thread(target=answer, daemon=True).start()
    server.run_async = beside
    status: int = server.main(argv[1:])
    return status


def _memory(name: str) -> int:
    """Bytes of this process, as the kernel counts them."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
