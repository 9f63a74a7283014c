"""The caller of the call that the current task answers."""

from __future__ import annotations

from contextvars import ContextVar

from pagekv.kvmanager.access.identity import Identity, Role

# None on a manager without identities.
caller: ContextVar[Identity | None] = ContextVar("caller", default=None)


def tenant_of_call() -> str:
    """The tenant that the present call is for; "" on a manager without identities."""
    known = caller.get()
    return known.tenant if known is not None else ""


def sees_all() -> bool:
    """Whether the call may see all tenants: without identities, or for an operator that acts for no tenant."""
    known = caller.get()
    return known is None or (Role.OPERATE in known.roles and not known.acting)


def tenant_in_reach() -> str | None:
    """The tenant whose requests and pins the present call may end, and whose pins it may list; None: every tenant. A
    caller that acts for a tenant, even an operator, reaches only this tenant, not its own and not the others that it
    may act for.
    """
    return None if sees_all() else tenant_of_call()
