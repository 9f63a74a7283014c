"""A tenant: callers who share one part of the blocks, of the queue and of the steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """Cached blocks are found by `name`, all is counted by `number`, from 0 on. Many names may have one number."""

    name: str
    number: int


# Everybody, where nobody is asked for an identity.
NO_TENANT = Tenant("", 0)
