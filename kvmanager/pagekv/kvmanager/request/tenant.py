"""A tenant: callers who share one part of the blocks, of the queue and of the steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """A name, which cached blocks are found by, and a number, which blocks and tokens are counted by: 0 and up. Many
    names may have one number.
    """

    name: str
    number: int


# Everybody, where nobody is asked for an identity.
NO_TENANT = Tenant("", 0)
