"""Packed linear layers compute what plain ones do, for every number of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pagekv.executor.cpu import linear
from pagekv.executor.cpu.linear import PackedLinear, ProductLinear, pack_linears
from pagekv.executor.cpu.native.product import Product
from pagekv.executor.cpu.native.vectors import vector_lanes
from pagekv.executor.cpu.products import TorchProduct


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 31, 32, 33, 500])
def test_equals_the_plain_layer(bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias)
    with torch.inference_mode():
        packed = PackedLinear(plain.weight, plain.bias)
        data = torch.randn(1, rows, 48)
        torch.testing.assert_close(packed(data), plain(data), atol=1e-5, rtol=1e-5)


def test_layers_are_replaced_in_place_and_nothing_else() -> None:
    class Special(nn.Linear):
        """May do more than multiply, so it stays."""

    torch.manual_seed(0)
    special = Special(4, 3)
    inner = nn.Sequential(Conv1D(4, 8), special)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), inner)
    data = torch.randn(5, 6)
    with torch.inference_mode():
        before = model(data)
        pack_linears(model)
        assert [type(layer) for layer in (model[0], inner[0])] == [PackedLinear, PackedLinear]
        torch.testing.assert_close(model(data), before)
    assert inner[1] is special


def test_weights_that_are_read_apart_from_their_layer_are_not_there() -> None:
    """torch multiplies by weights without memory, too, and gives any numbers."""
    plain = nn.Linear(48, 80)
    for layer in (PackedLinear(plain.weight, plain.bias), ProductLinear(plain.weight, plain)):
        assert (layer.weight.dtype, layer.weight.shape) == (torch.float32, (80, 48))
        weight: Any = layer.weight
        with pytest.raises(TypeError, match="must be Tensor"):
            nn.functional.linear(torch.zeros(1, 48), weight)


def test_double_precision_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).double()
    pack_linears(model)
    assert isinstance(model[0], nn.Linear)


@pytest.mark.parametrize("make", [Product, TorchProduct])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_place_of_layers(dtype: torch.dtype, make: type[Product | TorchProduct]) -> None:
    if make is Product and not vector_lanes():
        pytest.skip("this processor has no vectors that the loops know")
    torch.manual_seed(0)
    inner = nn.Sequential(Conv1D(4, 80), nn.Linear(4, 4, bias=False))
    model = nn.Sequential(nn.Linear(48, 80), inner).to(dtype)
    data = torch.randn(2, 5, 48).to(dtype)
    with torch.inference_mode():
        before = model(data)
        pack_linears(model, make)
        assert all(isinstance(layer, ProductLinear) for layer in inner)
        assert isinstance(model[0], ProductLinear)
        assert model[0].weight.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(model(data), before, atol=tolerance, rtol=tolerance)
        assert model(data[:, :0]).shape == (2, 0, 4)
        with pytest.raises(TypeError, match=r"rows of torch\.float64 for weights of"):
            model(data.double())


def test_bfloat16_that_onednn_does_not_multiply_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_packable", lambda dtype: dtype == torch.float32)
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    pack_linears(model)
    assert isinstance(model[0], nn.Linear)
