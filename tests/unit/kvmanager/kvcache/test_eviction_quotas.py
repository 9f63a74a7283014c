"""Quotas of evictions, against taking one block after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagekv.kvmanager.kvcache.eviction_quotas import eviction_quotas


def one_by_one(count: int, footprints: list[int], weights: list[float], allowed: list[int], taker: int) -> list[int]:
    quotas = [0] * len(allowed)
    for _ in range(count):
        may = [tenant for tenant, most in enumerate(allowed) if quotas[tenant] < most]
        loser = min(may, key=lambda t: (-((footprints[t] - quotas[t]) / weights[t]), t != taker, t))
        quotas[loser] += 1
    return quotas


@given(st.data())
def test_it_is_what_one_by_one_comes_to(data: st.DataObject) -> None:
    tenants = data.draw(st.integers(1, 6))
    allowed = data.draw(st.lists(st.integers(0, 60), min_size=tenants, max_size=tenants))
    footprints = [most + data.draw(st.integers(0, 40)) for most in allowed]
    weights = data.draw(
        st.lists(st.sampled_from([0.01, 0.3, 1.0, 1.0, 2.0, 7.0, 1000.0]), min_size=tenants, max_size=tenants)
    )
    count = data.draw(st.integers(0, sum(allowed)))
    taker = data.draw(st.integers(0, tenants - 1))
    got = eviction_quotas(count, np.array(footprints), np.array(weights), np.array(allowed), taker)
    assert got.tolist() == one_by_one(count, footprints, weights, allowed, taker)


@pytest.mark.parametrize("seed", range(5))
def test_many_tenants_and_many_blocks(seed: int) -> None:
    chance = np.random.default_rng(seed)
    allowed = chance.integers(0, 30, 200)
    footprints = allowed + chance.integers(0, 3, 200)
    weights = chance.choice([0.5, 1.0, 3.0], 200)
    got = eviction_quotas(1000, footprints, weights, allowed, 7)
    assert got.tolist() == one_by_one(1000, footprints.tolist(), weights.tolist(), allowed.tolist(), 7)
