"""Fields that need what an executor may lack: refused by name, at submission and when it comes back without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.engine.engine_harness import Bench, described, expect, read, run, until
from support.engine.fake_engine import MODEL
from support.event_loop import run_by

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.features import check_supported, feature_names, feature_numbers
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.steps.v1 import executor_service_pb2 as pb

NAMES = ["host_pool", "logprobs", "logit_bias", "min_tokens", "penalties"]
ABLE = replace(MODEL, features=tuple(NAMES), max_logprobs=128)
NEEDS: list[tuple[str, Any, str]] = [
    ("beam_width", 2, "logprobs"),
    ("logprobs", 0, "logprobs"),
    ("logit_bias", {3: 0.5}, "logit_bias"),
    ("min_tokens", 1, "min_tokens"),
    ("repetition_penalty", 1.5, "penalties"),
    ("presence_penalty", -0.5, "penalties"),
    ("frequency_penalty", 0.5, "penalties"),
]


def test_names_and_numbers() -> None:
    assert feature_names([5, 1, 3, 2, 4, 1, 0, 77]) == NAMES  # type: ignore[list-item]  # later features
    assert feature_numbers(NAMES) == [number for number in pb.ExecutorFeature.values() if number]


@pytest.mark.parametrize(("field", "value", "feature"), NEEDS)
def test_what_needs_a_feature(field: str, value: Any, feature: str) -> None:
    sampling = SamplingParams(**{field: value})
    check_supported(sampling, ABLE)
    lacking = replace(ABLE, features=tuple(name for name in NAMES if name != feature))
    with pytest.raises(
        InvalidRequest, match=f"^sampling_params.{field}: must be absent: the executor has no {feature}"
    ):
        check_supported(sampling, lacking)
    check_supported(SamplingParams(), replace(ABLE, features=(), max_logprobs=0))


def test_log_probabilities_up_to_as_many_as_the_executor_tells() -> None:
    few = replace(ABLE, max_logprobs=5)
    check_supported(SamplingParams(logprobs=5), few)
    with pytest.raises(InvalidRequest, match=r"^sampling_params.logprobs: must be from 0 to 5, .* got 6"):
        check_supported(SamplingParams(logprobs=6), few)
    # One token ends a hypothesis.
    check_supported(SamplingParams(beam_width=4), few)
    with pytest.raises(InvalidRequest, match=r"^sampling_params.beam_width: must be from 0 to 4 .* got 5"):
        check_supported(SamplingParams(beam_width=5), few)


@run_by(run)
async def test_requests_that_wait_when_an_executor_without_it_comes_back(engine: EngineLoop, bench: Bench) -> None:
    bench.step_s = 0.01
    sampling = SamplingParams(max_tokens=6, min_tokens=2)
    needing = engine.submit(GenerateCommand("needing", [1, 2, 3], sampling))
    plain = engine.submit(GenerateCommand("plain", [4, 5], SamplingParams(max_tokens=6)))
    await until(lambda: len(bench.plans) >= 2)
    bench.description = described(features=[pb.EXECUTOR_FEATURE_LOGPROBS])
    assert bench.link is not None
    bench.link.lose()
    with pytest.raises(InvalidRequest, match=r"^sampling_params.min_tokens: .* the executor has no min_tokens"):
        await read(needing)
    assert await read(plain) == expect([4, 5])
    with pytest.raises(InvalidRequest, match=r"^sampling_params.min_tokens"):
        engine.submit(GenerateCommand("another", [1, 2, 3], sampling))
    assert engine.model is not None
    assert engine.model.features == ("logprobs",)
