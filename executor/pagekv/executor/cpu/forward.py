"""The forward pass of one step: the interface, and its implementation by transformers' model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from transformers import PreTrainedModel

from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.experts import pack_experts
from pagekv.executor.cpu.gathered_attention import GatheredStepAttention
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.linear import pack_linears
from pagekv.executor.model.attention_interface import LAST_ROW, StepAttention, forward


class StepForward(Protocol):
    """Computes the forward pass of a step over the pools."""

    def logits(self, plan: CpuAttentionPlan, cache: KvCache) -> torch.Tensor:
        """Logits `[R, vocab_size]` of the R rows that `plan.sampling` names; if it names none, those of any row. The
        next call may overwrite them.
        """
        ...


class ModuleForward:
    """transformers' model with PageKV's attention. Implements `StepForward` for every model; with compiled loops, only
    for models in float32 or bfloat16.
    """

    def __init__(self, model: PreTrainedModel, *, pack: bool = True, loops: bool = False) -> None:
        """`pack`: repacks the weights of the model's linear layers and experts, in place. `loops`: compiled loops
        compute attention and, where they are faster, linear layers.
        """
        self._attention: Callable[[KvCache, CpuAttentionPlan], StepAttention] = GatheredStepAttention
        make = None
        if loops:
            from pagekv.executor.cpu.native.step_attention import LoopStepAttention
            from pagekv.executor.cpu.products import fastest_product

            self._attention = LoopStepAttention
            make = fastest_product(model.dtype)
        if pack:
            pack_linears(model, make)
            pack_experts(model, make)
        self._model = model

    def logits(self, plan: CpuAttentionPlan, cache: KvCache) -> torch.Tensor:
        rows = torch.tensor([row for row, _ in plan.sampling]) if plan.sampling else LAST_ROW
        return forward(self._model, plan.input_ids, plan.position_ids, rows, self._attention(cache, plan))
