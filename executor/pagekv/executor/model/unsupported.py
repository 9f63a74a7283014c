"""Refuses families and checkpoints that cannot be served exactly, judging by configuration and headers, before
gigabytes of weights are read. A probe of the loaded model (`loading`) refuses the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from pagekv.executor.model.files import tensors
from pagekv.executor.model.kv_scales import scales_alone


def refuse_unsupported(directory: Path, config: Any) -> None:
    """Raises ValueError, naming the model and what to do. Removes the quantisation from the configuration if it applies
    to keys and values only, because the weights are then not quantised.
    """
    kind = f"{directory}: models of type {config.model_type!r}"
    _refuse_quantised(directory, config)
    # First, because some encoder-decoder models have no single text configuration.
    if config.is_encoder_decoder:
        raise ValueError(f"{kind} have an encoder; PageKV serves decoder-only models")
    text = config.get_text_config()
    if getattr(text, "num_kv_shared_layers", 0):
        raise ValueError(f"{kind} share keys and values between layers, which is not supported; use another model")
    other = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(f"{kind} have layers of type {', '.join(sorted(other))}, not supported; use another model")
    # With is_causal false, transformers lets every token see later ones, and the layers do not tell.
    if not getattr(text, "is_causal", True):
        raise ValueError(f"{kind} with is_causal false in config.json are not causal language models; use one that is")
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    classes = found if isinstance(found, (tuple, list)) else (found,)
    if not classes:
        raise ValueError(f"{kind} are not causal language models in transformers; use one that is")
    # Some classes without the interface look attention up in a table of their own, and fail with a KeyError.
    if not any(one.is_backend_compatible() for one in classes):
        raise ValueError(
            f"{directory}: {classes[0].__name__} cannot be served: it does not use transformers' attention "
            "interface; use a model that does"
        )


def _refuse_quantised(directory: Path, config: Any) -> None:
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        if not (isinstance(quantised, dict) and scales_alone(quantised)):
            method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
            raise ValueError(
                f"{directory}: weights quantised by {method!r} are not supported; use the model's unquantised release"
            )
        del config.quantization_config
    # If the configuration does not mention the quantisation, transformers would use fp8 weights without their scales.
    for _, name, header in tensors(directory):
        if str(header.get("dtype")).startswith("F8_"):
            raise ValueError(
                f"{directory}: {name} is stored as {header['dtype']}: fp8 weights are not supported; use the model's "
                "bfloat16 or float16 release"
            )
