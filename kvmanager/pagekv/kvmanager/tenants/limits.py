"""The limits of one tenant, and the readers and writers of a namespace that several tenants share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Checked limits of a tenant. None: only the deployment's limits apply."""

    # Tenants share steps and blocks in proportion to their weights.
    weight: float = 1.0
    # Requests that hold blocks, and requests that wait for blocks.
    max_running: int | None = None
    max_waiting: int | None = None
    # Tokens of prompts and outputs together.
    tokens_per_minute: int | None = None
    # Blocks that its running requests may come to need.
    max_blocks: int | None = None
    max_pinned_blocks: int | None = None
    max_watchers: int | None = None
    # gRPC calls that are open at once, streams included.
    max_calls: int | None = None
    tokenized_bytes_per_second: int | None = None
    # Lowest and highest number of its requests' priorities.
    priorities: tuple[int, int] | None = None
    adapters: frozenset[str] | None = None
    # Other tenants' requests evict none of its cached blocks while it has no more blocks, held and cached, than these.
    floor_blocks: int = 0


@dataclass(frozen=True, slots=True)
class SharedNamespace:
    """A namespace whose cached blocks several tenants share: names of the tenants that may read and write; ANY_TENANT
    means all.
    """

    read: frozenset[str]
    write: frozenset[str]
