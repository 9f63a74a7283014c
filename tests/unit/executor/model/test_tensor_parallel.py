"""Which rank has which KV heads, as `pagekv plan --tp` says too, and how the parts of a split model are put together.

tests/model/test_split_models.py runs whole models over ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagekv.client.planning.kv_budget import shard_kv_heads
from pagekv.executor.model.shards import Shards
from pagekv.executor.model.tensor_parallel import (
    ShardedEmbedding,
    SummedLinear,
    kv_heads_of,
    num_rank_kv_heads,
    split_plan,
)
from pagekv.executor.world import World

PLAN = {"layers.*.self_attn.k_proj": "colwise", "layers.*.self_attn.v_proj": "colwise"}


class Alone(Shards):
    """A rank whose collectives are those of one."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(World(rank, size, size), lambda reason: None)

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


@pytest.mark.parametrize(
    ("heads", "ranks", "rows"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 3, [[0, 0, 0, 1, 1, 1, 2, 2], [2, 3, 3, 3, 4, 4, 4, 5], [5, 5, 6, 6, 6, 7, 7, 7]]),
        (1, 4, [[0], [0], [0], [0]]),
        (2, 4, [[0], [0], [1], [1]]),
        (6, 4, [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]),
    ],
)
def test_each_rank_has_the_heads_of_its_queries(heads: int, ranks: int, rows: list[list[int]]) -> None:
    assert [kv_heads_of(rank, heads, ranks) for rank in range(ranks)] == rows


@pytest.mark.parametrize("heads", range(1, 17))
@pytest.mark.parametrize("ranks", range(1, 17))
def test_a_running_rank_has_as_many_as_are_planned_and_the_right_ones(heads: int, ranks: int) -> None:
    count = num_rank_kv_heads(heads, ranks)
    assert count == shard_kv_heads(heads, ranks).kv_heads
    # As few query heads as can be shared out: each must find its own KV head.
    queries = heads * ranks
    each, group = queries // ranks, queries // heads
    for rank in range(ranks):
        own = kv_heads_of(rank, heads, ranks)
        assert len(own) == count
        assert [own[query // (each // count)] for query in range(each)] == [
            (rank * each + query) // group for query in range(each)
        ]


def test_only_heads_that_ranks_do_not_divide_change_the_plan() -> None:
    assert split_plan(8, 2, PLAN) == {}
    assert set(split_plan(8, 3, PLAN).values()) == {"replicate"}
    assert split_plan(8, 3, {"layers.*.self_attn.qkv_proj": "colwise_gather_output"}) == {}


def test_parts_of_a_layer_sum_to_the_layer() -> None:
    whole = nn.Linear(8, 5)
    rows = torch.randn(3, 8)
    found = 0
    for rank, columns in enumerate(whole.weight.split(4, 1)):
        shard = nn.Linear(4, 5, bias=rank == 0)
        shard.weight.data = columns.detach().clone()
        if rank == 0:
            shard.bias.data = whole.bias.detach().clone()
        # Inputs that come whole are cut to the rank's own.
        found = found + SummedLinear(shard, Alone(rank, 2), split=True)(rows)
        own = rows[:, 4 * rank : 4 * rank + 4]
        assert torch.equal(SummedLinear(shard, Alone(rank, 2), split=False)(own), shard(own))
    torch.testing.assert_close(found, whole(rows))


def test_parts_of_an_embedding_sum_to_it_exactly() -> None:
    whole = nn.Embedding(7, 3)
    ids = torch.arange(7)[None]
    parts = [(whole.weight[:4], 0), (whole.weight[4:], 4)]
    found = sum(ShardedEmbedding(rows.detach(), first, 7, Alone(0, 2), 1.0)(ids) for rows, first in parts)
    assert torch.equal(torch.as_tensor(found), whole(ids))
