"""Resident memory of a process and of its children, as the kernel counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def resident_mib(pid: int, which: str) -> float:
    """Of one process: "VmRSS" now, "VmHWM" at most. Raises OSError where it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    # A process that has ended and was not waited for has no such line.
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(which)), 0.0)


def children(pid: int) -> list[int]:
    """Ids of the processes that any of its threads has started, and that were not waited for."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, (thread / "children").read_text().split())
    return found
