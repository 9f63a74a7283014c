"""One step's attention by PageKV's kernels, called by the model's layers."""

from __future__ import annotations

from pathlib import Path

import torch

from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.loading import BlockGeometry, LoadedModel
from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.attention_plan import AttentionPlan
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.variants import UnsupportedVariant, Variant, check_wgmma


class KernelAttention:
    """The attention of one step, or of one graph. Implements `StepAttention`."""

    def __init__(self, paged: PagedAttention, plan: AttentionPlan) -> None:
        self.paged, self.plan = paged, plan

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """`scores` is ignored: `PagedAttention` was constructed with the scores of all layers."""
        query, key, value = _rows(query), _rows(key), _rows(value)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self.paged.write(layer, key, value, self.plan)
        self.paged.attend(layer, query, out, self.plan)
        return out


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """`[heads, T, head_size]` as `[T, heads, head_size]` with contiguous, aligned rows as the kernels need them. Nearly
    always a view, because models make heads from rows.
    """
    rows = heads.transpose(0, 1)
    stride = rows.stride()
    aligned = not (rows.data_ptr() % 16 or stride[0] * rows.element_size() % 16)
    if stride[1:] == (rows.shape[2], 1) and aligned:
        return rows
    # Through a flat view, because `contiguous` does not correct the stride of a dimension of size 1.
    return rows.contiguous().view(-1).view(rows.shape)


def make_attention(
    loaded: LoadedModel, pool: torch.Tensor, launcher: Launcher, *, wgmma_prefill: bool = False
) -> PagedAttention:
    """The attention of a model over a pool. Raises UnsupportedVariant if no kernel serves the model."""
    kinds = {(scores.scale, scores.cap) for scores in loaded.scores}
    if len(kinds) != 1:
        raise UnsupportedVariant("scale, soft_cap: must be the same in all layers")
    scale, cap = kinds.pop()
    windows = [scores.window or 0 for scores in loaded.scores]
    sinks = _sinks(loaded)
    variant = Variant(
        dtype=str(loaded.geometry.dtype).removeprefix("torch."),
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        head_size=loaded.geometry.head_size,
        features=bool(cap or any(windows) or sinks is not None),
    )
    return PagedAttention(
        launcher,
        pool,
        variant,
        num_heads=loaded.num_heads,
        scale=scale,
        windows=windows,
        soft_cap=cap or 0.0,
        sinks=sinks,
        kv_scales=loaded.kv_scales if variant.kv_element_bytes == 1 else None,
        wgmma_prefill=wgmma_prefill,
    )


def _sinks(loaded: LoadedModel) -> torch.Tensor | None:
    """The attention sinks `[num_layers, num_heads]`, float32 on the model's device, minus infinity for layers without
    sinks; None if no layer has any.
    """
    found = [scores.sinks for scores in loaded.scores]
    given = next((sinks for sinks in found if sinks is not None), None)
    if given is None:
        return None
    none = torch.full_like(given, -torch.inf, dtype=torch.float32)
    return torch.stack([none if sinks is None else sinks.detach().float() for sinks in found])


def serving_variant(
    directory: Path, loaded: LoadedModel, geometry: BlockGeometry, launcher: Launcher, *, wgmma_prefill: bool = False
) -> Variant:
    """The kernel variant that serves a model over a pool of blocks of `geometry`. Raises ValueError, naming the model,
    the reason and what to do, if there is none, or none that supports `wgmma_prefill`.
    """
    shape = (1, geometry.num_layers, 2, 1, geometry.num_kv_heads, geometry.head_size)
    try:
        variant = make_attention(loaded, torch.empty(shape, dtype=geometry.dtype), launcher).variant
    except UnsupportedVariant as error:
        raise ValueError(
            f"{directory}: {type(loaded.model).__name__} cannot be served by the cuda backend: {error}; "
            "use another model or --backend cpu"
        ) from error
    if wgmma_prefill:
        try:
            check_wgmma(variant)
        except UnsupportedVariant as error:
            raise ValueError(f"{directory}: --wgmma-prefill: {error}; leave the flag out") from error
    return variant
