"""Memory of a full step, touched while nobody waits, so that the first one finds most of its pages there.

A start profiles a part of a full step. The rest of a step's memory is fresh: 30,000 pages of 4 KiB for 2,048 tokens of
a model of 33.6M parameters, in a virtual machine some 60 ms, and many times that where the host has to find them.
"""

from __future__ import annotations

import torch

PIECE_BYTES = 2**21


class StepMemory:
    """Buffers of together as many bytes as a step takes, freed once all were written: the C library keeps them, where
    it was told to and threads share a heap (`pagekv.common.freed_memory`).
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = -(-num_bytes // PIECE_BYTES)
        # One large buffer would go back to the kernel with versions of glibc before 2.35.
        self._written: list[torch.Tensor] = []

    def prepare(self) -> bool:
        """Writes PIECE_BYTES; whether there is more to write."""
        if self._left:
            try:
                self._written.append(torch.zeros(PIECE_BYTES, dtype=torch.uint8))
            except RuntimeError:  # no memory: a step that needs it will say so
                self._left = 1
            self._left -= 1
        if not self._left:
            self._written.clear()
        return self._left > 0

    def leave(self) -> None:
        """Frees what was written: a step or other pools are about to take memory."""
        self._left = 0
        self._written.clear()
