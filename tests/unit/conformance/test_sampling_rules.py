"""Each rule of sampling, and that of swaps, notices a backend that breaks it; and the sound backend passes them all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from support.executor.cpu_driver import save_model
from support.executor.judged import Edit, ToyFault, assert_noticed, broken, edited_function, served_backend, verdicts

from pagekv.conformance import sampling_rules
from pagekv.conformance.verdict import BrokenRule
from pagekv.executor.backend import row_sampler, sampling
from pagekv.executor.cpu import sampler
from pagekv.executor.cpu.backend import CpuBackend
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.steps.v1 import executor_service_pb2 as pb


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> CpuBackend:
    """A random model of wide weights, whose tokens are clear."""
    directory = tmp_path_factory.mktemp("model")
    save_model("llama", directory)
    return CpuBackend(directory, "random", threads=1, kv_memory=2**24, max_sequences=64)


@dataclass(frozen=True)
class SamplerFault:
    """A fault of the cpu backend and the rule that must notice it."""

    rule: str
    words: str
    function: Callable[..., Any]
    edit: Edit
    # Modules that have the function by its name.
    places: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.rule}: {self.words}"


FAULTS = [
    SamplerFault("M9", "the position does not matter", sampling.draw_key, ("position)", "0)"), (row_sampler,)),
    SamplerFault(
        "M9",
        "top_k leaves one more",
        row_sampler.candidates,
        ("largest(logits, sampling.top_k)", "largest(logits, sampling.top_k + 1)"),
        (row_sampler,),
    ),
    SamplerFault(
        "M9", "min_p is left out", row_sampler.candidates, ("sampling.min_p > 0", "sampling.min_p > 1"), (row_sampler,)
    ),
    SamplerFault(
        "M13", "min_tokens counts the prompt", sampling._is_banning, (" - state.num_prompt_tokens", ""), (sampling,)
    ),
    SamplerFault(
        "M14", "biases are left out", row_sampler.adjust, ("logits[token_id] += bias", "pass"), (row_sampler,)
    ),
    SamplerFault("M14", "biases have the other sign", row_sampler.adjust, ("+= bias", "-= bias"), (row_sampler,)),
    SamplerFault(
        "M15",
        "log-probabilities come after the temperature",
        row_sampler.sample_row,
        ("logprobs(raw,", "logprobs(raw / (sampling.temperature or 1),"),
        (sampler,),
    ),
    SamplerFault(
        "M15",
        "log-probabilities come after biases",
        row_sampler.sample_row,
        ("logprobs(raw,", "logprobs(logits,"),
        (sampler,),
    ),
    SamplerFault(
        "M15",
        "one likeliest too few",
        row_sampler.sample_row,
        ("largest(raw, sampling.logprobs)", "largest(raw, sampling.logprobs - 1)"),
        (sampler,),
    ),
    SamplerFault(
        "M15",
        "likeliest tokens are not of the vocabulary",
        row_sampler.sample_row,
        ("zip(top.tolist(), others", "zip((top + len(raw)).tolist(), others"),
        (sampler,),
    ),
    SamplerFault(
        "M16",
        "frequency and presence count the prompt",
        row_sampler.adjust,
        ("[state.num_prompt_tokens :]", ""),
        (row_sampler,),
    ),
    SamplerFault(
        "M16",
        "presence is left out",
        row_sampler.adjust,
        ("sampling.presence_penalty + count", "count"),
        (row_sampler,),
    ),
    SamplerFault("M16", "frequency counts once", row_sampler.adjust, ("count * sampling", "sampling"), (row_sampler,)),
    SamplerFault(
        "M16",
        "repetition counts output alone",
        row_sampler.adjust,
        ("asarray(state.token_ids,", "asarray(state.token_ids[state.num_prompt_tokens :],"),
        (row_sampler,),
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_faults_are_noticed(fault: SamplerFault, backend: CpuBackend) -> None:
    faulty = edited_function(fault.function, fault.edit)
    with ExitStack() as planted:
        for place in fault.places:
            planted.enter_context(mock.patch.object(place, fault.function.__name__, faulty))
        with served_backend(backend) as address:
            verdict = verdicts(address, fault.rule)[fault.rule]
    assert verdict.outcome == "failed", verdict


def test_a_swap_of_the_wrong_block_is_noticed(backend: CpuBackend) -> None:
    copy = KvCache.copy

    def turned(self: KvCache, copies: Any) -> None:
        if copies.direction.value == "swap_in":
            copies.sources.append(copies.sources.pop(0))
        copy(self, copies)

    with mock.patch.object(KvCache, "copy", turned), served_backend(backend) as address:
        verdict = verdicts(address, "M5")["M5"]
    assert verdict.outcome == "failed", verdict


@pytest.mark.long
def test_the_sound_backend_passes(backend: CpuBackend) -> None:
    with served_backend(backend) as address:
        found = verdicts(address)
    assert broken(found) == {}
    assert {number for number, verdict in found.items() if verdict.outcome == "skipped"} <= {"M17", "P13", "R33"}


@pytest.mark.parametrize(
    "fault",
    [
        ToyFault(
            "M9", "seeds are ignored", (("(sampling.seed, sampling.sequence_index)", "(sampling.sequence_index,)"),)
        ),
        ToyFault("M9", "indexes are ignored", (("(sampling.seed, sampling.sequence_index)", "(sampling.seed,)"),)),
        ToyFault("M9", "top_k is left out", (("range(sampling.top_k or VOCAB)", "range(VOCAB)"),)),
        ToyFault("M9", "top_p is left out", (("sampling.top_p * sums", "sums"),)),
        ToyFault("M9", "min_p is left out", ((" if weight >= sampling.min_p", ""),)),
        ToyFault(
            "M9", "draws depend on the step", (("repr((read, *seeds))", "repr((read, seeds and self.steps, *seeds))"),)
        ),
    ],
    ids=str,
)
def test_planted_faults_of_the_toy_are_noticed(fault: ToyFault) -> None:
    assert_noticed(fault)


def test_a_certain_token_may_have_a_little_more_than_certainty() -> None:
    """Of rounding, as the contract and managers allow."""

    def check(chosen: float) -> None:
        row = pb.SampledLogprobs(chosen=chosen, top_token_ids=[7, 8], top_logprobs=[chosen, -17.0])
        sampling_rules._check_row(mock.Mock(rows=[row], tokens=[7]), 2)

    check(6e-8)
    with pytest.raises(BrokenRule, match=r"a log-probability is 0\.00.*, at most 0\.001 by rounding"):
        check(2e-3)
