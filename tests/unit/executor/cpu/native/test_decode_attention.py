"""Decodes that read the pool without gathering, against plain attention over the same keys in one piece."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pagekv.executor.cpu.gathered_attention import attend
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native.decode_attention import decode_attention
from pagekv.executor.cpu.paged_reads import PagedDecodes
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.loading import BlockGeometry


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", [Scores(0.4), Scores(0.4, cap=2.0), Scores(0.4, window=6)])
@pytest.mark.parametrize(
    # Each size of a group and of a head is compiled anew.
    ("count", "heads", "kv_heads", "size", "block_size"),
    [(1, 4, 2, 16, 4), (40, 2, 1, 16, 1), (3, 2, 2, 64, 16)],
)
def test_reads_what_plain_attention_reads(
    dtype: torch.dtype, scores: Scores, count: int, heads: int, kv_heads: int, size: int, block_size: int
) -> None:
    """Slots that a sequence does not see are NaN, in its own blocks too."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    longest = 37
    width = -(-longest // block_size)
    pools = KvCache(BlockGeometry(2, kv_heads, size, dtype), block_size, count * width)
    pools.device[:] = math.nan
    tables = rng.permutation(count * width).reshape(count, width)
    ends = rng.integers(1, longest + 1, count)
    begins = np.maximum(ends - (scores.window or longest), 0)
    keys, values = pools.layer(1)
    query = torch.randn(heads, count, size).to(dtype)
    outs, sums = [], []
    for table, begin, end, row in zip(tables, begins, ends, query.unbind(1), strict=True):
        at = torch.arange(int(begin), int(end))
        slots = torch.from_numpy(table)[at // block_size], at % block_size
        keys[slots], values[slots] = torch.randn(2, len(at), kv_heads, size).to(dtype)
        shared, of_them = (part[slots].double().transpose(0, 1)[None] for part in (keys, values))
        out, lse = attend(row.double().view(1, kv_heads, -1, size), shared, of_them, scores)
        outs.append(out.reshape(heads, size))
        sums.append(lse.reshape(heads))
    offsets = np.arange(count + 1) * width
    # Rows before and behind are not theirs.
    decodes = PagedDecodes(1, count + 1, *map(torch.from_numpy, (tables.reshape(-1), offsets, begins, ends)))
    rows = torch.nn.functional.pad(query.transpose(0, 1), (0, 0, 0, 0, 1, 1))
    found, lse = torch.zeros(count + 2, heads, size), torch.zeros(count + 2, heads)
    decode_attention(pools, 1, rows, decodes, scores, found, lse)
    assert torch.allclose(found[1:-1].double(), torch.stack(outs), rtol=2e-6, atol=2e-6)
    assert torch.allclose(lse[1:-1].double(), torch.stack(sums), rtol=1e-5, atol=1e-5)
    for untouched in (found[[0, -1]], lse[[0, -1]]):
        assert not untouched.any()


def test_a_nan_that_is_seen_is_told() -> None:
    pools = KvCache(BlockGeometry(1, 1, 16, torch.float32), 4, 2)
    pools.device[:] = 1
    pools.device[1, 0, 0, 1] = math.nan
    every = [torch.tensor(numbers) for numbers in ([0, 1], [0, 1, 2], [0, 0], [4, 4])]
    out = torch.empty(2, 2, 16)
    decode_attention(pools, 0, torch.ones(2, 2, 16), PagedDecodes(0, 2, *every), Scores(1.0), out, torch.empty(2, 2))
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
