"""Rows that read the pool in runs, against plain attention over the same keys in one piece."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.executor.loop_kinds import LOOP_KINDS, use_loops

from pagekv.executor.cpu.gathered_attention import attend
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native import prompt_attention as prompt_module
from pagekv.executor.cpu.native.bfloat16_sums import bfloat16_sums
from pagekv.executor.cpu.native.prompt_attention import prompt_attention
from pagekv.executor.cpu.native.tile import BFLOAT16_DOT, BFLOAT16_MATRIX, BFLOAT16_WIDENED, FLOAT32
from pagekv.executor.cpu.paged_reads import PagedRuns
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.loading import BlockGeometry

# Blocks of each run's table.
WIDTH = 40


def runs_of(seen: list[list[tuple[int, int]]], tables: np.ndarray) -> PagedRuns:
    """`seen`: of each run, the slots [begin, end) that each of its rows sees. Rows are numbered backwards."""
    flat = torch.tensor([each for run in seen for each in run])
    return PagedRuns(
        torch.tensor(np.cumsum([0, *map(len, seen)])),
        torch.arange(len(seen)) * WIDTH,
        torch.arange(len(flat)).flip(0),
        flat[:, 0].contiguous(),
        flat[:, 1].contiguous(),
        torch.from_numpy(tables.reshape(-1)),
        max(map(len, seen)),
    )


def check(
    pools: KvCache,
    query: torch.Tensor,
    runs: PagedRuns,
    scores: Scores,
    out: torch.Tensor,
    lse: torch.Tensor,
    sums: int,
) -> None:
    """Compares output `[T, heads, size]` and log-sum-exp `[T, heads]` with those of float64. Where pairs of bfloat16
    are multiplied, each weight may be rounded to bfloat16.
    """
    rounds = query.dtype == torch.bfloat16 and query.shape[2] % 2 == 0 and sums == BFLOAT16_DOT
    expected, logarithms, absolute = plain(pools, query, runs, scores)
    assert ((out - expected).abs() <= 5e-6 * (1 + expected.abs()) + (2**-8 * absolute if rounds else 0)).all()
    assert torch.allclose(lse.double(), logarithms, rtol=1e-5, atol=1e-5)


def plain(
    pools: KvCache, query: torch.Tensor, runs: PagedRuns, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp, and the output that the absolute values of all values (V) would have, in float64."""
    keys, values = pools.layer(1)
    out, lse = torch.zeros(query.shape, dtype=torch.float64), torch.zeros(query.shape[:2], dtype=torch.float64)
    absolute = torch.zeros_like(out)
    for number, offset in enumerate(runs.offsets.tolist()):
        for place in range(int(runs.firsts[number]), int(runs.firsts[number + 1])):
            at = torch.arange(int(runs.begins[place]), int(runs.ends[place]))
            slots = runs.tables[offset + at // pools.block_size], at % pools.block_size
            key, value = (part[slots].double().transpose(0, 1)[None] for part in (keys, values))
            row = int(runs.rows[place])
            own = query[row].double().view(1, keys.shape[2], -1, query.shape[2])
            found, sums = attend(own, key, value, scores)
            out[row], lse[row] = found.reshape(query.shape[1:]), sums.reshape(-1)
            absolute[row] = attend(own, key, value.abs(), scores)[0].reshape(query.shape[1:])
    return out, lse, absolute


def poisoned(pools: KvCache, runs: PagedRuns) -> None:
    """Slots that some row sees are random, all others NaN."""
    pools.device[:] = math.nan
    for part in pools.layer(1):
        for number, offset in enumerate(runs.offsets.tolist()):
            first, last = int(runs.firsts[number]), int(runs.firsts[number + 1]) - 1
            at = torch.arange(int(runs.begins[first]), int(runs.ends[last]))
            part[runs.tables[offset + at // pools.block_size], at % pools.block_size] = torch.randn(
                len(at), *part.shape[2:]
            ).to(part.dtype)


@pytest.fixture(params=LOOP_KINDS, ids=str)
def sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How bfloat16 is summed: on this processor, or on another one, with vectors of its length."""
    if request.param is None:
        return bfloat16_sums()
    use_loops(prompt_module, request.param, monkeypatch)
    return int(request.param[1])


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size"),
    [(4, 2, 16, 4), (1, 1, 80, 16), (6, 1, 64, 16), (2, 2, 256, 3), (2, 1, 20, 24), (1, 1, 15, 8), (1, 1, 112, 16)],
)
def test_reads_what_plain_attention_reads(
    dtype: torch.dtype, cap: float | None, heads: int, kv_heads: int, size: int, block_size: int, sums: int
) -> None:
    """A whole prompt, a chunk behind a context, one under a window, and rows that all see the same."""
    torch.manual_seed(0)
    scores = Scores(2 * size**-0.5, cap)
    seen = [
        [(0, end) for end in range(1, 70)],
        [(5, end) for end in range(100, 107)],
        [(end - 9, end) for end in range(30, 100)],
        [(0, 64)] * 3,
        [(64, 65)],
    ]
    tables = np.random.default_rng(0).permutation(len(seen) * WIDTH).reshape(len(seen), WIDTH)
    pools = KvCache(BlockGeometry(2, kv_heads, size, dtype), block_size, len(seen) * WIDTH)
    runs = runs_of(seen, tables)
    poisoned(pools, runs)
    # Of a wider tensor, as the queries of a product are.
    query = torch.randn(len(runs.rows), heads + 3, size).to(dtype)[:, 1 : heads + 1]
    out, lse = torch.empty(query.shape), torch.empty(query.shape[:2])
    prompt_attention(pools, 1, query, runs, scores, out, lse, merge=False)
    check(pools, query, runs, scores, out, lse, sums)


@pytest.mark.parametrize("way", [BFLOAT16_DOT, BFLOAT16_WIDENED, BFLOAT16_MATRIX])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 16), (torch.bfloat16, 15), (torch.float32, 16)])
def test_pairs_are_multiplied_where_they_are_fast(
    way: int, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def compiled(_stored: object, _lanes: int, kind: int) -> int:
        asked.append(kind)
        return 0

    monkeypatch.setattr(prompt_module, "bfloat16_sums", lambda: way)
    monkeypatch.setattr(prompt_module, "_compiled", compiled)
    monkeypatch.setattr(prompt_module, "run", lambda *_, **__: None)
    pools = KvCache(BlockGeometry(2, 1, size, dtype), 4, WIDTH)
    runs = runs_of([[(0, 3)]], np.arange(WIDTH))
    query = torch.zeros(1, 1, size, dtype=dtype)
    prompt_attention(pools, 1, query, runs, Scores(1.0), query.float(), torch.zeros(1, 1), merge=False)
    pairs = way == BFLOAT16_DOT and dtype == torch.bfloat16 and size == 16
    assert asked == [BFLOAT16_DOT if pairs else FLOAT32]


@DTYPES
def test_parts_are_merged(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tables = np.arange(2 * WIDTH).reshape(2, WIDTH)
    tables[1] = tables[0]
    pools = KvCache(BlockGeometry(2, 2, 16, dtype), 4, 2 * WIDTH)
    # The same rows, since both number them backwards.
    front, back, both = ([[(begin, end)] * 9] for begin, end in ((0, 40), (40, 55), (0, 55)))
    query = torch.randn(9, 4, 16).to(dtype)
    out, lse = torch.empty(query.shape), torch.empty(query.shape[:2])
    whole = runs_of(both, tables)
    poisoned(pools, whole)
    for part, merge in ((front, False), (back, True)):
        prompt_attention(pools, 1, query, runs_of(part, tables), Scores(0.5), out, lse, merge=merge)
    check(pools, query, whole, Scores(0.5), out, lse, bfloat16_sums())


@DTYPES
def test_a_row_does_not_depend_on_what_is_computed_with_it(dtype: torch.dtype) -> None:
    """Bit for bit: all of a prompt, its end alone, and its end in another run's company."""
    torch.manual_seed(0)
    tables = np.arange(2 * WIDTH).reshape(2, WIDTH)
    pools = KvCache(BlockGeometry(2, 1, 32, dtype), 4, 2 * WIDTH)
    pools.device[:] = torch.randn(pools.device.shape).to(dtype)
    query = torch.randn(100, 2, 32).to(dtype)

    def last(seen: list[list[tuple[int, int]]]) -> torch.Tensor:
        runs = runs_of(seen, tables)
        out, lse = torch.empty(query.shape), torch.empty(query.shape[:2])
        # The row of the place that sees 100 slots is always this one.
        rows = torch.where(runs.ends == 100, 99, torch.arange(len(runs.rows)))
        runs = PagedRuns(runs.firsts, runs.offsets, rows, runs.begins, runs.ends, runs.tables, runs.most_rows)
        prompt_attention(pools, 1, query, runs, Scores(0.3), out, lse, merge=False)
        return torch.cat([out[99].flatten(), lse[99]])

    alone = last([[(0, 100)]])
    for seen in ([[(0, end) for end in range(1, 101)]], [[(0, end) for end in range(95, 101)], [(0, 7)]]):
        assert torch.equal(last(seen), alone)


@DTYPES
def test_a_nan_that_is_seen_is_told(dtype: torch.dtype) -> None:
    tables = np.arange(2 * WIDTH).reshape(2, WIDTH)
    pools = KvCache(BlockGeometry(2, 1, 16, dtype), 4, 2 * WIDTH)
    pools.device[:] = 1
    pools.device[2, 1, 0, 3] = math.nan
    runs = runs_of([[(0, end) for end in range(8, 16)]], tables)
    out = torch.empty(8, 2, 16)
    query = torch.ones(8, 2, 16, dtype=dtype)
    prompt_attention(pools, 1, query, runs, Scores(1.0), out, torch.empty(8, 2), merge=False)
    # Rows are numbered backwards: slot 11 is the last that the fifth place sees first.
    assert [bool(row.isfinite().all()) for row in out] == [False] * 4 + [True] * 4
