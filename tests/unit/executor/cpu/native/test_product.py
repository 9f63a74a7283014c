"""Products with weights in panels, against the same in torch and float64, with vectors of every length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from support.executor.loop_kinds import LOOP_KINDS, use_loops

from pagekv.executor.cpu.native import product as product_module
from pagekv.executor.cpu.native.product import CHUNK_ROWS, WIDENED_STEPS, Product
from pagekv.executor.cpu.native.tile import BFLOAT16_WIDENED
from pagekv.executor.cpu.native.vectors import vector_lanes

pytestmark = pytest.mark.skipif(not vector_lanes(), reason="this processor has no vectors that the loops know")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# In, out: whole panels; a little more; less than one; an odd number of pairs.
SIZES = ((512, 192), (64, 130), (37, 18), (1, 2))


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]  # pytest has Any


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.fixture(params=LOOP_KINDS, ids=str)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Vectors as long as another processor has them; None: those of this one."""
    if request.param is None:
        return None
    use_loops(product_module, request.param, monkeypatch)
    return int(request.param[0])


def weights(inner: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.randn(columns, inner) / inner**0.5).to(dtype), torch.randn(columns).to(dtype)


def plain(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None
) -> torch.Tensor:
    found = torch.nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    if activation is None:
        return found
    gate, up = found.chunk(2, -1)
    way = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    return way * up


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = TOLERANCE[found.dtype]
    return torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("inner", "columns"), SIZES)
def test_every_number_of_rows(dtype: torch.dtype, lanes: int | None, inner: int, columns: int) -> None:
    torch.manual_seed(0)
    weight, _ = weights(inner, columns, dtype)
    multiply = Product(weight, None)
    for count in (*range(1, 15), 31, 32, 33, 80):
        rows = torch.randn(count, inner).to(dtype)
        found = multiply(rows)
        assert found.dtype == dtype
        assert near(found, plain(rows, weight, None)), count


@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inner", "columns"), SIZES)
def test_bias_and_gating(
    dtype: torch.dtype, lanes: int | None, activation: str | None, biased: bool, inner: int, columns: int
) -> None:
    torch.manual_seed(0)
    weight, bias = weights(inner, columns, dtype)
    rows = torch.randn(7, inner).to(dtype)
    given = bias if biased else None
    assert near(Product(weight, given, activation)(rows), plain(rows, weight, given, activation))


@pytest.mark.parametrize("columns", [18, 2050])
@pytest.mark.parametrize("count", [3, CHUNK_ROWS - 1, 2 * CHUNK_ROWS + 1])
def test_threads_share_panels_and_rows(threads: int, dtype: torch.dtype, columns: int, count: int) -> None:
    torch.manual_seed(0)
    weight, bias = weights(96, columns, dtype)
    rows = torch.randn(count, 96).to(dtype)
    assert near(Product(weight, bias)(rows), plain(rows, weight, bias))


@pytest.mark.long
def test_a_thread_widens_no_more_rows_at_a_time_than_fit(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    torch.manual_seed(0)
    weight, bias = weights(96, 130, torch.bfloat16)
    rows = torch.randn(50, 96).to(torch.bfloat16)
    monkeypatch.setattr(product_module, "bfloat16_sums", lambda: BFLOAT16_WIDENED)
    whole = Product(weight, bias)(rows)
    assert near(whole, plain(rows, weight, bias))
    monkeypatch.setattr(product_module, "WIDENED_NUMBERS", 9 * 96)
    assert torch.equal(Product(weight, bias)(rows), whole)


# Of the matrix unit's tiles the largest are for whole runs of pairs alone: the second. The third is several times as
# much as is widened at a time, and the last of it less.
@pytest.mark.parametrize("inner", [100, 96, 2 * (2 * WIDENED_STEPS + 5)])
def test_a_row_is_the_same_whatever_the_others_are(dtype: torch.dtype, inner: int, lanes: int | None) -> None:
    torch.manual_seed(0)
    weight, bias = weights(inner, 70, dtype)
    multiply = Product(weight, bias)
    rows = torch.randn(300, inner).to(dtype)
    whole = multiply(rows)
    assert near(whole, plain(rows, weight, bias))
    for begin, end in ((0, 1), (5, 12), (17, 50), (200, 300)):
        assert torch.equal(multiply(rows[begin:end]), whole[begin:end])


def test_no_rows_and_rows_that_are_apart(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = weights(64, 70, dtype)
    multiply = Product(weight, bias)
    assert multiply(torch.empty(0, 64, dtype=dtype)).shape == (0, 70)
    rows = torch.randn(9, 128).to(dtype)[:, ::2]
    assert near(multiply(rows), plain(rows, weight, bias))
    # In the caller's memory, if asked.
    out = torch.full((9, 70), torch.nan, dtype=dtype)
    assert multiply(rows, out) is out
    assert torch.equal(out, multiply(rows))


def test_what_is_no_number_is_told_and_stays_in_its_row(dtype: torch.dtype, lanes: int | None) -> None:
    torch.manual_seed(0)
    weight, bias = weights(37, 70, dtype)
    rows = torch.randn(9, 37).to(dtype)
    rows[2, 36], rows[5, 0] = math.nan, math.inf
    found = Product(weight, bias)(rows)
    assert found[2].isnan().all()
    assert not found[5].isfinite().any()
    left = [row for row in range(9) if row not in (2, 5)]
    assert near(found[left], plain(rows[left], weight, bias))
    rows[5, 0] = 1
    weight[69, 3] = math.inf
    found = Product(weight, bias)(rows)[left]
    assert not found[:, 69].isfinite().any()
    assert near(found[:, :69], plain(rows[left], weight[:69], bias[:69]))


def test_weights_take_little_more_than_they_did() -> None:
    multiply = Product(torch.ones(1030, 512), None)
    assert multiply._panels.numel() <= 1.1 * 1030 * 512


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("inner", "columns"), [(96, 64), (37, 18)])
def test_each_of_several_products_has_its_own_rows(
    threads: int, dtype: torch.dtype, lanes: int | None, inner: int, columns: int, activation: str | None
) -> None:
    """Also none, and more than a chunk of them."""
    products = [Product(*weights(inner, columns, dtype), activation) for _ in range(5)]
    ends = [3, 3, 4, 20, 20 + 2 * CHUNK_ROWS + 1]
    bounds = list(pairwise([0, *ends]))
    rows = torch.randn(ends[-1], inner).to(dtype)
    alone = torch.cat([product(rows[low:high]) for product, (low, high) in zip(products, bounds, strict=True)])
    assert torch.equal(Product.each(products, rows, bounds), alone)
    few = bounds[:3]
    assert torch.equal(Product.each(products[:3], rows[:4], few), alone[:4])
