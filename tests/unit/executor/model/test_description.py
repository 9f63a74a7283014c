"""The steps that backends measure, and the memory they offer."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from pagekv.common.errors import InvalidRequest
from pagekv.executor.backend.interface import Sampling
from pagekv.executor.model.description import (
    ModelBackendInfo,
    StepProfile,
    num_blocks,
    prompt_lengths,
    prompt_step,
)
from pagekv.executor.model.loading import BlockGeometry


@pytest.mark.parametrize(
    ("budget", "longest", "most", "expected"),
    [(10, 64, 8, [10]), (10, 4, 8, [4, 4, 2]), (10, 4, 2, [4, 4]), (8, 4, 8, [4, 4])],
)
def test_as_few_prompts_as_have_the_tokens(budget: int, longest: int, most: int, expected: list[int]) -> None:
    assert prompt_lengths(budget, longest, most) == expected


def test_prompts_share_no_block() -> None:
    step = prompt_step([5, 4, 1], 4, Sampling())
    assert [item.state.block_table for item in step] == [[0, 1], [2], [3]]
    assert num_blocks([5, 4, 1], 4) == 4
    assert all(item.samples for item in step)


def test_the_largest_profile_counts_and_a_given_size_wins() -> None:
    nothing = cast("Any", None)
    info = ModelBackendInfo("cpu", "m", "f", nothing, nothing, 8, kv_memory=0, memory_share=0.5, available=1000)
    info.add_profile((16, 64), StepProfile(400, 1))
    info.add_profile((16, 32), StepProfile(100, 1))
    assert (info.left, info.device_kv_bytes) == (600, 300)
    info.available = 300
    assert (info.left, info.device_kv_bytes) == (0, 0)
    info.kv_memory = 70
    assert info.device_kv_bytes == 70


def test_memory_for_less_than_a_block_is_refused_with_the_numbers() -> None:
    nothing = cast("Any", None)
    geometry = BlockGeometry(2, 2, 8, torch.float32)
    info = ModelBackendInfo("cpu", "m", "f", nothing, geometry, 8, kv_memory=4095, memory_share=0.5, available=1000)
    info.check_block_fits(16 - 1)
    with pytest.raises(InvalidRequest, match="a block of 16 tokens takes 4096 bytes, more than --kv-memory 4095"):
        info.check_block_fits(16)
    info.kv_memory = 4096
    info.check_block_fits(16)
    # Measured later.
    info.kv_memory = 0
    info.check_block_fits(256)
