"""The choice between compiled products and torch's, by their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from pagekv.executor.cpu import products
from pagekv.executor.cpu.native.product import Product
from pagekv.executor.cpu.native.rows import gated
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


@pytest.mark.parametrize(
    ("few", "many", "chosen"), [(1.0, 1.0, Product), (0.5, 1.3, TorchProduct), (1.3, 0.5, TorchProduct)]
)
def test_the_faster_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, few: float, many: float, chosen: type[Product] | type[TorchProduct]
) -> None:
    """`few`, `many`: what the loops take of what torch takes, at few and at many rows."""
    share = dict(zip(TIMED_ROWS, (few, many), strict=True))

    def told(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> float:
        assert torch.get_num_threads() == 1
        return share[len(rows)] if isinstance(product, Product) else 1.0

    monkeypatch.setattr(products, "vector_lanes", lambda: 8)
    monkeypatch.setattr(products, "seconds", told)
    before = torch.get_num_threads()
    assert fastest_product(torch.float32) is chosen
    assert torch.get_num_threads() == before


def test_a_processor_without_known_vectors_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "vector_lanes", lambda: 0)
    assert fastest_product(torch.float32) is TorchProduct


def test_seconds_are_those_of_the_fastest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 10.0, 12.0, 20.0, 24.0, 30.0, 35.0, 40.0, 49.0])
    monkeypatch.setattr("time.thread_time", lambda: next(clock))
    assert products.seconds(lambda rows: rows, torch.ones(1)) == 2.0
