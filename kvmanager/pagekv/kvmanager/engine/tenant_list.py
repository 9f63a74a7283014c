"""Tenants as operators see them: the limits of each, its use now, and its use since the manager started."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import fields
from operator import attrgetter
from typing import Any

from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.tenants.accounts import Account
from pagekv.kvmanager.tenants.limits import TenantLimits
from pagekv.v1 import operator_service_pb2 as pb

# Tenants that are written at once: more than a millisecond's work.
TENANTS_AT_ONCE = 256
# Limits have the same names in the contract, except these. A limit that is None is absent there.
_NAMED_OTHERWISE = ("adapters", "priorities")


def tenant_blocks(state: EngineState) -> list[tuple[Account, int]]:
    """Every tenant's account, and its number of device blocks: 0 before an executor is attached."""
    order = None if state.scheduler is None else state.scheduler.pool.tenants
    return [
        (account, 0 if order is None else order.footprint(account.tenant.number)) for account in state.accounts.all()
    ]


async def tenant_list(state: EngineState) -> pb.ListTenantsResponse:
    """The tenants by name. Requests and blocks are those at the moment of the call. If there are many tenants, their
    use is read with turns of the event loop in between. Raises Unavailable before the first attachment.
    """
    running, waiting = _requests(state, state.serving())
    found = sorted(tenant_blocks(state), key=lambda each: each[0].tenant.name)
    answer = pb.ListTenantsResponse()
    for start in range(0, len(found), TENANTS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        answer.tenants.extend(
            _info(account, blocks, running[account.tenant.number], waiting[account.tenant.number])
            for account, blocks in found[start : start + TENANTS_AT_ONCE]
        )
    return answer


def _requests(state: EngineState, scheduler: Scheduler) -> tuple[Counter[int], Counter[int]]:
    """Number of requests by tenant number: requests with a sequence that holds blocks, and the other live requests."""
    holding = {sequence.request for sequence in scheduler.running}
    live = Counter(map(attrgetter("tenant"), state.live.all()))
    running = Counter(map(attrgetter("tenant"), holding))
    return running, live - running


def _info(account: Account, blocks: int, running: int, waiting: int) -> pb.TenantInfo:
    limits, usage = account.limits, account.usage
    info = pb.TenantInfo(
        name=account.tenant.name,
        any_adapter=limits.adapters is None,
        adapters=sorted(limits.adapters or ()),
        running_requests=running,
        waiting_requests=waiting,
        blocks=blocks,
        watchers=account.watchers,
        requests_total=usage.requests,
        prompt_tokens_total=usage.prompt_tokens,
        cached_tokens_total=usage.cached_tokens,
        output_tokens_total=usage.output_tokens,
        block_seconds_total=usage.block_seconds,
        refusals_total=usage.refusals,
        **_same_names(limits),
    )
    if limits.priorities is not None:
        info.min_priority, info.max_priority = limits.priorities
    return info


def _same_names(limits: TenantLimits) -> dict[str, Any]:
    values = {each.name: getattr(limits, each.name) for each in fields(limits) if each.name not in _NAMED_OTHERWISE}
    return {name: value for name, value in values.items() if value is not None}
