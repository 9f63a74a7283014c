"""One step of the CPU backend: who samples, and that a step of nothing is one."""

from __future__ import annotations

import pytest
import torch
from support.executor.cpu_driver import prompts_of, save_model

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.forward import ModuleForward
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.runner import plan_step, run_step
from pagekv.executor.model.loading import LoadedModel, load_model
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    return load_model(directory, torch.float64)


def test_only_sequences_whose_last_token_is_computed_sample(loaded: LoadedModel) -> None:
    cache = KvCache(loaded.geometry, 4, 8)
    whole, part = (
        SequenceState(seq_id, prompt, 8, [2 * seq_id, 2 * seq_id + 1], 0, Sampling())
        for seq_id, prompt in enumerate(prompts_of([8, 8]))
    )
    forward = ModuleForward(loaded.model)
    assert run_step(forward, cache, plan_step(cache, [Scheduled(part, 0, 5)])) == {}
    both = run_step(forward, cache, plan_step(cache, [Scheduled(whole, 0, 8), Scheduled(part, 5, 3)]))
    assert set(both) == {whole.seq_id, part.seq_id}
    cache = KvCache(loaded.geometry, 4, 8)
    alone = run_step(forward, cache, plan_step(cache, [Scheduled(whole, 0, 8)]))
    assert alone == {whole.seq_id: both[whole.seq_id]}


def test_other_ranks_have_tokens_and_failures_from_rank_0(loaded: LoadedModel) -> None:
    """Its logits may be no numbers, and theirs are none."""

    class Second(Shards):
        def tell(self, numbers: list[int], count: int) -> list[int]:
            assert (numbers, count) == ([], 2)
            return [-1, 5]

    states = [
        SequenceState(seq_id, prompt, 4, [seq_id], 0, Sampling()) for seq_id, prompt in enumerate(prompts_of([4, 4]))
    ]
    scheduled = [Scheduled(state, 0, 4) for state in states]
    shards = Second(World(1, 2, 2), pytest.fail)
    cache = KvCache(loaded.geometry, 4, 8)
    found = run_step(ModuleForward(loaded.model), cache, plan_step(cache, scheduled), shards)
    assert {seq_id: each.token_id for seq_id, each in found.items()} == {0: -1, 1: 5}
