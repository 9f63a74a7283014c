"""PageKV's attention function in transformers' attention interface.

A transformers model calls `paged_attention` once per layer. The argument `paged` describes the step: which positions
see which, and where their keys and values are. It is a keyword argument of the model's forward, which the model passes
on unchanged. Nothing is global except the function itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_NAME = "pagekv"

# The rows of a step whose logits are computed, transformers' `logits_to_keep`: indices, int64 [R] with R > 0, or one of
# the numbers below. No model can compute logits of no row at all.
LogitRows = torch.Tensor | int
ALL_ROWS = 0
LAST_ROW = 1


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns the product of query and key into a score: `cap * tanh(scale * qk / cap)`, or `scale * qk`
    without a cap.

    `window`: a position sees itself and the `window - 1` positions before it; None: all positions before it.
    """

    scale: float
    cap: float | None = None
    window: int | None = None
    # Attention sinks [num_heads]: an extra logit of each head in the softmax, without a value; None: no sinks.
    sinks: torch.Tensor | None = field(default=None, repr=False, compare=False)


class StepAttention(Protocol):
    """One step's attention, for any layer."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """`query` `[num_heads, T, head_size]`, `key` and `value` `[num_kv_heads, T, head_size]` of the step's packed
        tokens, the elements of a head side by side in memory; returns `[T, num_heads, head_size]`.
        """
        ...


# Tensors that models pass to their attention and that change nothing in it.
_OF_NO_EFFECT = ("position_ids", "logits_to_keep")


class UnsupportedAttention(ValueError):
    """The model asks for attention that PageKV does not compute."""


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: StepAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: tensors are `[1, heads, T, head_size]`, the result
    `[1, T, heads, head_size]`.

    Raises UnsupportedAttention for any argument that must not be ignored because it would change the result.
    """
    if paged is None:
        raise UnsupportedAttention("the model does not pass keyword arguments on to its attention")
    if attention_mask is not None or query.shape[0] != 1:
        raise UnsupportedAttention("the model uses an attention mask of its own")
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttention("the model's attention is not causal")
    for name, given in kwargs.items():
        if isinstance(given, torch.Tensor) and name not in _OF_NO_EFFECT:
            raise UnsupportedAttention(f"the model's attention uses {name}")
    if sliding_window is not None and sliding_window < 1:
        raise UnsupportedAttention(f"the model's attention has a window of {sliding_window} tokens")
    if s_aux is not None and s_aux.shape != (query.shape[1],):
        raise UnsupportedAttention(
            f"the model's attention has sinks of shape {tuple(s_aux.shape)}, not one for each head"
        )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttention("the model's attention layers are not numbered (layer_idx)")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # torch's fused kernel on CPUs requires contiguous heads and does not check.
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    out = paged.attend(layer, query[0], key[0], value[0], Scores(scale, softcap, sliding_window, s_aux))
    return out.unsqueeze(0), None


# No mask function is registered under this name on purpose: transformers then builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, paged_attention)


def forward(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    rows: LogitRows,
    attention: StepAttention,
) -> torch.Tensor:
    """Logits `[R, vocab_size]` of `rows`, from packed token ids and positions `[1, T]`."""
    output = model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows, paged=attention
    )
    logits: torch.Tensor = output.logits
    return logits[0]
