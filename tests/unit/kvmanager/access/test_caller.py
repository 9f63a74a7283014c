"""The caller of a task: its tenant, and the requests that it may end."""

from __future__ import annotations

import contextvars

from pagekv.kvmanager.access.caller import caller, sees_all, tenant_in_reach, tenant_of_call
from pagekv.kvmanager.access.identity import Identity, Role
from pagekv.kvmanager.access.tenancy import acting

ALICE = Identity("alice", frozenset({Role.GENERATE}), "team-a")
ALAN = Identity("alan", frozenset({Role.GENERATE}), "team-a")
BOB = Identity("bob", frozenset({Role.GENERATE}))
# Has the name of a tenant that is not its own.
TEAM_A = Identity("team-a", frozenset({Role.GENERATE}), "team-b")
OLGA = Identity("olga", frozenset({Role.GENERATE, Role.OPERATE}))
GATEWAY = Identity("gateway", frozenset({Role.GENERATE, Role.ACT_FOR}), act_for=frozenset({"*"}))


def asked(known: Identity | None) -> tuple[str, str | None]:
    def answer() -> tuple[str, str | None]:
        caller.set(known)
        return tenant_of_call(), tenant_in_reach()

    return contextvars.copy_context().run(answer)


def may_abort(known: Identity, owner: Identity) -> bool:
    """As the engine decides it."""
    return asked(known)[1] in (None, asked(owner)[0])


def test_where_nobody_is_asked_everything_is_everybodys() -> None:
    assert asked(None) == ("", None)
    assert contextvars.Context().run(tenant_of_call) == ""


def test_requests_belong_to_the_tenant() -> None:
    assert asked(ALICE) == ("team-a", "team-a")
    assert asked(BOB) == ("bob", "bob")
    assert asked(OLGA) == ("olga", None)


def test_operators_that_act_for_nobody_see_all() -> None:
    both = Identity("root", frozenset({Role.OPERATE, Role.ACT_FOR}), act_for=frozenset({"*"}))
    seen = []
    for known in (None, OLGA, both, ALICE, GATEWAY, acting(both, ["team-a"])):
        context = contextvars.copy_context()
        context.run(caller.set, known)
        seen.append(context.run(sees_all))
    assert seen == [True, True, True, False, False, False]


def test_who_may_abort_whose() -> None:
    assert may_abort(ALICE, ALAN)
    assert may_abort(ALAN, ALICE)
    assert not may_abort(BOB, ALICE)
    # By tenants, never by names.
    assert not may_abort(TEAM_A, ALICE)
    assert not may_abort(ALICE, TEAM_A)
    assert all(may_abort(OLGA, each) for each in (ALICE, BOB, GATEWAY))


def test_a_gateway_ends_requests_of_the_tenant_that_it_names_alone() -> None:
    for_a, for_bob = acting(GATEWAY, ["team-a"]), acting(GATEWAY, ["bob"])
    assert may_abort(for_a, for_a)
    assert may_abort(for_a, ALICE)
    assert may_abort(ALICE, for_a)
    assert not may_abort(for_a, for_bob)
    assert not may_abort(GATEWAY, for_a)
    assert not may_abort(for_a, GATEWAY)


def test_an_operator_that_acts_for_a_tenant_ends_requests_of_this_tenant_alone() -> None:
    both = Identity("root", frozenset({Role.OPERATE, Role.ACT_FOR}), act_for=frozenset({"*"}))
    assert all(may_abort(both, each) for each in (ALICE, BOB))
    for_a = acting(both, ["team-a"])
    assert may_abort(for_a, ALICE)
    assert not may_abort(for_a, BOB)
    assert not may_abort(for_a, both)
    # Its own tenant counts as any other once the call names it.
    assert asked(acting(both, ["root"])) == ("root", "root")
