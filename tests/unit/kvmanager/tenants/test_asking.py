"""Priorities, adapters, texts and namespaces that a tenant may ask for."""

from __future__ import annotations

import pytest

from pagekv.common.errors import InvalidRequest, Overloaded, PermissionDenied
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.tenants.accounts import Account
from pagekv.kvmanager.tenants.asking import Asking
from pagekv.kvmanager.tenants.limits import SharedNamespace, TenantLimits

ALICE = Tenant("alice", 1)
SHARED = {
    "all": SharedNamespace(frozenset({"*"}), frozenset({"*"})),
    "read": SharedNamespace(frozenset({"alice"}), frozenset()),
    "write": SharedNamespace(frozenset(), frozenset({"alice"})),
    "others": SharedNamespace(frozenset({"bob"}), frozenset({"bob"})),
}


def asking(**limits: object) -> Asking:
    account = Account(ALICE)
    account.set_limits(TenantLimits(**limits))  # type: ignore[arg-type]  # as the test says
    return Asking(ALICE, account, SHARED)


def test_where_nobody_is_asked_everything_is_as_it_is_said() -> None:
    assert Asking().cache_identity("team", False, True) == CacheIdentity("team", read=False, write=True)
    Asking().check_priority(100)
    Asking().check_adapter("any")
    Asking().check_text(2**40)
    # Shared namespaces have a meaning among tenants alone.
    assert Asking(namespaces=SHARED).cache_identity("others") == CacheIdentity("others")


def test_a_namespace_is_the_tenants_own() -> None:
    assert asking().cache_identity("team") == CacheIdentity("team", tenant="alice")
    assert asking().cache_identity("", False, None) == CacheIdentity(read=False, tenant="alice")
    assert asking().cache_identity("", None, False) == CacheIdentity(write=False, tenant="alice")


@pytest.mark.parametrize(
    ("namespace", "read", "write"), [("all", True, True), ("read", True, False), ("write", False, True)]
)
def test_a_shared_namespace_is_nobodys_own(namespace: str, read: bool, write: bool) -> None:
    assert asking().cache_identity(namespace) == CacheIdentity(namespace, read=read, write=write)
    assert asking().cache_identity(namespace, False, False) == CacheIdentity(namespace, read=False, write=False)


def test_rights_in_a_shared_namespace_that_are_not_there() -> None:
    with pytest.raises(PermissionDenied, match=r"cache.read: your tenant may not read the shared namespace 'write'"):
        asking().cache_identity("write", read=True)
    with pytest.raises(PermissionDenied, match=r"cache.write: your tenant may not write the shared namespace 'read'"):
        asking().cache_identity("read", write=True)
    with pytest.raises(PermissionDenied, match=r"cache.namespace: your tenant may not use the shared namespace"):
        asking().cache_identity("others", read=False)


def test_priorities_and_adapters() -> None:
    limited = asking(priorities=(-1, 2), adapters=frozenset({"one"}))
    for priority in (-1, 2):
        limited.check_priority(priority)
    for priority in (-2, 3):
        with pytest.raises(InvalidRequest, match=f"priority: must be from -1 to 2 for your tenant, got {priority}"):
            limited.check_priority(priority)
    limited.check_adapter("one")
    limited.check_adapter("")
    with pytest.raises(PermissionDenied, match="adapter: your tenant may not use 'two'"):
        limited.check_adapter("two")


def test_text_is_counted() -> None:
    limited = asking(tokenized_bytes_per_second=100)
    limited.check_text(150)
    limited.check_text(60)
    with pytest.raises(Overloaded, match="tokenized_bytes_per_second: your tenant may use 100") as caught:
        limited.check_text(1)
    assert 0 < caught.value.retry_delay_s < 1
