"""The decoder of compiled loops: logits of a step, and weights that are there once."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from support.executor.cpu_driver import prompts_of, save_model

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.forward import ModuleForward, StepForward
from pagekv.executor.cpu.fused_decoder import FusedDecoder
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.products import TorchProduct
from pagekv.executor.cpu.runner import plan_step
from pagekv.executor.model.decoder import read_decoder
from pagekv.executor.model.loading import LoadedModel, load_model

LENGTHS = (23, 6, 14)


def fused(loaded: LoadedModel) -> FusedDecoder:
    decoder = read_decoder(loaded.model)
    assert decoder is not None
    return FusedDecoder(decoder, loaded.scores, loaded.num_heads, loaded.geometry.num_kv_heads)


@torch.inference_mode()
def logits(forward: StepForward, loaded: LoadedModel) -> list[torch.Tensor]:
    """Logits of three steps: prompts, a chunk beside two decodes, and three decodes."""
    prompts = prompts_of(list(LENGTHS))
    cache = KvCache(loaded.geometry, 4, 24)
    found = []
    for step in range(3):
        scheduled = []
        for index, prompt in enumerate(prompts):
            known, computed = len(prompt) - 2 + step, (0 if step == 0 else len(prompt) - 3 + step)
            if index == 0 and step < 2:
                # A prompt in two chunks.
                known, computed = (10, 0) if step == 0 else (len(prompt) - 1, 10)
            state = SequenceState(
                index, prompt[:known], known, list(range(index * 8, index * 8 + 8)), computed, Sampling()
            )
            scheduled.append(Scheduled(state, computed, known - computed))
        found.append(forward.logits(plan_step(cache, scheduled), cache).clone())
    return found


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "qwen3", "mistral", "gemma2"])
def test_logits_are_those_of_transformers_model(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    theirs = load_model(tmp_path, torch.float64)
    ours = load_model(tmp_path, torch.float32)
    for found, expected in zip(logits(fused(ours), ours), logits(ModuleForward(theirs.model), theirs), strict=True):
        assert found.shape == expected.shape == (3, theirs.vocab_size)
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_products_of_torch_and_a_step_that_samples_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors whose matrices torch multiplies faster; a prompt's chunk before its last has no logits."""
    save_model("llama", tmp_path)
    loaded = load_model(tmp_path, torch.float32)
    compiled = fused(loaded)
    expected = logits(compiled, loaded)
    monkeypatch.setattr("pagekv.executor.cpu.fused_decoder.fastest_product", lambda dtype: TorchProduct)
    other = load_model(tmp_path, torch.float32)
    forward = fused(other)
    for found, theirs in zip(logits(forward, other), expected, strict=True):
        assert torch.allclose(found, theirs, rtol=1e-4, atol=1e-4)
    state = SequenceState(1, prompts_of([9])[0], 9, [0, 1, 2], 0, Sampling())
    for way in (compiled, forward):
        cache = KvCache(loaded.geometry, 4, 3)
        with torch.inference_mode():
            assert way.logits(plan_step(cache, [Scheduled(state, 0, 5)]), cache).shape == (0, loaded.num_logits)


def test_weights_are_taken_not_copied(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    loaded = load_model(tmp_path, torch.float32)
    assert not loaded.model.config.tie_word_embeddings
    modules = [layer.mlp.down_proj for layer in loaded.model.model.layers] + [loaded.model.lm_head]
    before = [weakref.ref(module.weight) for module in modules]
    del modules
    forward = fused(loaded)
    gc.collect()
    assert [each() for each in before] == [None] * len(before)
    assert isinstance(forward, FusedDecoder)
