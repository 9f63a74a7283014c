"""Which rank has which KV heads, as `pagekv plan --tp` says too, and how the parts of a split model are put together.

tests/model/test_split_models.py runs whole models over ranks.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.clients.stack import environment
from torch import nn

from pagekv.client.planning.kv_budget import shard_kv_heads
from pagekv.executor.model.tensor_parallel import (
    ShardedEmbedding,
    Shards,
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


JOINED = """
import os, sys, time, zlib
import torch
from pagekv.executor.model import tensor_parallel
from pagekv.executor.ranks.rendezvous import join_process_group, open_store
from pagekv.executor.ranks.gathering import Meeting
from pagekv.executor.world import read_world
world = read_world(os.environ)
join_process_group(open_store(world, 100.0), world, Meeting('', 0, 'one'), 100.0)
shards = tensor_parallel.Shards(world, lambda reason: (print(reason, flush=True), os._exit(75)))
"""


@contextmanager
def ranks_running(code: str, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that have joined in `shards` of one `world`, and go on with `code`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {**environment(), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOINED + code], env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        yield ranks
    finally:
        for each in ranks:
            each.kill()
            each.wait()


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_every_size_are_the_same_on_each_rank(size: int) -> None:
    code = """
digest = 0
for count in (1, 7, tensor_parallel.GATHERED_BYTES // 256 + 1):
    parts = [torch.randn(count, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
    found = shards.sum(parts[world.rank].clone())
    assert torch.allclose(found, sum(parts), atol=1e-5), count
    digest = zlib.crc32(found.numpy().tobytes(), digest)
    # A view of every other column is summed, too.
    wide = parts[world.rank].repeat_interleave(2, 1)
    assert torch.equal(shards.sum(wide[:, ::2]), found), count
first = shards.sum(parts[world.rank][:1].clone())
few = shards.sum(parts[world.rank][:9].clone())
assert torch.equal(few[:1], first)
print(digest, flush=True)
"""
    with ranks_running(code, size) as ranks:
        outputs = [each.communicate(timeout=240)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0] * size
    assert outputs[0].strip()
    assert len({*outputs}) == 1


def test_a_rank_that_does_not_come_to_a_collective_is_given_up_in_time() -> None:
    code = (
        "shards.limit_waits(5.0)\n"
        "print(shards.sum(torch.ones(2)).tolist(), flush=True)\n"
        "shards.sum(torch.ones(2)) if world.rank == 0 else time.sleep(1000)\n"
    )
    with ranks_running(code, 2) as ranks:
        output, _ = ranks[0].communicate(timeout=240)
        assert output.startswith("[2.0, 2.0]\na collective failed: ")
        assert ranks[0].returncode == 75
