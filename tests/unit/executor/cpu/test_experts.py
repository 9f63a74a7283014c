"""Experts with weights repacked, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.executor.families import family_config
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig

from pagekv.executor.cpu.experts import PackedExperts, pack_experts
from pagekv.executor.cpu.linear import PackedLinear, is_packable
from pagekv.executor.cpu.native.product import Product
from pagekv.executor.cpu.native.vectors import vector_lanes
from pagekv.executor.cpu.products import fastest_product

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "ernie4_5_moe", "glm4_moe", "gpt_oss")


def _model(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = family_config(family) if family != "gpt_oss" else _gpt_oss()
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype).eval()


def _gpt_oss() -> GptOssConfig:
    """Weights the other way round, biases, and a gate of its own."""
    small = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    return GptOssConfig(**small, num_attention_heads=4, num_local_experts=4, num_experts_per_tok=2)


def _experts(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name == "experts"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loops", [False, True])
@torch.inference_mode()
def test_experts_compute_what_those_of_transformers_do(family: str, dtype: torch.dtype, loops: bool) -> None:
    model = _model(family, dtype)
    parent, name, theirs = _experts(model)[0]
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    cases = []
    # The second: some experts are nobody's. The third: one expert is chosen by all.
    for chosen in (
        torch.tensor([[1, 3], [0, 2], [3, 0], [2, 3], [1, 2]]),
        torch.tensor([[2, 1]]),
        torch.ones(9, 1).long(),
    ):
        rows, weights = torch.randn(len(chosen), 48, dtype=dtype), torch.rand(chosen.shape).to(dtype)
        cases.append((rows, chosen, weights, theirs(rows, chosen, weights)))
    pack_experts(model, fastest_product(dtype) if loops else None)
    ours = getattr(parent, name)
    # Without the loops experts stay where oneDNN does not multiply this type, as bfloat16 with AVX2 alone.
    packs = loops or is_packable(dtype)
    assert isinstance(ours, PackedExperts) == packs
    assert (list(ours.parameters()) == []) == packs
    for rows, chosen, weights, expected in cases:
        found = ours(rows, chosen, weights)
        assert found.dtype == dtype
        distance = (found.float() - expected.float()).norm() / expected.float().norm()
        assert distance < (1e-5 if dtype is torch.float32 else 0.02)


@pytest.mark.skipif(not vector_lanes(), reason="this processor has no vectors that the loops know")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_do_not_depend_on_others(dtype: torch.dtype) -> None:
    model = _model("qwen3_moe", dtype)
    pack_experts(model, Product)
    _, _, ours = _experts(model)[0]
    rows, chosen, weights = torch.randn(70, 48).to(dtype), torch.randint(0, 4, (70, 2)), torch.rand(70, 2)
    together = ours(rows, chosen, weights)
    for size in (1, 9):
        parts = zip(*(each.split(size) for each in (rows, chosen, weights)), strict=True)
        assert torch.equal(torch.cat([ours(*part) for part in parts]), together)


@pytest.mark.parametrize("loops", [False, True])
@torch.inference_mode()
def test_rows_of_another_type_are_converted(loops: bool) -> None:
    """As transformers' grouped products do."""
    model = _model("qwen3_moe", torch.float32)
    _, _, theirs = _experts(model)[0]
    rows, chosen, weights = torch.randn(5, 48).bfloat16(), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    expected = theirs(rows.float(), chosen, weights)
    pack_experts(model, fastest_product(torch.float32) if loops else None)
    found = _experts(model)[0][2](rows, chosen, weights)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("loops", [False, True])
@torch.inference_mode()
def test_a_gate_that_gives_another_type_is_converted_too(loops: bool) -> None:
    model = _model("qwen3_moe", torch.bfloat16)
    _, _, theirs = _experts(model)[0]
    rows, chosen, weights = torch.randn(5, 48).bfloat16(), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    expected, gate = theirs(rows, chosen, weights).float(), theirs._apply_gate
    theirs._apply_gate = lambda gate_up: gate(gate_up).float()
    pack_experts(model, fastest_product(torch.bfloat16) if loops else None)
    found = _experts(model)[0][2](rows, chosen, weights)
    assert (found.float() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("by_hooks", [True, False])
def test_experts_that_ranks_share_stay(by_hooks: bool) -> None:
    """Their hooks or distributed tensors join what ranks have computed."""
    model = _model("qwen3_moe", torch.float32)
    _, _, theirs = _experts(model)[0]
    if by_hooks:
        theirs.register_forward_hook(lambda *_: None)
    else:
        theirs.down_proj.to_local = None
    pack_experts(model, PackedLinear)
    kinds = [type(child) for _, _, child in _experts(model)]
    assert kinds == [type(theirs), PackedExperts]


def test_modules_that_say_less_of_themselves_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    pack_experts(model, PackedLinear)
    assert type(model[0]) is nn.Linear
