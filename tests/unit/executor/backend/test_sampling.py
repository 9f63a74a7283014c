"""The random numbers of sampling."""

from __future__ import annotations

import numpy as np
import pytest
from support.executor.sampler_vectors import table

from pagekv.executor.backend.sampling import FIRST_GROUP, draw_key, exponentials


def test_the_numbers_of_the_contract() -> None:
    """Fixed for good: a seed must give the same tokens in every release."""
    rows = table("E(2^32)")
    for row in rows:
        key = draw_key(*map(int, row[:3]))
        assert key == int(row[3])
        assert exponentials(key, np.array([0, FIRST_GROUP])) == pytest.approx([float(row[4]), float(row[5])], rel=1e-14)
    assert len(rows) == 8


def test_numbers_do_not_depend_on_their_neighbours() -> None:
    numbers = np.array([[7, 0, 300], [FIRST_GROUP, 7, 2**31]])
    found = exponentials(9, numbers)
    assert found.shape == (2, 3)
    assert found.ravel().tolist() == [exponentials(9, np.array([number]))[0] for number in numbers.flat]
    assert found[0, 0] == found[1, 1]
    assert numbers.tolist() == [[7, 0, 300], [FIRST_GROUP, 7, 2**31]]


@pytest.mark.parametrize("along", ["seeds", "positions", "tokens", "groups"])
def test_numbers_are_exponential_and_independent(along: str) -> None:
    """By the uniform numbers exp(-E), for 20,000 of one kind that follow each other."""
    count, first = 20_000, np.array([0])
    if along in ("tokens", "groups"):
        found = exponentials(draw_key(1, 0, 5), np.arange(count) + (FIRST_GROUP if along == "groups" else 0))
    else:
        keys = [draw_key(n, 0, 5) if along == "seeds" else draw_key(1, 0, n) for n in range(count)]
        found = np.array([exponentials(key, first)[0] for key in keys])
    uniform = np.sort(np.exp(-found))
    # Kolmogorov and Smirnov: 0.0157 is exceeded in one case of 10,000.
    assert np.abs(uniform - (np.arange(count) + 0.5) / count).max() < 0.0157
    assert found.min() > 0
    for distance in (1, 2, 16, 256):
        assert abs(np.corrcoef(found[:-distance], found[distance:])[0, 1]) < 0.03


def test_sequences_of_a_request_draw_apart() -> None:
    assert len({draw_key(1, index, 5) for index in range(100)}) == 100
