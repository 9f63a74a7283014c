"""Rows that ranks add to the stream are summed over them, and the head's logits are gathered.

tests/model/test_split_cuda_models.py runs it over ranks.
"""

from __future__ import annotations

import torch

from pagekv.executor.cuda.fused_decoder import FusedLayers
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World


class Counted(Shards):
    """A rank among equal ones."""

    def __init__(self) -> None:
        super().__init__(World(0, 2, 2), lambda reason: None)

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2

    def gather(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        return torch.cat([rows, rows], -1)[..., :width]


def test_products_are_joined() -> None:
    layers = FusedLayers.__new__(FusedLayers)
    layers._shards, layers._num_logits = Counted(), 5
    rows = torch.ones(2, 3)
    assert torch.equal(layers._summed(rows), torch.full((2, 3), 2.0))
    assert layers._whole(rows).shape == (2, 5)
