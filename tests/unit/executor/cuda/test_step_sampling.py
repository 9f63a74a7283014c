"""Both ways to sample a step do what `StepSampling` says of uploads and of tokens."""

from __future__ import annotations

import pytest
import torch
from support.executor.device_sampler import SAMPLERS, DeviceSampler

from pagekv.executor.backend.interface import Sampling, SequenceState
from pagekv.executor.cuda.step_sampling import StepSampling


@pytest.mark.parametrize("name", SAMPLERS)
def test_sections_are_words_and_those_who_ask_come_in_their_order(name: str) -> None:
    device = DeviceSampler(8, SAMPLERS[name])
    kinds = (Sampling(logprobs=2), Sampling(), Sampling(temperature=1.0, top_k=2, logprobs=0))
    states = [SequenceState(number, [1, 2, 3], 3, [], 3, kind) for number, kind in enumerate(kinds)]
    step: StepSampling = device.sampler([device.live.get(state) for state in states], 8, device.table)
    assert [array.dtype.name for array in step.sections().values()] == ["int32"] * len(step.sections())
    assert {state.seq_id for state in step.logprobs_of} == {0, 2}
    torch.manual_seed(0)
    # The device's own tokens and log-probabilities, by sequence.
    found = device.sample(torch.randn(3, 8), states)
    assert [one.logprob is not None for one in found] == [True, False, True]
    assert [len(one.top) for one in found] == [2, 0, 0]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_row_that_is_no_number_gets_minus_1_and_leaves_token_0(name: str) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = torch.nan
    device = DeviceSampler(8, SAMPLERS[name])
    states = [SequenceState(number, [1], 1, [], 1, Sampling()) for number in range(2)]
    # `DeviceSampler` compares what is left for the next step.
    assert [one.token_id for one in device.sample(logits, states)] == [0, -1]
