"""The scheduler's settings."""

from __future__ import annotations

import pytest

from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.swapping import SwapPolicy


@pytest.mark.parametrize(
    ("mode", "write_back", "uses_host"),
    [("recompute", False, False), ("recompute", True, True), ("swap", False, True), ("auto", False, True)],
)
def test_the_host_pool_is_used_by_swapping_and_write_back(mode: str, write_back: bool, uses_host: bool) -> None:
    assert SchedulerLimits(swap=SwapPolicy(mode), write_back=write_back).uses_host is uses_host


def test_all_sharing_is_on_unless_switched_off() -> None:
    limits = SchedulerLimits()
    assert (limits.prefix_cache, limits.partial_hits, limits.fork_sharing, limits.write_back) == (
        True,
        True,
        True,
        False,
    )
