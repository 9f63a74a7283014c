"""Counts by tenant, their sum, and nothing kept of a tenant whose count is 0."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagekv.kvmanager.request.tenant_counts import TenantCounts


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-2, 2))))
def test_the_sum_is_that_of_the_counts_and_zeros_are_not_kept(changes: list[tuple[str, int]]) -> None:
    counts: TenantCounts[str] = TenantCounts()
    for tenant, more in changes:
        counts.add(tenant, more)
    wanted = {each: sum(more for tenant, more in changes if tenant == each) for each in "abcd"}
    assert {tenant: counts[tenant] for tenant in "abcd"} == wanted
    assert counts.total == sum(wanted.values())
    counted = {tenant for tenant, count in wanted.items() if count}
    assert len(counts) == len(counted)
    assert [counts.num_tenants(tenant) for tenant in "abcd"] == [len(counted | {tenant}) for tenant in "abcd"]


class Unwalked(dict[str, int]):
    def __iter__(self) -> None:  # type: ignore[override]  # it returns nothing: it fails
        raise AssertionError("a walk over all tenants")

    values = items = keys = __iter__  # type: ignore[assignment]  # each fails alike


def test_no_question_walks_over_the_tenants() -> None:
    """Each is asked for every request, while thousands of tenants may wait."""
    counts: TenantCounts[str] = TenantCounts()
    counts._counts = Unwalked()
    counts.add("a", 2)
    counts.add("b", 1)
    counts.add("b", -1)
    assert (counts.total, counts["a"], counts["b"], len(counts), counts.num_tenants("b")) == (2, 2, 0, 1, 2)
