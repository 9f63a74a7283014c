"""The caller of the call that a task answers."""

from __future__ import annotations

from contextvars import ContextVar

from pagekv.kvmanager.access.identity import Identity, Role

# None where nobody is asked for an identity.
caller: ContextVar[Identity | None] = ContextVar("caller", default=None)


def tenant_of_call() -> str:
    """The tenant that the present call is for; "" where nobody is asked for an identity."""
    known = caller.get()
    return known.tenant if known is not None else ""


def sees_all() -> bool:
    """Whether the call may be told of all tenants: without identities, or for an operator who acts for nobody."""
    known = caller.get()
    return known is None or (Role.OPERATE in known.roles and not known.acting)


def tenant_in_reach() -> str | None:
    """The tenant whose requests and pins the present call may end, and whose pins it is told of; None: all. A caller
    that acts for a tenant reaches this tenant alone, not its own and not others that it may act for, operators
    included.
    """
    return None if sees_all() else tenant_of_call()
