"""Memory of a full step, touched while nobody waits, so that the first one takes no fresh pages.

A start profiles a part of a full step. The rest of a step's memory is fresh: 30,000 pages of 4 KiB for 2,048 tokens of
a model of 33.6M parameters, in a virtual machine some 60 ms, and many times that where the host has to find them.
"""

from __future__ import annotations

import torch

PIECE_BYTES = 2**21


class StepMemory:
    """A buffer as large as a step's, which is freed once it was written: the C library keeps it
    (`pagekv.common.freed_memory`), in the heap that all threads share.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer: torch.Tensor | None = torch.empty(num_bytes, dtype=torch.uint8)
        self._written = 0

    def prepare(self) -> bool:
        """Writes PIECE_BYTES; whether there is more to write."""
        if self._buffer is None:
            return False
        self._buffer[self._written : self._written + PIECE_BYTES].zero_()
        self._written += PIECE_BYTES
        if self._written >= len(self._buffer):
            self._buffer = None
        return self._buffer is not None

    def leave(self) -> None:
        """Frees the buffer as it is: a step is about to take memory, and will touch it itself."""
        self._buffer = None
