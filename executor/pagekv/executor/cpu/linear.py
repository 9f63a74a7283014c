"""Linear layers whose weights are packed once, for oneDNN or for the compiled loops.

On a 2-core AVX-512 machine in float32, 32 rows of 512 x 1536 take 123 us with packed weights, against 342 us with
torch's own linear (MKL); packing at every multiplication costs a quarter more at decode sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


class StoredWeight(NamedTuple):
    """Type and shape of a layer's weights, which some routers ask for before they call the layer (Hunyuan MoE). Not a
    tensor: torch would also multiply by a tensor without memory, and return garbage.
    """

    dtype: torch.dtype
    shape: torch.Size


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` for weights `[out, in]` that never change. Holds the packed weights only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        self.weight = StoredWeight(weight.dtype, weight.shape)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return packed


class ProductLinear(nn.Module):
    """`PackedLinear` for any product of these weights that computes `[T, out]` from `[T, in]`."""

    def __init__(self, weight: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = StoredWeight(weight.dtype, weight.shape)
        self._product = product

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`. Raises TypeError unless the rows have the weight's type."""
        if rows.dtype != self.weight.dtype:
            raise TypeError(f"rows of {rows.dtype} for weights of {self.weight.dtype}")
        return self._product(rows.reshape(-1, self.in_features)).view(*rows.shape[:-1], self.out_features)


def is_packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN can multiply this type on this processor."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return dtype == torch.float32


def pack_linears(
    model: nn.Module,
    make: Callable[[torch.Tensor, torch.Tensor | None], Callable[[torch.Tensor], torch.Tensor]] | None = None,
) -> None:
    """Replaces every plain linear layer of the model, in place. `make` builds the product of a weight and a bias; None
    takes oneDNN's, and replaces nothing if oneDNN does not support the model's type.
    """
    if make is None and not is_packable(next(model.parameters()).dtype):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Exact types only: a subclass may do more than multiply.
            if type(child) is nn.Linear:
                weight, bias = child.weight.detach(), child.bias
            elif type(child) is Conv1D:
                weight, bias = child.get_parameter("weight").detach().t(), child.get_parameter("bias")
            else:
                continue
            layer = PackedLinear(weight, bias) if make is None else ProductLinear(weight, make(weight, bias))
            setattr(parent, name, layer)
