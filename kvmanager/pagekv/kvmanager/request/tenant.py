"""A tenant: callers who share one part of the blocks, of the queue and of the steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """`name` is part of the identity of cached blocks. Shares and limits are counted by `number`, from 0 on, which many
    names may have in common.
    """

    name: str
    number: int


# The tenant of all callers on a manager without identities.
NO_TENANT = Tenant("", 0)
