"""Calls that a tenant has open at once: counted until they end, and refused beyond the bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from pagekv.common.errors import Overloaded, PermissionDenied
from pagekv.kvmanager.access.caller import caller
from pagekv.kvmanager.access.identity import Identity
from pagekv.kvmanager.tenants.accounts import Accounts
from pagekv.kvmanager.tenants.open_calls import count_open_calls

BOUNDED = "[default]\nmax_calls = 1\n[tenants.alice]\nmax_calls = 2\n[tenants.bob]\n"


class Call:
    """A context that ends when told so."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[object], None]] = []

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)


class Entrance:
    """Accounts of a tenants file, and a gate that lets in everybody as who is named."""

    def __init__(self, folder: Path, text: str = BOUNDED) -> None:
        (folder / "tenants.toml").write_text(text)
        self.accounts = Accounts(folder / "tenants.toml")

    def call(self, name: str) -> Call:
        """A call of this caller, "" for nobody, that was let in."""
        call = Call()

        async def admit(method: str, context: object) -> None:
            assert (method, context) == ("/a/b", call)
            caller.set(Identity(name, frozenset()) if name else None)

        asyncio.run(count_open_calls(self.accounts, admit)("/a/b", call))
        return call


def test_a_call_counts_until_it_ends(tmp_path: Path) -> None:
    entrance = Entrance(tmp_path)
    first, _ = entrance.call("alice"), entrance.call("alice")
    with pytest.raises(Overloaded, match="max_calls: your tenant has 2 of at most 2, and asked for 1 more") as full:
        entrance.call("alice")
    assert (full.value.retry_delay_s, full.value.limit) == (1.0, 2)
    # Others are not held up by it.
    entrance.call("carol")
    first.end()
    entrance.call("alice")
    assert entrance.accounts.of("alice").calls == 2
    assert entrance.accounts.of("alice").usage.refusals == {"max_calls": 1}


def test_where_nothing_is_bounded_nothing_is_counted(tmp_path: Path) -> None:
    """A tenant that only looks at statistics has no account."""
    entrance = Entrance(tmp_path, "[default]\n[tenants.bob]\n")
    for name in ("", "bob", "carol"):
        entrance.call(name)
    assert [(account.tenant.name, account.calls) for account in entrance.accounts.all()] == [("bob", 0)]


def test_a_tenant_that_is_not_known_is_refused_by_the_call_itself(tmp_path: Path) -> None:
    entrance = Entrance(tmp_path, "[tenants.bob]\nmax_calls = 1\n")
    entrance.call("carol")
    with pytest.raises(PermissionDenied):
        entrance.accounts.of("carol")


def test_a_caller_that_is_refused_is_not_counted(tmp_path: Path) -> None:
    entrance = Entrance(tmp_path)

    async def refuse(method: str, context: object) -> None:
        raise PermissionDenied("no")

    with pytest.raises(PermissionDenied, match=r"^no$"):
        asyncio.run(count_open_calls(entrance.accounts, refuse)("/a/b", Call()))
    assert entrance.accounts.of("alice").calls == 0
