"""Roles by the words that files and tokens have for them."""

from __future__ import annotations

from pagekv.kvmanager.access.identity import Identity, Role


def test_roles_have_the_words_of_files_and_messages() -> None:
    assert [str(role) for role in Role] == ["generate", "observe", "operate"]
    assert Role("operate") is Role.OPERATE


def test_identities_are_values() -> None:
    alice = Identity("alice", frozenset({Role.GENERATE}))
    assert alice == Identity("alice", frozenset({Role("generate")}))
    assert len({alice, Identity("alice", frozenset())}) == 2
