"""The forward pass by transformers' model: which rows it gives."""

from __future__ import annotations

from pathlib import Path

import torch
from support.executor.cpu_driver import prompts_of, save_model

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.forward import ModuleForward
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.runner import plan_step
from pagekv.executor.model.loading import load_model


@torch.inference_mode()
def test_rows_are_those_that_sample(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path)
    loaded = load_model(tmp_path, torch.float64)
    first, second = prompts_of([7, 5])
    states = [
        SequenceState(1, first, 7, [0, 1], 0, Sampling()),
        SequenceState(2, second, 5, [2, 3], 0, Sampling()),
    ]
    # All of the second prompt, and the first one but for its last token.
    scheduled = [Scheduled(states[0], 0, 6), Scheduled(states[1], 0, 5)]
    for pack in (False, True):
        forward, cache = ModuleForward(loaded.model, pack=pack), KvCache(loaded.geometry, 4, 4)
        found = forward.logits(plan_step(cache, scheduled), cache)
        assert torch.allclose(found, model.double()(torch.tensor([second])).logits[:, -1], atol=1e-3)
        # Nothing samples: some row, whose logits nobody asks for.
        assert forward.logits(plan_step(cache, scheduled[:1]), cache).shape == found.shape
