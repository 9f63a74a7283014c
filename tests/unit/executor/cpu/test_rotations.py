"""Rotations that are looked up are those that the decoder computes."""

from __future__ import annotations

import pytest
import torch
from support.executor.cpu_driver import MODELS
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from pagekv.executor.cpu import rotations
from pagekv.executor.cpu.rotations import Rotations
from pagekv.executor.model.decoder import read_decoder


def scaled(kind: str) -> LlamaConfig:
    config: LlamaConfig = MODELS["llama"]()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    return config


# Two kinds of layers, with a rotation each.
WINDOWED = Gemma3TextConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2, head_dim=8
)


@pytest.mark.parametrize(
    ("config", "fixed"),
    [(MODELS["llama"](), True), (WINDOWED, True), (scaled("linear"), True), (scaled("dynamic"), False)],
)
def test_the_same_before_and_behind_the_table(
    config: PreTrainedConfig, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; a rotation that depends on the longest position of a step is none that is looked up."""
    monkeypatch.setattr(rotations, "POSITIONS", 1024)
    torch.manual_seed(0)
    decoder = read_decoder(AutoModelForCausalLM.from_config(config))
    assert decoder is not None
    assert decoder.has_fixed_rotations == fixed
    ours = Rotations(decoder)
    for positions in ([3], [0, 1023], [1024], [5000, 1, 7], [7, 2]):
        position_ids = torch.tensor([positions])
        expected, found = decoder.rotations(position_ids), ours.of(position_ids)
        assert found.keys() == expected.keys()
        for key, pair in expected.items():
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[key], pair, strict=True))
