"""Ranks that differ are named with what they have; a group has the memory of its smallest rank."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from pagekv.executor.backend.interface import BackendFeature
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.ranks.agreement import (
    RanksDisagree,
    check_facts,
    description_from_json,
    group_description,
)

ONE = OracleBackend(OracleModel(), kv_bytes=12 * 16 * 100).describe(16, 64)


def test_facts_that_differ_are_named_with_both_ranks() -> None:
    check_facts({0: {"torch": "2"}, 1: {"torch": "2"}})
    with pytest.raises(RanksDisagree) as caught:
        check_facts({0: {"torch": "2", "numba": "1"}, 1: {"torch": "2", "numba": "1"}, 2: {"torch": "3"}})
    assert str(caught.value) == (
        "rank 0 and rank 2 differ in numba: 1 and nothing; start all ranks with the same flags, packages and model"
    )


def test_a_group_has_the_memory_of_its_smallest_rank_and_the_speed_of_its_slowest() -> None:
    first = replace(ONE, prefill_tokens_per_s=90)
    small = replace(ONE, device_kv_bytes=5, host_kv_bytes=7, max_sequences=3, prefill_tokens_per_s=100)
    found = group_description({0: first, 1: small})
    assert found == replace(ONE, device_kv_bytes=5, host_kv_bytes=7, max_sequences=3, prefill_tokens_per_s=90)


def test_a_feature_is_that_of_all_ranks_and_a_host_pool_needs_bytes_on_each() -> None:
    without = tuple(one for one in ONE.features if one is not BackendFeature.HOST_POOL)
    for other in (replace(ONE, features=without, host_kv_bytes=0), replace(ONE, host_kv_bytes=0)):
        found = group_description({0: ONE, 1: other})
        assert (found.features, found.host_kv_bytes) == (without, 0)
    for absent in ONE.features:
        left = tuple(one for one in ONE.features if one is not absent)
        assert group_description({0: ONE, 1: replace(ONE, features=left)}).features == left


@pytest.mark.parametrize("change", [{"num_kv_heads": 2}, {"layout": "x"}, {"bytes_per_block": 3}, {"versions": {}}])
def test_descriptions_that_differ_end_the_start(change: dict[str, object]) -> None:
    with pytest.raises(RanksDisagree, match=f"rank 0 and rank 1 differ in {next(iter(change))}: "):
        group_description({0: ONE, 1: replace(ONE, **change)})  # type: ignore[arg-type]  # fields of all types


def test_descriptions_travel_as_json() -> None:
    assert description_from_json(json.loads(json.dumps(asdict(ONE)))) == ONE
