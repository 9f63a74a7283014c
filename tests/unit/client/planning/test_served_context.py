"""The context that is served of a model, from its config.json."""

from __future__ import annotations

from typing import Any

import pytest

from pagekv.client.planning.kv_geometry import geometry_from_config
from pagekv.client.planning.served_context import served_context

LONGROPE = {"short_factor": [1.0], "long_factor": [2.0]}
WINDOW = {"sliding_window": 512}


@pytest.mark.parametrize(
    ("config", "served"),
    [
        ({}, 8192),
        # Phi-3.5: the original context stands beside the parameters, under either name of the kind.
        ({"rope_scaling": {"type": "longrope", **LONGROPE}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": {"type": "su", **LONGROPE}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 100}}, 100),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 7}}}, 7),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 4096}}, 8192),
        ({"model_type": "phimoe", **WINDOW}, 512),
        ({"model_type": "llama", **WINDOW}, 512),
        ({"model_type": "llama", "sliding_window": 9000}, 8192),
        ({"model_type": "mistral", **WINDOW}, 8192),
        ({"model_type": "qwen2_moe", **WINDOW}, 8192),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, **WINDOW}, 512),
        ({"model_type": "llama", "layer_types": ["full_attention"], **WINDOW}, 8192),
        ({"model_type": "phimoe", "rope_scaling": "x", "sliding_window": "512"}, 8192),
        ({"model_type": "phimoe", "sliding_window": True}, 8192),
    ],
)
def test_the_served_context(config: dict[str, Any], served: int) -> None:
    found, why = served_context(config, 8192)
    assert found == served
    assert bool(why) == (served < 8192)


def test_a_plan_has_the_served_context_and_says_why() -> None:
    config = {
        "model_type": "phimoe",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "dtype": "float32",
        "max_position_embeddings": 8192,
        **WINDOW,
    }
    words = (
        "PageKV serves 512 tokens of the context of {}: its layers have a window that their attention is not told of"
    )
    geometry, notes = geometry_from_config(config, {})
    assert (geometry.context, notes) == (512, [words.format(8192)])
    # A context that is asked for is planned, with the same words.
    geometry, notes = geometry_from_config(config, {"max_position_embeddings": 1000})
    assert (geometry.context, notes) == (1000, [words.format(1000)])
    assert geometry_from_config(config, {"max_position_embeddings": 512})[1] == []
    # A multimodal model has that of its language model.
    assert geometry_from_config({"model_type": "x", "text_config": config}, {})[0].context == 512
