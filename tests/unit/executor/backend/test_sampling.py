"""The numbers that sampling draws."""

from __future__ import annotations

import numpy as np
from support.executor.sampler_vectors import table

from pagekv.executor.backend.sampling import uniform


def test_the_numbers_of_the_contract() -> None:
    """Fixed for good: a seed must give the same tokens in every release."""
    rows = table("u")
    assert [repr(uniform(*map(int, row[:3]))) for row in rows] == [row[3] for row in rows]
    assert len(rows) == 8


def test_numbers_are_uniform_and_independent() -> None:
    numbers = np.array([[uniform(seed, 0, position) for position in range(100)] for seed in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.015
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert counts.min() > 880
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.35
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.04
    assert uniform(1, 0, 5) != uniform(1, 1, 5)
