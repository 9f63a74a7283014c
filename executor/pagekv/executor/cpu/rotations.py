"""Cosines and sines of a step's positions, from a table where they depend on the position alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagekv.executor.model.decoder import Decoder

# Positions in the table, 16 MiB for each type of layers with 128 rotated elements per head. Later positions are
# computed, and so are all positions of models whose rotations depend on more than the position.
POSITIONS = 2**14


@dataclass(frozen=True, slots=True)
class StepRotations:
    """The rotations of a step's rows: row `t` has the cosines and sines number `numbers[t]` of `tables`. `numbers` is
    int64 `[T]`; tables are pairs of `[N, rotated elements of a head]`, by the name of the rotation.
    """

    numbers: torch.Tensor
    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]
    # Whether the numbers are positions, and the tables the same for all steps.
    fixed: bool

    def copy_(self, other: StepRotations) -> None:
        """Copies the content of other rotations of as many rows, which are fixed if these are."""
        self.numbers.copy_(other.numbers)
        if not self.fixed:
            for name, pair in self.tables.items():
                for tensor, new in zip(pair, other.tables[name], strict=True):
                    tensor.copy_(new)


class Rotations:
    """Keeps the tables that `Decoder.rotations` computes with a dozen of torch's operators."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._count = POSITIONS if decoder.has_fixed_rotations else 0
        self._tables = decoder.rotations(torch.arange(self._count)[None]) if self._count else {}

    def of(self, position_ids: torch.Tensor) -> StepRotations:
        """Of positions `[1, T]`."""
        # NumPy finds the largest of few numbers in a fraction of torch's time.
        positions = position_ids[0].numpy()
        if positions.max() < self._count:
            return StepRotations(torch.from_numpy(positions.copy()), self._tables, fixed=True)
        return StepRotations(torch.arange(len(positions)), self._decoder.rotations(position_ids), fixed=False)

    def advance(self, rotations: StepRotations, longest: int) -> bool:
        """Moves the rotations on by one position each, so that all are below `longest`. False if not all of the new
        positions are in the tables; then nothing changes.
        """
        if not rotations.fixed or longest > self._count:
            return False
        positions = rotations.numbers.numpy()
        positions += 1
        return True
