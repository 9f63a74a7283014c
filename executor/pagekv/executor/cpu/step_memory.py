"""Touches the memory of a full step while the backend is idle, so that the first full step finds most pages in place.

A start profiles only a part of a full step. The rest of a step's memory is fresh: 30,000 pages of 4 KiB for 2,048
tokens of a model of 33.6M parameters. In a virtual machine these page faults take some 60 ms, and many times that where
the host has to find the pages.
"""

from __future__ import annotations

import torch

# So much is touched at most, PIECE_BYTES at a time: more would keep memory from others before any step needs it.
MOST_BYTES, PIECE_BYTES = 2**28, 2**21


class StepMemory:
    """Buffers with as many bytes in all as a step takes, at most MOST_BYTES. Once all are written, they are freed: the
    C library keeps their pages, if it was told to and threads share a heap (`pagekv.common.freed_memory`).
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = -(-min(num_bytes, MOST_BYTES) // PIECE_BYTES)
        # Small pieces, because glibc before 2.35 gives one large buffer back to the kernel.
        self._written: list[torch.Tensor] = []

    def prepare(self) -> bool:
        """Writes PIECE_BYTES. True while there is more to write."""
        if self._left:
            try:
                self._written.append(torch.zeros(PIECE_BYTES, dtype=torch.uint8))
            except RuntimeError:  # memory is short: a step that needs it will report that
                self._left = 1
            self._left -= 1
        if not self._left:
            self._written.clear()
        return self._left > 0

    def leave(self) -> None:
        """Frees the written buffers and stops: a step or new pools are about to take memory."""
        self._left = 0
        self._written.clear()
