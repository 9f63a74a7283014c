"""Bounds of StepSampling: each number is tried on both sides of what it may be."""

from __future__ import annotations

import math

import pytest
from support.executor.judged import ToyFault, assert_noticed

from pagekv.conformance.sampling_refusals import BAD_SAMPLING, NUMBERS, UNREQUIRED
from pagekv.steps.v1 import executor_service_pb2 as pb


def test_numbers_are_tried_below_above_and_as_nan() -> None:
    for name, values, _ in NUMBERS:
        assert any(math.isnan(value) for value in values), name
        assert len(values) >= 3, name
    tried = {bad.fields[0].rpartition(".")[2].partition("[")[0] for of in BAD_SAMPLING.values() for bad in of}
    fields = set(pb.StepSampling.DESCRIPTOR.fields_by_name) - {"seed", "sequence_index"}
    assert tried == fields


def test_every_feature_of_the_sampling_is_tried_without_it() -> None:
    assert len(UNREQUIRED) == 6


@pytest.mark.parametrize(
    "fault",
    [
        ToyFault("R18", "a bound is wide", (('"min_p": (0, 1)', '"min_p": (0, 2)'),)),
        ToyFault(
            "R18", "NaN is let in", (("low <= getattr(sampling, name) <= high", "not high < getattr(sampling, name)"),)
        ),
        ToyFault("R34", "log-probabilities are let in", (('need(not sampling.HasField("logprobs")', "need(True"),)),
    ],
    ids=str,
)
def test_planted_faults_are_noticed(fault: ToyFault) -> None:
    assert_noticed(fault)
