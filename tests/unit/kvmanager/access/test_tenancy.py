"""Tenants of calls: one's own, or one that may be named."""

from __future__ import annotations

import pytest

from pagekv.common.errors import InvalidRequest, PermissionDenied
from pagekv.kvmanager.access.identity import Identity, Role
from pagekv.kvmanager.access.tenancy import acting

ALICE = Identity("alice", frozenset({Role.GENERATE, Role.OPERATE}), "team-a", frozenset({"*"}))
GATEWAY = Identity("gateway", frozenset({Role.GENERATE, Role.ACT_FOR}), act_for=frozenset({"a", "b"}))
ANY = Identity("any", frozenset({Role.ACT_FOR}), act_for=frozenset({"*"}))


@pytest.mark.parametrize("known", [ALICE, GATEWAY, ANY])
def test_a_call_that_names_none_is_for_the_callers_own(known: Identity) -> None:
    assert acting(known, []) is known


def test_a_tenant_of_the_list_is_named() -> None:
    found = acting(GATEWAY, ["b"])
    assert found == Identity("gateway", GATEWAY.roles, "b", GATEWAY.act_for, acting=True)
    # Frozen: the identity of the next call is as it was.
    assert GATEWAY.tenant == "gateway"
    assert acting(ANY, ["whoever.it-is_9"]).tenant == "whoever.it-is_9"


@pytest.mark.parametrize("tenant", ["c", "A", "a.", "gateway"])
def test_another_tenant_is_refused(tenant: str) -> None:
    with pytest.raises(PermissionDenied, match=f"^gateway may not act for the tenant {tenant}$"):
        acting(GATEWAY, [tenant])


@pytest.mark.parametrize("named", [["a"], ["team-a"], ["alice"], ["not a name"], ["a", "a"], [""]])
def test_without_the_role_any_name_is_refused(named: list[str]) -> None:
    """A list alone gives nothing, nor does another role."""
    words = r"^pagekv-tenant needs the role act-for; alice has generate, operate$"
    with pytest.raises(PermissionDenied, match=words):
        acting(ALICE, named)


def test_an_entry_that_is_sent_twice_is_refused() -> None:
    for named in (["a", "a"], ["a", "b"], ["*", "a"]):
        with pytest.raises(InvalidRequest, match=r"^pagekv-tenant: must be sent once$"):
            acting(GATEWAY, named)


@pytest.mark.parametrize("tenant", ["", "*", "a b", "a,b", "jwt:alice", "a\n", "ä", "x" * 5000])
def test_an_entry_that_is_no_name_is_refused(tenant: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^pagekv-tenant: must be 1 to 64 characters") as caught:
        acting(ANY, [tenant])
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)
