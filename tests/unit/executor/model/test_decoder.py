"""Decoders read from models of transformers: families that are described, and those that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.executor.cpu_driver import MODELS
from support.executor.families import family_config
from transformers import AutoModelForCausalLM, Gemma3Config, Olmo2Config, Phi3Config

from pagekv.executor.model.decoder import ACTIVATIONS, FAMILIES, GatedProducts, read_decoder

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def test_products_are_joined_in_order_and_leave_the_model() -> None:
    model = model_of(MODELS["qwen2"]())
    attention, feed_forward = model.model.layers[1].self_attn, model.model.layers[1].mlp
    decoder = read_decoder(model)
    assert decoder is not None
    layer = decoder.take_layer(1)
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert torch.equal(layer.qkv.weight, torch.cat([part.weight for part in parts]))
    assert layer.qkv.bias is not None
    assert torch.equal(layer.qkv.bias, torch.cat([part.bias for part in parts]))
    assert layer.out.bias is None
    assert torch.equal(
        layer.gated.gate_up.weight, torch.cat([feed_forward.gate_proj.weight, feed_forward.up_proj.weight])
    )
    assert not [*model.model.layers[1].parameters()]
    assert [*model.model.layers[0].parameters()]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma", "gemma2", "gemma3_text", "granite"])
def test_embeddings_are_scaled_by_one_factor(name: str, dtype: torch.dtype) -> None:
    """Bit for bit as transformers scales them."""
    more = {"embedding_multiplier": 12.3} if name == "granite" else {}
    decoder = read_decoder(model_of(family_config(name, **more)).to(dtype))
    assert decoder is not None
    embedding, ids = decoder.embedding, torch.arange(50)
    assert (embedding.factor == 1) == (name == "llama")
    assert torch.equal(embedding.weight[ids] * embedding.factor, decoder.embed(ids))


def test_norms_are_where_the_family_has_them() -> None:
    found = {}
    for name, config in {**{name: make() for name, make in MODELS.items()}, "olmo2": Olmo2Config(**SIZES)}.items():
        decoder = read_decoder(model_of(config))
        if decoder is not None:
            norms = decoder.take_layer(0).norms
            found[name] = "".join("01"[getattr(norms, slot) is not None] for slot in norms.__slots__)
    # Before attention, query, key, after attention, before and after the feed-forward part.
    pre = "100010"
    assert found == {
        **dict.fromkeys(("llama", "llama-mqa", "qwen2", "mistral"), pre),
        "qwen3": "111010",
        "gemma2": "100111",
        "olmo2": "011101",
    }


def test_a_product_that_is_one_already() -> None:
    model = model_of(Phi3Config(**SIZES))
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    decoder = read_decoder(model)
    assert decoder is not None
    assert torch.equal(decoder.take_layer(0).qkv.weight, weight)


def test_gemmas_norms_multiply_by_one_more() -> None:
    model = model_of(MODELS["gemma2"]())
    decoder = read_decoder(model)
    assert decoder is not None
    assert torch.equal(decoder.norm.weight, model.model.norm.weight + 1)
    assert decoder.scale_logits(torch.tensor([1e9])).item() == model.config.final_logit_softcapping


def test_the_text_part_of_a_model_that_sees_images() -> None:
    """As the larger ones of Gemma 3 are published. A part that is built otherwise is left to transformers."""
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = model_of(Gemma3Config(text_config=SIZES, vision_config={**sight, "image_size": 28, "patch_size": 14}))
    text = model.model.language_model
    weight = text.layers[1].mlp.down_proj.weight
    decoder = read_decoder(model)
    assert decoder is not None
    assert torch.equal(decoder.take_layer(1).gated.down.weight, weight)
    del text.rotary_emb
    assert read_decoder(model) is None


@pytest.mark.parametrize("rope", [True, False])
def test_rotations_are_those_of_the_model(rope: bool) -> None:
    model = model_of(MODELS["llama"]())
    decoder = read_decoder(model)
    assert decoder is not None
    positions = torch.tensor([[3, 0, 200]])
    cos, sin = model.model.rotary_emb(torch.empty(0), positions)
    model.model.layers[0].self_attn.use_rope = rope
    name = decoder.take_layer(0).rope
    assert (name is None) == (not rope)
    if name is not None:
        mine = decoder.rotations(positions)[name]
        assert torch.equal(mine[0], cos[0])
        assert torch.equal(mine[1], sin[0])


def test_rotations_are_computed_where_the_positions_are() -> None:
    """On a GPU, too: a device that has no memory tells one from the other."""
    decoder = read_decoder(model_of(MODELS["llama"]()))
    assert decoder is not None
    for pair in decoder.rotations(torch.arange(8, device="meta")[None]).values():
        assert [each.device.type for each in pair] == ["meta", "meta"]


def test_what_a_configuration_says_beside_the_family_is_ignored() -> None:
    """As transformers does. The check at load would not see a difference as small as that of two kinds of GELU."""
    config = MODELS["gemma2"]()
    config.hidden_act = "silu"
    decoder = read_decoder(model_of(config))
    assert decoder is not None
    assert decoder.activation == "gelu_tanh"
    config.hidden_activation = "gelu"
    assert read_decoder(model_of(config)) is None
    config = MODELS["llama"]()
    config.final_logit_softcapping = 30.0
    decoder = read_decoder(model_of(config))
    assert decoder is not None
    assert (decoder.activation, decoder.scale_logits(torch.tensor([1e9])).item()) == ("silu", 1e9)


def test_mixtures_of_experts_are_described_where_asked_for() -> None:
    """Layers without one, which Qwen's may have, have their products."""
    config = family_config("qwen3_moe", mlp_only_layers=[1])
    assert read_decoder(model_of(config)) is None
    model = model_of(config)
    experts = model.model.layers[0].mlp
    decoder = read_decoder(model, experts=True)
    assert decoder is not None
    layer = decoder.take_layer(0)
    assert layer.feed_forward is experts
    with pytest.raises(TypeError, match="mixture of experts"):
        _ = layer.gated
    assert isinstance(decoder.take_layer(1).feed_forward, GatedProducts)
    assert read_decoder(model_of(family_config("olmoe", clip_qkv=8.0)), experts=True) is None


def test_other_families_and_activations_are_not_described() -> None:
    assert read_decoder(model_of(MODELS["gpt2"]())) is None
    config = MODELS["llama"]()
    config.hidden_act = "relu"
    assert read_decoder(model_of(config)) is None
    assert "gpt2" not in FAMILIES
    assert "relu" not in ACTIVATIONS
