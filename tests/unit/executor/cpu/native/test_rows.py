"""Passes over the rows of a step, against the same in torch. Few rows are done by one thread, many by all."""

from __future__ import annotations

import math

import pytest
import torch

from pagekv.executor.cpu.native.rows import add_norm, embed, gated, narrowed, rotate
from pagekv.executor.model.decoder import Embedding, RmsNorm

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
COUNTS = (1, 7, 3000)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.float(), expected.float(), rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


def norm_of(size: int, eps: float) -> RmsNorm:
    return RmsNorm(torch.rand(size) + 0.5, eps)


def plain(norm: RmsNorm | None, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.float()
    if norm is None:
        return rows
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("added", "first", "second"), [(1, 0, 1), (1, 1, 1), (1, 1, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0)]
)
def test_adding_and_norms(dtype: torch.dtype, count: int, added: int, first: int, second: int) -> None:
    torch.manual_seed(0)
    size = 48
    rows, more = torch.randn(2, count, size).to(dtype)
    added_norm, norm = norm_of(size, 1e-2) if first else None, norm_of(size, 1e-3) if second else None
    before = rows.clone()
    out = add_norm(rows, more if added else None, 0.7, added_norm, norm)
    expected = (before.float() + 0.7 * plain(added_norm, more)).to(dtype) if added else before
    assert near(rows, expected)
    assert near(out, plain(norm, rows))
    assert (out is rows) == (norm is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("factor", [1.0, 22.625])
def test_embeddings(dtype: torch.dtype, count: int, factor: float) -> None:
    """Bit for bit as torch scales them."""
    torch.manual_seed(0)
    table, token_ids = torch.randn(70, 48).to(dtype), torch.randint(70, (count,))
    assert torch.equal(embed(Embedding(table, factor), token_ids), table[token_ids] * factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates(dtype: torch.dtype, count: int, activation: str) -> None:
    torch.manual_seed(0)
    both = (torch.randn(count, 2 * 40) * 4).to(dtype)
    gate, up = both.float().chunk(2, -1)
    way = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    assert near(gated(both, activation), way * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("rotated", "norms"), [(16, ""), (8, ""), (0, ""), (16, "head"), (16, "all")])
def test_rotation_and_storing(dtype: torch.dtype, count: int, rotated: int, norms: str) -> None:
    torch.manual_seed(0)
    queries, pairs, size, block_size, num_blocks = 4, 2, 16, 4, -(-count // 4) + 1
    heads = torch.randn(count, queries + 2 * pairs, size).to(dtype)
    before = heads.float().clone()
    lengths = (size, size) if norms == "head" else (queries * size, pairs * size)
    query_norm, key_norm = (norm_of(length, 1e-3) if norms else None for length in lengths)
    angles = torch.rand(count + 5, rotated // 2) * math.tau
    numbers = torch.randint(len(angles), (count,))
    rotation = (torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()) if rotated else None
    # As a layer's view of a pool: blocks are apart.
    pool = torch.zeros(num_blocks, 3, 2, block_size, pairs, size, dtype=dtype)
    keys, values = pool[:, 1, 0], pool[:, 1, 1]
    slots = torch.randperm(num_blocks * block_size)[:count]
    places = slots // block_size * keys.stride(0) + slots % block_size * keys.stride(1)
    rotate(heads, (queries, pairs), rotation, numbers, query_norm, key_norm, places, keys, values)

    query, key = before[:, :queries], before[:, queries : queries + pairs]
    if norms == "head":
        query, key = plain(query_norm, query), plain(key_norm, key)
    elif norms:
        query = plain(query_norm, query.flatten(1)).view_as(query)
        key = plain(key_norm, key.flatten(1)).view_as(key)
    both = torch.cat([query, key], 1).to(dtype).float()
    if rotation is not None:
        turned, rest = both.split((rotated, size - rotated), -1)
        left, right = turned.chunk(2, -1)
        half_turned = torch.cat([-right, left], -1)
        cos, sin = (table[numbers][:, None] for table in rotation)
        both = torch.cat([turned * cos + half_turned * sin, rest], -1)
    assert near(heads[:, : queries + pairs], both)
    assert torch.equal(heads[:, queries + pairs :].float(), before[:, queries + pairs :])
    assert torch.equal(keys[slots // block_size, slots % block_size], heads[:, queries : queries + pairs])
    assert torch.equal(values[slots // block_size, slots % block_size], heads[:, queries + pairs :])
    assert not pool[:, 0].any()
    assert not pool[:, 2].any()


def test_nan_stays_nan() -> None:
    rows = torch.ones(1, 8)
    rows[0, 3] = math.nan
    assert add_norm(rows, None, 0.0, None, norm_of(8, 1e-3)).isnan().all()
    assert gated(rows, "silu").isnan().any()


def test_sums_are_stored_in_the_type_of_the_model() -> None:
    rows = torch.randn(37, 50)
    assert narrowed(rows, torch.float32) is rows
    assert torch.equal(narrowed(rows, torch.bfloat16), rows.bfloat16())
