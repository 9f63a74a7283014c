"""Each of a request's two latencies points to another cause; three published examples."""

from __future__ import annotations

import pytest

from pagekv.client.planning.load_test import LoadOutcome, summarise
from pagekv.client.planning.slo import Diagnosis, Objectives


@pytest.mark.parametrize(
    ("ttft_ms", "inter_token_ms", "diagnosis"),
    [
        (780, 22, Diagnosis.PREFILL),  # 8,000 prompt tokens
        (48, 23, Diagnosis.WITHIN),  # 200
        (51, 61, Diagnosis.DECODE),  # 220
        (780, 61, Diagnosis.PREFILL),
        (500, 50, Diagnosis.WITHIN),
    ],
)
def test_late_first_tokens_and_slow_ones_have_different_causes(
    ttft_ms: float, inter_token_ms: float, diagnosis: Diagnosis
) -> None:
    assert Objectives().diagnose(ttft_ms, inter_token_ms) is diagnosis


def test_objectives_can_be_set() -> None:
    assert Objectives(ttft_ms=1000, inter_token_ms=100).diagnose(780, 61) is Diagnosis.WITHIN


def test_a_report_counts_its_requests_by_what_they_point_to() -> None:
    outcomes = [
        LoadOutcome(ttft_s=0.78, inter_token_s=[0.022]),
        LoadOutcome(ttft_s=0.048, inter_token_s=[0.01, 0.036]),
        LoadOutcome(ttft_s=0.051, inter_token_s=[0.002, 0.12]),
        LoadOutcome(ttft_s=0.05),
        LoadOutcome(error="Overloaded"),
        LoadOutcome(),  # no token, so no latency to judge
    ]
    report = summarise(outcomes, 1.0, Objectives())
    assert report.diagnoses == {Diagnosis.PREFILL.value: 1, Diagnosis.WITHIN.value: 2, Diagnosis.DECODE.value: 1}
    assert sum(report.diagnoses.values()) == 4
