"""The numbers that sampling draws."""

from __future__ import annotations

import numpy as np

from pagekv.executor.backend.sampling import uniform


def test_known_numbers() -> None:
    """Fixed for good: a seed must give the same tokens in every release."""
    assert [uniform(0, 0, 1), uniform(42, 0, 7), uniform(2**64 - 1, 63, 2**40)] == KNOWN


KNOWN = [0.08321003661081172, 0.5786454815990126, 0.2464391984905454]


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
