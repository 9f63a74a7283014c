"""Abilities that an executor may lack, and the fields of a request that need them."""

from __future__ import annotations

from collections.abc import Iterable

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.request.command import SamplingParams
from pagekv.steps.v1 import executor_service_pb2 as pb

# Names as clients see them, by number. The manager does not use features that it does not know.
_NAMES = {
    number: name.removeprefix("EXECUTOR_FEATURE_").lower() for name, number in pb.ExecutorFeature.items() if number
}
HOST_POOL, LOGPROBS = "host_pool", "logprobs"
# By sampling parameter: the feature that it needs, unless it has this value.
_NEEDS = {
    "beam_width": (LOGPROBS, SamplingParams().beam_width),
    "logprobs": (LOGPROBS, SamplingParams().logprobs),
    "logit_bias": ("logit_bias", SamplingParams().logit_bias),
    "min_tokens": ("min_tokens", SamplingParams().min_tokens),
    "repetition_penalty": ("penalties", SamplingParams().repetition_penalty),
    "presence_penalty": ("penalties", SamplingParams().presence_penalty),
    "frequency_penalty": ("penalties", SamplingParams().frequency_penalty),
}


def feature_names(numbers: Iterable[pb.ExecutorFeature.ValueType]) -> list[str]:
    """Names of the features among these numbers that are known here, each once."""
    return [_NAMES[number] for number in sorted({*numbers}) if number in _NAMES]


def feature_numbers(names: Iterable[str]) -> list[pb.ExecutorFeature.ValueType]:
    return [pb.ExecutorFeature.Value(f"EXECUTOR_FEATURE_{name.upper()}") for name in names]


def check_supported(sampling: SamplingParams, model: EngineInfo) -> None:
    """Raises InvalidRequest for a field that needs a feature which the executor lacks."""
    for name, (feature, neutral) in _NEEDS.items():
        value = getattr(sampling, name)
        if value != neutral and feature not in model.features:
            raise InvalidRequest(f"sampling_params.{name}", f"must be absent: the executor has no {feature}")
    if (sampling.logprobs or 0) > model.max_logprobs:
        raise InvalidRequest(
            "sampling_params.logprobs",
            f"must be from 0 to {model.max_logprobs}, the most of this executor, got {sampling.logprobs}",
        )
    ends = len(sampling.end_ids(model.eos_token_ids))
    # `BeamSearch.num_candidates` of every beam.
    if sampling.beam_width and sampling.beam_width + ends > model.max_logprobs:
        raise InvalidRequest(
            "sampling_params.beam_width",
            f"must be from 0 to {max(0, model.max_logprobs - ends)} (the executor returns {model.max_logprobs} "
            f"log-probabilities, {ends} tokens end a hypothesis), got {sampling.beam_width}",
        )
