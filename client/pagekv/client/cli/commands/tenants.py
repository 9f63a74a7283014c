"""`pagekv tenants`: the tenants that share the pool, with limits and use."""

from __future__ import annotations

import argparse

from pagekv.client.cli.parser import Subparsers
from pagekv.client.cli.query import Shown, add_query
from pagekv.client.cli.terminal import Terminal, table
from pagekv.client.client import PageKVClient
from pagekv.client.types import TenantInfo

EXAMPLES = """\
  pagekv tenants
  pagekv tenants --json | jq '.tenants[] | {name, block_seconds_total}'
"""
HEADS = (
    *("tenant", "weight", "running", "waiting", "blocks", "floor", "requests", "prompt", "cached", "output"),
    *("block s", "refused"),
)


def add(commands: Subparsers) -> None:
    add_query(commands, "tenants", "list the tenants and what each has used", tenants, examples=EXAMPLES)


def tenants(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    found = client.list_tenants()
    none = "no tenants: only a manager with --identities has tenants"
    return Shown({"tenants": found}, table(list(map(_row, found)), HEADS) if found else none)


def _row(tenant: TenantInfo) -> tuple[object, ...]:
    refused = sorted(tenant.refusals_total.items(), key=lambda each: -each[1])
    return (
        tenant.name,
        f"{tenant.weight:g}",
        _of(tenant.running_requests, tenant.max_running),
        _of(tenant.waiting_requests, tenant.max_waiting),
        tenant.blocks,
        tenant.floor_blocks,
        tenant.requests_total,
        tenant.prompt_tokens_total,
        tenant.cached_tokens_total,
        tenant.output_tokens_total,
        round(tenant.block_seconds_total),
        ", ".join(f"{count} {limit}" for limit, count in refused) or "-",
    )


def _of(count: int, most: int | None) -> str:
    """A count, with its limit if there is one."""
    return str(count) if most is None else f"{count}/{most}"
