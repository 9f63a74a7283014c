"""Mixtures of experts whose weights are packed once, in place of transformers' grouped products.

The compiled loops multiply the rows of all experts in one call. On a 2-core Intel Xeon (family 6, model 207, without
its matrix unit) a step of 16 rows through a model of 8 layers with 16 experts, 4 for each row (hidden 512, intermediate
384) took 20.9 ms in float32, against 25.3 with a call for each expert; in bfloat16 15.1 against 20.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pagekv.executor.cpu.linear import PackedLinear, is_packable

MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Callable[[torch.Tensor], torch.Tensor]]

# The fields by which transformers describes experts whose products may be computed elsewhere; and fields of newer
# versions, which are set if the experts do more than is computed here.
_SAID = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
_MORE = ("has_post_expert_norm", "_is_expert_parallel")


class PackedExperts(nn.Module):
    """The weighted sum of `down(gate(up(row)))` over the experts of a row. The experts' weights never change, and there
    is no copy of them in the plain layout. The result of a row does not depend on the number of rows, if the products
    of `make` do not.
    """

    def __init__(self, experts: Any, make: MakeProduct) -> None:
        """Takes the weights out of transformers' module. `make` makes a product with weights `[out, in]` and bias."""
        super().__init__()
        self.num_experts: int = experts.num_experts
        self._dtype: torch.dtype = experts.down_proj.dtype
        self._each, self._sorted, self._summed = _one_by_one, _rows_by_expert, _weighted_sums
        self._gate: Callable[[torch.Tensor], torch.Tensor] | None
        self._gate = experts._apply_gate if experts.has_gate else experts.act_fn
        make_up: MakeProduct = make
        # Compiled loops multiply the rows of all experts in one call, and compute the gate within the first products.
        if hasattr(make, "each"):
            from pagekv.executor.cpu.native.expert_rows import gate_activation, rows_by_expert, weighted_sums

            loops: Any = make
            self._each, self._sorted, self._summed = loops.each, rows_by_expert, weighted_sums
            if (activation := gate_activation(experts)) is not None:
                make_up, self._gate = partial(loops, activation=activation), None
        self._up = _products(experts, "gate_up_proj" if experts.has_gate else "up_proj", make_up)
        self._down = _products(experts, "down_proj", make)

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` from rows `[T, hidden]`, the experts of each row `[T, K]` and the experts' weights `[T, K]`."""
        # transformers' grouped products convert rows, too. Loops would misread the bytes of another type.
        of_experts, places, bounds = self._sorted(rows.to(self._dtype), chosen, self.num_experts)
        gated = self._each(self._up, of_experts, bounds)
        if self._gate is not None:
            gated = self._gate(gated).to(self._dtype)
        return self._summed(self._each(self._down, gated, bounds), places, weights).to(rows.dtype)


def pack_experts(model: nn.Module, make: MakeProduct | None = None) -> None:
    """Replaces, in place, every mixture of experts that `PackedExperts` can compute; without `make`, only if oneDNN
    multiplies numbers of this type. `make`: as in `pack_linears`.
    """
    if make is None:
        if not is_packable(next(model.parameters()).dtype):
            return
        make = PackedLinear
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            said = all(hasattr(child, each) for each in _SAID)
            more = any(getattr(child, each, False) for each in _MORE)
            # Ranks that share the experts join their results by hooks or by distributed tensors.
            shared = child._forward_pre_hooks or child._forward_hooks or any(map(_is_distributed, child.parameters()))
            if said and not (more or shared):
                setattr(parent, name, PackedExperts(child, make))


def _is_distributed(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "to_local")


def _products(experts: Any, name: str, make: MakeProduct) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The product of each expert with its weights of this name, which leave the module."""
    weights = getattr(experts, name).detach()
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * len(weights)
    delattr(experts, name)
    return [
        make(weight.t() if experts.is_transposed else weight, bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _rows_by_expert(
    rows: torch.Tensor, chosen: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """As the function of this name in `native.expert_rows`."""
    order = chosen.flatten().argsort(stable=True)
    ends = chosen.flatten().bincount(minlength=num_experts).cumsum(0).tolist()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return rows[order // chosen.shape[1]], places, list(pairwise([0, *ends]))


def _weighted_sums(found: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As the function of this name in `native.expert_rows`."""
    return (found[places].view(*weights.shape, -1) * weights[..., None]).sum(1)


def _one_by_one(
    products: Sequence[Callable[[torch.Tensor], torch.Tensor]], rows: torch.Tensor, bounds: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """`[S, out]` from rows `[S, in]`: product i multiplies the rows [begin, end) of `bounds[i]`."""
    return torch.cat(
        [product(rows[low:high]) for product, (low, high) in zip(products, bounds, strict=True) if high > low]
    )
