"""Packed linear layers compute what plain ones do, for every number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pagekv.executor.cpu.linear import PackedLinear, pack_linears


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
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Sequential(Conv1D(4, 8), special))
    data = torch.randn(5, 6)
    with torch.inference_mode():
        before = model(data)
        assert pack_linears(model) == 2
        torch.testing.assert_close(model(data), before)
    assert special in list(model.modules())


def test_double_precision_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).double()
    assert pack_linears(model) == 0
    assert isinstance(model[0], nn.Linear)
