"""Decodes and prompts for which a bound leaves room."""

from __future__ import annotations

import pytest

from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound


@pytest.mark.parametrize(
    ("bound", "parts", "decodes"),
    [
        (StepBound(100, 2.0, 100), 1, 50),
        (StepBound(100, 2.0, 100), 8, 6),
        (StepBound(10, 40.0, 10), 8, 1),
        (StepBound(10, 0.0, 10), 8, 10),
    ],
)
def test_decodes_fit_into_their_part_and_one_always_may(bound: StepBound, parts: int, decodes: int) -> None:
    assert bound.num_decodes(parts) == decodes


@pytest.mark.parametrize(
    ("bound", "decodes", "tokens"),
    [(StepBound(160, 2.0, 160), 30, 100), (StepBound(160, 2.0, 160), 80, 10), (StepBound(3, 2.0, 3), 9, 1)],
)
def test_prompts_have_what_decodes_leave_and_a_little_always(bound: StepBound, decodes: int, tokens: int) -> None:
    assert bound.left_beside(decodes) == tokens


def test_steps_have_less_beside_visitors() -> None:
    short = StepBound(160, 2.0, 40).beside_visitors()
    assert short.num_decodes(1) == 20
    assert short.left_beside(10) == 20
