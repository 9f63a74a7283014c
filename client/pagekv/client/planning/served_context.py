"""The part of a model's context that PageKV serves, as far as its config.json shows. The executor finds the same when
it has loaded the model (`executor/model/loading.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Rotary embeddings whose frequencies depend on the longest sequence of a batch, once that exceeds the original context;
# su is an older name of longrope.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")
# Model types whose window transformers applies only in a mask or in its cache. The attention, which PageKV computes,
# does not know this window.
_UNTOLD_WINDOWS = ("llama", "moshi", "phimoe", "qwen2_moe")


def served_context(config: Mapping[str, Any], longest: int) -> tuple[int, str]:
    """Most tokens of a sequence that PageKV serves, for a model with this config.json (or its text_config) and a
    context of `longest` tokens; and the reason if that is less than `longest`, else "". Values of a wrong type count as
    absent.
    """
    served, why = longest, ""
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type", parameters.get("type")) in _BATCH_DEPENDENT_ROPE:
            name = "original_max_position_embeddings"
            original = _positive(parameters.get(name)) or _positive(config.get(name)) or longest
            if original < served:
                served = original
                why = "beyond them the longest sequence of a batch would change the outputs of the others (its RoPE)"
    window = _untold_window(config)
    if window and window < served:
        served, why = window, "its layers have a window that their attention is not told of"
    return served, why


def _rope_parameters(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The RoPE parameters, under either name; one set for each type of layer if the model has several."""
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if isinstance(found, Mapping):
            yield found
            yield from (value for value in found.values() if isinstance(value, Mapping))


def _untold_window(config: Mapping[str, Any]) -> int:
    """Tokens of the window that the attention does not know; 0 if no layer has one."""
    kinds = config.get("layer_types")
    if config.get("model_type") not in _UNTOLD_WINDOWS or (kinds and "sliding_attention" not in kinds):
        return 0
    # Among these types only qwen2_moe has a switch for the window.
    if config.get("model_type") == "qwen2_moe" and not config.get("use_sliding_window"):
        return 0
    return _positive(config.get("sliding_window"))


def _positive(value: object) -> int:
    """The value if it is a whole number above 0, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
