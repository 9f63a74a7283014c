"""Rotations that are looked up are those that the decoder computes."""

from __future__ import annotations

import pytest
import torch
from support.executor.cpu_driver import MODELS
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from pagekv.executor.cpu import rotations
from pagekv.executor.cpu.rotations import Rotations, StepRotations
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
        check(ours.of(position_ids), decoder.rotations(position_ids))
    # Positions move on one by one, as long as they are in the table.
    moving, position_ids = ours.of(torch.tensor([[1020, 7]])), torch.tensor([[1020, 7]])
    while ours.advance(moving, int(position_ids.max()) + 2):
        position_ids += 1
        check(moving, decoder.rotations(position_ids))
    assert int(position_ids.max()) == (1023 if fixed else 1020)


def check(found: StepRotations, expected: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    assert found.tables.keys() == expected.keys()
    for key, pair in expected.items():
        mine = (table[found.numbers] for table in found.tables[key])
        assert all(torch.equal(*both) for both in zip(mine, pair, strict=True))
