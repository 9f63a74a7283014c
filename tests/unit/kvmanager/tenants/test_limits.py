"""Limits of a tenant."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict

import pytest

from pagekv.kvmanager.tenants.limits import SharedNamespace, TenantLimits


def test_a_tenant_without_limits_has_the_weight_of_any_other_and_no_floor() -> None:
    limits = asdict(TenantLimits())
    assert (limits.pop("weight"), limits.pop("floor_blocks")) == (1.0, 0)
    assert set(limits.values()) == {None}


def test_limits_are_values() -> None:
    assert TenantLimits(max_running=3) == TenantLimits(max_running=3)
    assert TenantLimits(max_running=3) != TenantLimits(max_waiting=3)
    with pytest.raises(FrozenInstanceError):
        TenantLimits().weight = 2.0  # type: ignore[misc]  # that it is refused is the test
    with pytest.raises(FrozenInstanceError):
        SharedNamespace(frozenset("a"), frozenset()).read = frozenset()  # type: ignore[misc]  # as above
