"""Measurements of the CPU backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.executor.cpu_driver import VOCAB, save_model

from pagekv.executor.cpu import profile
from pagekv.executor.cpu.forward import ModuleForward
from pagekv.executor.cpu.profile import measure_swap_rates, profile_step
from pagekv.executor.model.loading import BlockGeometry, load_model


def test_swapping_is_measured_both_ways() -> None:
    out_rate, in_rate = measure_swap_rates(BlockGeometry(2, 2, 8, torch.float32), 16)
    assert out_rate > 0
    assert in_rate > 0


def test_the_logits_of_all_who_may_sample_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)
    loaded = load_model(tmp_path, torch.bfloat16)
    # The process grows by more or less than such a small step takes.
    monkeypatch.setattr(profile, "kib_field", lambda path, name: 0)
    forward = ModuleForward(loaded.model)
    for budget, most, rows in ((40, 7, 7), (5, 7, 5)):
        found = profile_step(forward, loaded, 4, budget, most)
        assert found.activation_bytes == rows * VOCAB * 2
        assert found.prefill_tokens_per_s > 0
