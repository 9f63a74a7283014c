"""The products of a split decoder are summed, and the head's gathered.

tests/model/test_split_models.py runs it over ranks.
"""

from __future__ import annotations

import torch

from pagekv.executor.cpu.sharded_decoder import ShardedDecoder
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World


class Counted(Shards):
    """A rank among equal ones, that notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(World(0, 2, 2), lambda reason: None)
        self.asked: list[str] = []

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        self.asked.append("sum")
        return rows * 2

    def gather(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        self.asked.append("gather")
        return torch.cat([rows, rows], -1)[..., :width]


def test_products_are_joined() -> None:
    shards = Counted()
    decoder = ShardedDecoder.__new__(ShardedDecoder)
    decoder._shards, decoder._num_logits = shards, 5
    rows = torch.ones(2, 3)
    assert torch.equal(decoder._summed(lambda given: given + 1)(rows), torch.full((2, 3), 4.0))
    assert decoder._whole(lambda given: given)(rows).shape == (2, 5)
    assert shards.asked == ["sum", "gather"]
