"""Processes of others, by their ids."""

from __future__ import annotations

from pathlib import Path


def runs(pid: int) -> bool:
    """Whether there is such a process; one that has ended may be left as a zombie where nobody waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
