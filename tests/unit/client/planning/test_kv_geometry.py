"""The shape of keys and values, read from a model's config."""

from __future__ import annotations

from typing import Any

import pytest
from support.clients.llama_config import LLAMA, without

from pagekv.client.errors import InvalidRequest
from pagekv.client.planning.kv_geometry import KvGeometry, geometry_from_config, query_heads


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, KvGeometry(32, 8, 128, "bfloat16", 131072)),
        (without("torch_dtype", dtype="float32"), KvGeometry(32, 8, 128, "float32", 131072)),
        (without("num_key_value_heads"), KvGeometry(32, 32, 128, "bfloat16", 131072)),
        (without(num_key_value_heads=None), KvGeometry(32, 32, 128, "bfloat16", 131072)),
        (without(head_dim=256), KvGeometry(32, 8, 256, "bfloat16", 131072)),
        (without(head_dim=None), KvGeometry(32, 8, 128, "bfloat16", 131072)),
        (
            {"text_config": without("torch_dtype"), "hidden_size": 7, "dtype": "float16"},
            KvGeometry(32, 8, 128, "float16", 131072),
        ),
        (
            {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "dtype": "float32"},
            KvGeometry(12, 12, 64, "float32", 1024),
        ),
    ],
    ids=["llama", "dtype", "mha", "null heads", "head_dim", "null head_dim", "text_config", "gpt2"],
)
def test_the_geometry_of_a_config(config: dict[str, Any], expected: KvGeometry) -> None:
    assert geometry_from_config(config, {}) == (expected, [])


def test_flags_win_over_the_config() -> None:
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim", "dtype", "max_position_embeddings")
    given = dict(zip(names, (2, 3, 4, "int8", 5), strict=True))
    assert geometry_from_config(LLAMA, given)[0] == geometry_from_config({}, given)[0] == KvGeometry(2, 3, 4, "int8", 5)


@pytest.mark.parametrize(
    ("config", "heads"),
    [(LLAMA, 32), ({"text_config": LLAMA, "n_head": 3}, 32), ({"n_head": 12}, 12), ({}, None), ({"n_head": "x"}, None)],
)
def test_query_heads_as_far_as_they_are_said(config: dict[str, Any], heads: int | None) -> None:
    assert query_heads(config) == heads


def test_what_is_assumed_is_said() -> None:
    geometry, notes = geometry_from_config(
        without("torch_dtype", "max_position_embeddings", layer_types=["full_attention", "sliding_attention"]),
        {},
    )
    assert (geometry.dtype, geometry.context) == ("float16", 8192)
    assert [note.partition(":")[0] for note in notes] == [
        "layers with a window are counted like the others",
        "the config names no dtype",
        "the config names no context",
    ]


def test_values_of_another_width_than_keys_are_refused_by_name() -> None:
    assert geometry_from_config(without(head_dim=192, v_head_dim=192), {})[0].head_size == 192
    for wrong in (128, "x", 0):
        with pytest.raises(InvalidRequest, match=f"must be as wide as keys, 192, .*, got {wrong!r}") as caught:
            geometry_from_config(without(head_dim=192, v_head_dim=wrong), {})
        assert caught.value.field == "v_head_dim"
    assert geometry_from_config(without(head_dim=192, v_head_dim=128), {"head_dim": 128})[0].head_size == 128


def test_latent_attention_is_planned_by_the_heads_and_the_width_that_are_given() -> None:
    latent = without("head_dim", kv_lora_rank=512)
    given = {"num_key_value_heads": 32, "head_dim": 192}
    geometry, (note,) = geometry_from_config(latent, given)
    assert geometry == KvGeometry(32, 32, 192, "bfloat16", 131072)
    assert note.startswith("of multi-head latent attention PageKV stores the key and value of every attention head")
    for name in given:
        with pytest.raises(InvalidRequest, match="give both --kv-heads and --head-size") as caught:
            geometry_from_config(latent, {**given, name: None})
        assert caught.value.field == "kv_lora_rank"


@pytest.mark.parametrize(
    ("config", "field", "description"),
    [
        (without("num_hidden_layers"), "num_hidden_layers", "is missing in the config: give --layers"),
        (without(num_hidden_layers=0), "num_hidden_layers", "must be a whole number from 1 to 10000, got 0"),
        (without(num_hidden_layers=True), "num_hidden_layers", "got True"),
        (without(num_key_value_heads=[8, 4]), "num_key_value_heads", r"got \[8, 4\]"),
        (without("num_key_value_heads", multi_query=True), "num_key_value_heads", "give --kv-heads"),
        (without(hidden_size=4097), "head_dim", "32 heads do not divide hidden size 4097"),
        (without(torch_dtype="complex64"), "dtype", "must be one of float64, .*, got 'complex64'"),
        (without(max_position_embeddings=-1), "max_position_embeddings", "got -1"),
        (without(kv_lora_rank=512), "kv_lora_rank", "multi-head latent attention"),
        (without(layer_types=["linear_attention"]), "layer_types", "give the number of attention layers with --layers"),
    ],
)
def test_a_wrong_config_is_refused_by_field(config: dict[str, Any], field: str, description: str) -> None:
    with pytest.raises(InvalidRequest, match=description) as caught:
        geometry_from_config(config, {})
    assert caught.value.field == field
