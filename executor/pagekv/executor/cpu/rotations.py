"""Cosines and sines of a step's positions, from a table where they depend on the position alone."""

from __future__ import annotations

import torch

from pagekv.executor.model.decoder import Decoder

# Positions in the table, 16 MiB for each type of layers with 128 rotated elements per head. Later positions are
# computed, and so are all positions of models whose rotations depend on more than the position.
POSITIONS = 2**14


class Rotations:
    """Looks up the tables that `Decoder.rotations` computes with a dozen of torch's operators."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._count = POSITIONS if decoder.has_fixed_rotations else 0
        self._tables = decoder.rotations(torch.arange(self._count)[None]) if self._count else {}

    def of(self, position_ids: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """As `Decoder.rotations`."""
        # NumPy finds the largest of few numbers in a fraction of torch's time.
        if int(position_ids.numpy().max()) >= self._count:
            return self._decoder.rotations(position_ids)
        rows, tables = position_ids[0], self._tables.items()
        return {name: (cos.index_select(0, rows), sin.index_select(0, rows)) for name, (cos, sin) in tables}
