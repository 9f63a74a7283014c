"""Attention that PageKV would compute wrongly is refused, or put right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pagekv.executor.model.attention_interface import Scores, UnsupportedAttention, paged_attention


class Layer(nn.Module):
    layer_idx = 0

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


class Never:
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> Any:
        raise AssertionError("refused calls must not get here")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"paged": None}, "keyword arguments"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "mask of its own"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"block_indices": torch.zeros(1), "position_ids": torch.zeros(1)}, "uses block_indices"),
        ({"sliding_window": 0}, "a window of 0 tokens"),
        ({"s_aux": torch.zeros(1)}, r"sinks of shape \(1,\), not one for each head"),
    ],
)
def test_refuses_what_it_would_get_wrong(change: dict[str, Any], reason: str) -> None:
    tensor = torch.zeros(1, 2, 2, 4)
    arguments = {"attention_mask": None, "paged": Never(), **change}
    with pytest.raises(UnsupportedAttention, match=reason):
        paged_attention(Layer(), tensor, tensor, tensor, **arguments)


def test_refuses_attention_that_is_not_causal() -> None:
    tensor = torch.zeros(1, 2, 2, 4)
    with pytest.raises(UnsupportedAttention, match="not causal"):
        paged_attention(Layer(is_causal=False), tensor, tensor, tensor, None, paged=Never())


def test_hands_on_heads_whose_elements_lie_side_by_side() -> None:
    class Taken:
        def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Scores) -> Any:
            for given in (query, key, value):
                assert torch.equal(given, tensor[0])
                assert given.stride(-1) == 1
            return torch.zeros(3, 2, 4)

    tensor = torch.randn(1, 2, 3, 4)
    apart = tensor.transpose(2, 3).contiguous().transpose(2, 3)
    assert apart.stride(-1) != 1
    out, _none = paged_attention(Layer(), apart, tensor, apart, None, paged=Taken())
    assert out.shape == (1, 3, 2, 4)
