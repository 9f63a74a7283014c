"""A model split over ranks by transformers' tensor-parallel plan for its family: the share of each rank, and the
modules that join the results of ranks.

transformers loads each rank's share of the weights. Afterwards its hooks and distributed tensors are replaced, in the
linear layers and the embedding, by plain layers of the share, which can be packed and fused like any other, and by
modules that join the ranks' results.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pagekv.executor.model.shards import Shards

# The styles of linear layers in transformers' plans. Column-wise: a rank has some of the outputs, and keeps them or
# gathers those of all ranks. Row-wise: a rank has some of the inputs, and the output is the sum over ranks.
_KEPT, _GATHERED = ("colwise",), ("colwise_gather_output", "colwise_rep")
_SUMMED, _SPLIT = ("rowwise",), ("rowwise_split_input", "rowwise_rep")


class SummedLinear(nn.Module):
    """A linear layer of which each rank has some of the inputs. `shard` has a bias on rank 0 only."""

    def __init__(self, shard: nn.Linear, shards: Shards, split: bool) -> None:
        """`split`: the rank gets all inputs and selects its own."""
        super().__init__()
        self.shard, self._shards, self._split = shard, shards, split

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        if self._split:
            parts = rows.tensor_split(_bounds(rows.shape[-1], self._shards.size), -1)
            rows = parts[self._shards.rank]
        return self._shards.sum(self.shard(rows))


class GatheredLinear(nn.Module):
    """A linear layer of which each rank has some of the `width` outputs. `everywhere`: all ranks get all outputs, not
    only rank 0.
    """

    def __init__(self, shard: nn.Linear, shards: Shards, width: int, everywhere: bool) -> None:
        super().__init__()
        self.shard, self.width, self._shards, self._everywhere = shard, width, shards, everywhere

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., width]`."""
        join = self._shards.gather_everywhere if self._everywhere else self._shards.gather
        return join(self.shard(rows), self.width)


class ShardedEmbedding(nn.Module):
    """An embedding of which each rank has the rows of some consecutive token ids: `weight`, from id `first` on."""

    def __init__(self, weight: torch.Tensor, first: int, num_embeddings: int, shards: Shards, factor: float) -> None:
        """`factor`: scales the embedding, in families that do so."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.num_embeddings = num_embeddings
        self._first, self._shards = first, shards
        # A scalar on the host, in the rows' type: torch need not copy it to the device.
        self._factor = None if factor == 1 else torch.tensor(factor, dtype=weight.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` of token ids `[...]`."""
        own = ids - self._first
        absent = (own < 0) | (own >= len(self.weight))
        rows = nn.functional.embedding(own.masked_fill(absent, 0), self.weight)
        # Exactly one rank has each row and the others add zeros, so the sum is the row itself.
        rows = self._shards.sum(rows.masked_fill_(absent[..., None], 0))
        return rows if self._factor is None else rows * self._factor


def num_rank_kv_heads(num_kv_heads: int, ranks: int) -> int:
    """KV heads on each rank: heads are replicated up to the least common multiple of heads and ranks, then divided."""
    return num_kv_heads // math.gcd(num_kv_heads, ranks)


def kv_heads_of(rank: int, num_kv_heads: int, ranks: int) -> list[int]:
    """The KV heads of a rank, in order; each serves an equal number of the rank's query heads."""
    count = num_rank_kv_heads(num_kv_heads, ranks)
    copies = count * ranks // num_kv_heads
    return [(rank * count + place) // copies for place in range(count)]


def split_plan(num_kv_heads: int, ranks: int, plan: dict[str, str]) -> dict[str, str]:
    """Changes to the family's own plan. If the number of ranks does not divide the KV heads, each rank loads all KV
    heads, from which `take_shards` selects its own. Families whose ranks gather all heads keep their plan.
    """
    if num_kv_heads % ranks == 0:
        return {}
    names = ("layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj")
    return {f"model.{name}": "replicate" for name in names if plan.get(name) == "colwise"}


def take_shards(model: PreTrainedModel, shards: Shards, num_kv_heads: int, head_size: int) -> None:
    """Replaces the parts of a model that transformers split over ranks. Raises ValueError for a layer with a style that
    this module does not know.
    """
    for name, module in list(model.named_modules()):
        style = _style(model, name)
        if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
            _replace(model, name, _embedding(module, shards))
        elif isinstance(module, nn.Linear) and style is not None:
            _replace(model, name, _linear(module, style, shards, is_head=module is model.get_output_embeddings()))
        elif isinstance(module, nn.Linear) and _is_replicated(model, name):
            _replace(model, name, _own_heads(module, shards, num_kv_heads, head_size))


def keeps_heads(model: PreTrainedModel) -> bool:
    """Whether each rank keeps the heads and feed-forward elements that it computed, until a product sums them over
    ranks. True for a model that is not split.
    """
    return not any(
        isinstance(module, GatheredLinear) and module is not model.get_output_embeddings() for module in model.modules()
    )


def _planned(model: PreTrainedModel, name: str) -> str | None:
    generic = ".".join("*" if part.isdecimal() else part for part in name.split("."))
    style: str | None = (model.tp_plan or {}).get(generic)
    return style


def _style(model: PreTrainedModel, name: str) -> str | None:
    style = _planned(model, name)
    return None if style in ("replicate", "replicated_with_grad_allreduce") else style


def _is_replicated(model: PreTrainedModel, name: str) -> bool:
    """Whether this is a key or value projection that `split_plan` left whole."""
    return name.endswith((".k_proj", ".v_proj")) and _planned(model, name) == "replicate"


def _replace(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _local(parameter: Any) -> torch.Tensor:
    found: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found.detach()


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _linear(module: nn.Linear, style: str, shards: Shards, *, is_head: bool) -> nn.Module:
    weight, bias = _local(module.weight), None if module.bias is None else _local(module.bias)
    if style in _KEPT:
        return _plain(weight, bias)
    if style in _GATHERED:
        # Only rank 0 needs all logits, because it alone samples.
        return GatheredLinear(_plain(weight, bias), shards, module.out_features, everywhere=not is_head)
    if style in (*_SUMMED, *_SPLIT):
        return SummedLinear(_plain(weight, None if shards.rank else bias), shards, split=style in _SPLIT)
    raise ValueError(f"layers split as {style!r} are not supported")


def _embedding(module: nn.Embedding, shards: Shards) -> nn.Module:
    first = shards.rank * math.ceil(module.num_embeddings / shards.size)
    # Gemma 3 scales its embeddings.
    factor = float(getattr(module, "scalar_embed_scale", 1.0))
    return ShardedEmbedding(_local(module.weight), first, module.num_embeddings, shards, factor)


def _own_heads(module: nn.Linear, shards: Shards, num_kv_heads: int, head_size: int) -> nn.Module:
    rows = torch.tensor(kv_heads_of(shards.rank, num_kv_heads, shards.size))
    weight = module.weight.detach().view(num_kv_heads, head_size, -1)[rows].flatten(0, 1)
    bias = None if module.bias is None else module.bias.detach().view(num_kv_heads, head_size)[rows].flatten()
    return _plain(weight, bias)


def _bounds(width: int, size: int) -> list[int]:
    part = math.ceil(width / size)
    return [min(width, part * number) for number in range(1, size)]
