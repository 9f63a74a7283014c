"""Rotations of a step's positions: looked up, where each depends on its position alone."""

from __future__ import annotations

import torch

from pagekv.executor.model.decoder import Decoder

# Positions that are looked up: 16 MiB for each kind of layers where heads have 128 rotated elements. Positions behind
# are computed, as all are of models whose rotations depend on more than the position.
POSITIONS = 2**14


class Rotations:
    """Looks up what `Decoder.rotations` computes by a dozen operators of torch."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._count = POSITIONS if decoder.has_fixed_rotations else 0
        self._tables = decoder.rotations(torch.arange(self._count)[None]) if self._count else {}

    def of(self, position_ids: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """As `Decoder.rotations`."""
        # NumPy looks at few numbers in a fraction of torch's time.
        if int(position_ids.numpy().max()) >= self._count:
            return self._decoder.rotations(position_ids)
        rows, tables = position_ids[0], self._tables.items()
        return {name: (cos.index_select(0, rows), sin.index_select(0, rows)) for name, (cos, sin) in tables}
