"""The choice between compiled products and torch's, by their times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagekv.executor.cpu import products
from pagekv.executor.cpu.native.product import Product
from pagekv.executor.cpu.native.rows import gated
from pagekv.executor.cpu.native.vectors import vector_lanes
from pagekv.executor.cpu.products import TIMED_ROWS, TorchProduct, fastest_product


@pytest.fixture(autouse=True)
def timed_anew() -> Iterator[None]:
    fastest_product.cache_clear()
    yield
    fastest_product.cache_clear()


@pytest.mark.parametrize("packable", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_multiplies_and_gates(monkeypatch: pytest.MonkeyPatch, packable: bool, dtype: torch.dtype) -> None:
    if not packable:
        monkeypatch.setattr(products, "is_packable", lambda dtype: False)
    torch.manual_seed(0)
    weight, bias, rows = torch.randn(20, 8).to(dtype), torch.randn(20).to(dtype), torch.randn(3, 8).to(dtype)
    plain = torch.nn.functional.linear(rows, weight, bias)
    assert torch.allclose(TorchProduct(weight, bias)(rows), plain, atol=1e-5, rtol=1e-2)
    assert torch.allclose(TorchProduct(weight, bias, "silu")(rows), gated(plain, "silu"), atol=1e-5, rtol=3e-2)


@pytest.mark.skipif(not vector_lanes(), reason="this processor has no vectors that the loops know")
@pytest.mark.parametrize(
    ("few", "many", "chosen"), [(1.0, 1.0, Product), (0.5, 1.3, TorchProduct), (1.3, 0.5, TorchProduct)]
)
def test_the_faster_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, few: float, many: float, chosen: type[Product] | type[TorchProduct]
) -> None:
    """`few`, `many`: the time of the loops in that of torch, at few and at many rows."""
    share = dict(zip(TIMED_ROWS, (few, many), strict=True))

    def told(ours: object, theirs: object, rows: torch.Tensor) -> tuple[float, float]:
        assert isinstance(ours, Product)
        assert isinstance(theirs, TorchProduct)
        assert torch.get_num_threads() == 1
        return share[len(rows)], 1.0

    monkeypatch.setattr(products, "seconds", told)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert fastest_product(torch.float32) is chosen
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not vector_lanes(), reason="this processor has no vectors that the loops know")
@pytest.mark.parametrize(("slow", "chosen"), [(products.ATTEMPTS - 1, Product), (products.ATTEMPTS, TorchProduct)])
def test_the_loops_are_timed_again_where_others_slowed_them_down(
    monkeypatch: pytest.MonkeyPatch, slow: int, chosen: type[Product] | type[TorchProduct]
) -> None:
    calls = iter([(2.0, 1.0)] * slow + [(1.0, 1.0)] * 99)
    monkeypatch.setattr(products, "seconds", lambda ours, theirs, rows: next(calls))
    assert fastest_product(torch.float32) is chosen


def test_a_processor_without_known_vectors_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "vector_lanes", lambda: 0)
    assert fastest_product(torch.float32) is TorchProduct


def test_seconds_are_those_of_the_fastest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which the first way takes 5, 6, 4 and so on, and the second always 3."""
    took = [5.0, 3.0, 6.0, 3.0, 4.0, 3.0, *(7.0, 3.0) * (products.ROUNDS - 3)]
    clock = iter([time for at in took for time in (100.0, 100.0 + at)])
    monkeypatch.setattr("time.thread_time", lambda: next(clock))
    assert products.seconds(torch.clone, torch.clone, torch.ones(1)) == (4.0, 3.0)
