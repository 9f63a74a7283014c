"""The forward pass of one step: the interface, and its implementation by transformers' model."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import PreTrainedModel

from pagekv.executor.cuda.kernel_attention import KernelAttention
from pagekv.executor.model.attention_interface import LogitRows, forward


class DeviceForward(Protocol):
    """Enqueues the forward pass of a step over the pools. A graph may record it, so the host must not wait."""

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: LogitRows, attention: KernelAttention
    ) -> torch.Tensor:
        """Logits `[R, num_logits]` of the R rows `rows`, from token ids and positions, int32 `[T]`, on the device."""
        ...


class TransformersForward:
    """transformers' model with PageKV's attention. Implements `DeviceForward`, for every model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: LogitRows, attention: KernelAttention
    ) -> torch.Tensor:
        return forward(self._model, token_ids.long()[None], positions.long()[None], rows, attention)
