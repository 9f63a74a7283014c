"""Limits of one tenant, and of a namespace that several share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Checked limits of a tenant. None: no limit beside those that all have together."""

    # Its share beside the others' weights, of steps and blocks alike.
    weight: float = 1.0
    # Requests that hold blocks, and requests that wait for some.
    max_running: int | None = None
    max_waiting: int | None = None
    # Of prompts and outputs together.
    tokens_per_minute: int | None = None
    # Blocks that its running requests may come to need.
    max_blocks: int | None = None
    max_pinned_blocks: int | None = None
    max_watchers: int | None = None
    # Calls of gRPC that are open at once, streams among them.
    max_calls: int | None = None
    tokenized_bytes_per_second: int | None = None
    # Priorities that its requests may have, the lowest number and the highest.
    priorities: tuple[int, int] | None = None
    adapters: frozenset[str] | None = None
    # Blocks that the requests of others cannot evict.
    floor_blocks: int = 0


@dataclass(frozen=True, slots=True)
class SharedNamespace:
    """A namespace whose cached blocks several tenants find: names of tenants, or ANY_TENANT among them."""

    read: frozenset[str]
    write: frozenset[str]
