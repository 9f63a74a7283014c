"""The caller of the call that a task answers."""

from __future__ import annotations

from contextvars import ContextVar

from pagekv.kvmanager.access.identity import Identity, Role

# None where nobody is asked for an identity.
caller: ContextVar[Identity | None] = ContextVar("caller", default=None)


def owner_of_call() -> str:
    """The name that requests of the present caller bear; "" where nobody is asked for one."""
    known = caller.get()
    return known.name if known is not None else ""


def owner_to_abort() -> str | None:
    """The name of those requests that the present caller may abort; None: all."""
    known = caller.get()
    return None if known is None or Role.OPERATE in known.roles else known.name
