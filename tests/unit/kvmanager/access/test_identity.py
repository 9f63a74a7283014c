"""Roles by the words that files and tokens have for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagekv.kvmanager.access.identity import TENANT_NAME, Identity, Role


def test_roles_have_the_words_of_files_and_messages() -> None:
    assert [str(role) for role in Role] == ["generate", "observe", "operate", "act-for"]
    assert Role("operate") is Role.OPERATE


def test_identities_are_values() -> None:
    alice = Identity("alice", frozenset({Role.GENERATE}))
    assert alice == Identity("alice", frozenset({Role("generate")}))
    assert len({alice, Identity("alice", frozenset())}) == 2


def test_the_tenant_is_the_name_unless_it_is_given() -> None:
    assert Identity("jwt:alice", frozenset()).tenant == "jwt:alice"
    alice = Identity("alice", frozenset(), "team-a")
    assert (alice.name, alice.tenant) == ("alice", "team-a")
    # As calls of gateways are made.
    assert replace(alice, tenant="team-b") == Identity("alice", frozenset(), "team-b")


@pytest.mark.parametrize("text", ["a", "A.b-c_9", "x" * 64])
def test_names_of_tenants(text: str) -> None:
    assert TENANT_NAME.fullmatch(text)


@pytest.mark.parametrize("text", ["", "x" * 65, "a b", "a\n", "ä", "*", "jwt:alice", "a/b", "\u0661"])
def test_what_is_no_name_of_a_tenant(text: str) -> None:
    assert not TENANT_NAME.fullmatch(text)
