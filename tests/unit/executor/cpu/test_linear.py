"""Packed linear layers compute what plain ones do, for every number of rows."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pagekv.executor.cpu import linear
from pagekv.executor.cpu.linear import LoopLinear, PackedLinear, pack_linears
from pagekv.executor.cpu.native.vectors import vector_lanes


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


@pytest.fixture
def unpackable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which oneDNN does not multiply bfloat16."""
    monkeypatch.setattr(linear, "is_packable", lambda dtype: dtype == torch.float32)


@pytest.mark.skipif(not vector_lanes(), reason="this processor has no vectors that the loops know")
def test_loops_multiply_bfloat16_where_onednn_does_not(unpackable: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80), nn.Sequential(Conv1D(4, 80), nn.Linear(4, 4, bias=False))).bfloat16()
    data = torch.randn(2, 5, 48).bfloat16()
    with torch.inference_mode():
        before = model(data)
        assert pack_linears(model, loops=True) == 3
        assert isinstance(model[0], LoopLinear)
        assert model[0].weight.dtype == torch.bfloat16
        torch.testing.assert_close(model(data), before, atol=2e-2, rtol=2e-2)
        assert model(data[:, :0]).shape == (2, 0, 4)


def test_bfloat16_stays_as_it_is_without_loops(unpackable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    assert pack_linears(model) == 0
    monkeypatch.setattr(linear, "find_spec", lambda name: None)
    assert pack_linears(model, loops=True) == 0
    assert isinstance(model[0], nn.Linear)


def test_a_numba_that_does_not_work_changes_nothing(unpackable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pagekv.executor.cpu.native.product", None)
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    assert pack_linears(model, loops=True) == 0
    assert isinstance(model[0], nn.Linear)
