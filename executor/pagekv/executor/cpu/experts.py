"""Mixtures of experts with weights laid out once, in place of transformers' grouped products.

The compiled loops multiply the rows of all experts in one call. On a 2-core Intel Xeon (family 6, model 207, without
its matrix unit) a step of 16 rows through a model of 8 layers with 16 experts, 4 for each row (hidden 512, intermediate
384), takes 20.9 ms in float32, against 25.3 with a call for each expert; in bfloat16 15.1 against 20.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pagekv.executor.cpu.linear import PackedLinear, is_packable

MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Callable[[torch.Tensor], torch.Tensor]]

# The fields by which transformers describes experts whose products others may compute, and those of newer versions that
# tell of more than is computed here.
_SAID = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
_MORE = ("has_post_expert_norm", "_is_expert_parallel")


class PackedExperts(nn.Module):
    """The sum over a row's experts, weighted, of `down(gate(up(row)))`, with weights that never change. Holds no copy
    in the plain layout. A row's numbers do not depend on how many others there are, if those of `make` do not.
    """

    def __init__(self, experts: Any, make: MakeProduct) -> None:
        """Takes the weights out of transformers' module. `make`: the product of weights `[out, in]` and bias."""
        super().__init__()
        self.num_experts: int = experts.num_experts
        self._dtype: torch.dtype = experts.down_proj.dtype
        # Compiled loops: the rows of all experts in one call.
        self._each = getattr(make, "each", _one_by_one)
        name = "gate_up_proj" if experts.has_gate else "up_proj"
        self._gate: Callable[[torch.Tensor], torch.Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
        self._up, self._down = (_products(experts, each, make) for each in (name, "down_proj"))

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` of rows `[T, hidden]`, the experts of each `[T, K]` and their weights `[T, K]`."""
        count, order = chosen.shape[1], chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=self.num_experts).cumsum(0).tolist()
        bounds = list(pairwise([0, *ends]))
        # As transformers' grouped products do; loops would take the bytes of another type for numbers of this one.
        gated = self._gate(self._each(self._up, rows[order // count].to(self._dtype), bounds))
        found = self._each(self._down, gated.to(self._dtype), bounds)
        found = found * weights.flatten()[order, None]
        back = torch.empty_like(found)
        back[order] = found
        return back.view(len(rows), count, -1).sum(1).to(rows.dtype)


def pack_experts(model: nn.Module, make: MakeProduct | None = None) -> None:
    """Replaces every mixture of experts of the model that it can compute in place, none where oneDNN cannot help.
    `make`: as in `pack_linears`.
    """
    if make is None:
        if not is_packable(next(model.parameters()).dtype):
            return
        make = PackedLinear
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            said = all(hasattr(child, each) for each in _SAID)
            more = any(getattr(child, each, False) for each in _MORE)
            # By hooks or distributed tensors, of which each rank has a share, ranks join what they have computed.
            shared = child._forward_pre_hooks or child._forward_hooks or any(map(_is_distributed, child.parameters()))
            if said and not (more or shared):
                setattr(parent, name, PackedExperts(child, make))


def _is_distributed(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "to_local")


def _products(experts: Any, name: str, make: MakeProduct) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Of each expert the product with these weights, which leave the module."""
    weights = getattr(experts, name).detach()
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * len(weights)
    delattr(experts, name)
    return [
        make(weight.t() if experts.is_transposed else weight, bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _one_by_one(
    products: Sequence[Callable[[torch.Tensor], torch.Tensor]], rows: torch.Tensor, bounds: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """`[S, out]` of rows `[S, in]`, those within the bounds of a product by that one."""
    return torch.cat(
        [product(rows[low:high]) for product, (low, high) in zip(products, bounds, strict=True) if high > low]
    )
