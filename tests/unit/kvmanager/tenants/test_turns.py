"""Tenants alternate, and calls of one keep their order."""

from __future__ import annotations

import asyncio

from support.event_loop import in_event_loop

from pagekv.kvmanager.tenants.turns import TenantTurns


def test_tenants_alternate_and_calls_of_one_keep_their_order() -> None:
    async def main() -> list[str]:
        turns, done = TenantTurns(), list[str]()
        machine = asyncio.Lock()

        async def call(tenant: str, number: int) -> None:
            async with turns.of(tenant), machine:
                await asyncio.sleep(0)
                done.append(f"{tenant}{number}")

        calls = [asyncio.create_task(call("a", number)) for number in range(4)]
        await asyncio.sleep(0)
        calls += [asyncio.create_task(call("b", number)) for number in range(2)]
        await asyncio.gather(*calls)
        assert turns._turns == {}
        return done

    assert asyncio.run(main()) == ["a0", "b0", "a1", "b1", "a2", "a3"]


@in_event_loop
async def test_so_many_calls_of_a_tenant_have_a_turn_at_once() -> None:
    turns, now, most = TenantTurns(2), 0, 0

    async def call() -> None:
        nonlocal now, most
        async with turns.of("a"):
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1

    await asyncio.gather(*(call() for _ in range(5)))
    assert (most, turns._turns) == (2, {})


@in_event_loop
async def test_a_call_that_is_cancelled_leaves_nothing() -> None:
    turns = TenantTurns()

    async def call() -> None:
        async with turns.of("a"):
            await asyncio.sleep(60)

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0)
    for each in calls[1:]:
        each.cancel()
    await asyncio.wait(calls[1:])
    assert turns._turns["a"][1] == 1
    calls[0].cancel()
    await asyncio.wait(calls)
    assert turns._turns == {}
