"""Inputs of a step: those that follow from the step before are those that are made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.executor.cpu_driver import save_model
from support.executor.scheduled_items import BLOCK_SIZE, next_decodes, scheduled

from pagekv.executor.backend.interface import Scheduled
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.decoder_inputs import RECORDED_ROWS, DecoderInputs, decoder_inputs
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.rotations import Rotations
from pagekv.executor.cpu.runner import plan_step
from pagekv.executor.model.decoder import read_decoder
from pagekv.executor.model.loading import load_model


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[KvCache, Rotations]:
    directory: Path = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    loaded = load_model(directory, torch.float32)
    decoder = read_decoder(loaded.model)
    assert decoder is not None
    return KvCache(loaded.geometry, BLOCK_SIZE, 8), Rotations(decoder)


def inputs_of(plan: CpuAttentionPlan, setting: tuple[KvCache, Rotations], window: int | None) -> DecoderInputs:
    return decoder_inputs(plan, setting[0], [plan.effective_window(window)], setting[1], 4, 2)


def tensors(inputs: DecoderInputs) -> list[torch.Tensor]:
    """All but tables, whose room may differ."""
    reads = next(iter(inputs.reads.values())).decodes
    assert reads is not None
    return [inputs.token_ids, inputs.rotations.numbers, inputs.places, reads.begins, reads.ends]


def equal(found: DecoderInputs, expected: DecoderInputs) -> bool:
    return all(torch.equal(*both) for both in zip(tensors(found), tensors(expected), strict=True))


@pytest.mark.parametrize("window", [None, 3])
def test_the_next_step_has_the_inputs_that_a_new_plan_gives(
    window: int | None, setting: tuple[KvCache, Rotations]
) -> None:
    cache, rotations = setting
    items = [scheduled(1, [6, 4], 7, 1), scheduled(2, [3, 2, 1], 9, 1)]
    plan = plan_step(cache, items)
    inputs, copied = (inputs_of(plan, setting, window) for _ in range(2))
    assert inputs.is_recordable
    for _ in range(20):
        items = next_decodes(items)
        assert plan.advance(items)
        assert inputs.advance(plan, cache, rotations)
        fresh = inputs_of(plan_step(cache, items), setting, window)
        assert equal(inputs, fresh)
        # The plan has an array of its own, which later steps change.
        assert not equal(copied, fresh)
        if copied.shape == fresh.shape:
            copied.copy_(fresh)
            assert equal(copied, fresh)
        else:
            copied = fresh


def test_no_inputs_follow_where_a_table_is_full(setting: tuple[KvCache, Rotations]) -> None:
    cache, rotations = setting
    items = [scheduled(1, list(range(7)), 7 * BLOCK_SIZE - 1, 1)]
    plan = plan_step(cache, items)
    inputs = inputs_of(plan, setting, None)
    followed = 0
    while plan.advance(items := next_decodes(items)) and inputs.advance(plan, cache, rotations):
        followed += 1
    assert followed == BLOCK_SIZE


def test_prompts_and_many_rows_are_not_recorded(setting: tuple[KvCache, Rotations]) -> None:
    def recordable(items: list[Scheduled]) -> bool:
        return inputs_of(plan_step(setting[0], items), setting, None).is_recordable

    decodes = [scheduled(number, [number], 2, 1) for number in range(RECORDED_ROWS + 1)]
    assert recordable(decodes[1:])
    assert not recordable(decodes)
    assert not recordable([scheduled(1, [1], 0, 3)])
    assert not recordable([scheduled(1, [1], 2, 1, known=4)])
