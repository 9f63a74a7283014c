"""Behaviour of the asyncio client alone; everything else is tested with both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.clients.scripted_server import Hangs, ScriptedServer
from support.event_loop import until

from pagekv.client import AsyncPageKVClient, FailedPrecondition

CALLS: dict[str, Callable[[AsyncPageKVClient], Coroutine[Any, Any, Any]]] = {
    "Generate": lambda client: client.generate("x"),
    "GetModelInfo": lambda client: client.model_info(),
}


async def _cancel(server: ScriptedServer, method: str) -> None:
    async with AsyncPageKVClient(server.target) as client:
        task = asyncio.create_task(CALLS[method](client))
        await until(lambda: server.deadlines)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("method", CALLS)
def test_cancelling_the_task_ends_the_call(server: ScriptedServer, method: str) -> None:
    server.expect(method, Hangs())
    asyncio.run(_cancel(server, method))
    server.wait_cancelled(method)


def test_a_client_is_made_in_a_running_event_loop() -> None:
    with pytest.raises(FailedPrecondition, match="made and used in a running event loop: inside async def") as caught:
        AsyncPageKVClient("127.0.0.1:1")
    assert (caught.value.kind, caught.value.subject) == ("EVENT_LOOP", "127.0.0.1:1")


def test_a_client_of_another_event_loop_is_refused() -> None:
    async def make() -> AsyncPageKVClient:
        return AsyncPageKVClient("127.0.0.1:1")

    with asyncio.Runner() as first, asyncio.Runner() as second:
        client = first.run(make())
        for call in (
            client.stats,
            client.health,
            client.with_options(timeout=9).stats,
            lambda: client.generate("x"),
            lambda: anext(client.stream("x")),
            lambda: anext(client.watch_events()),
        ):

            async def run(call: Callable[[], Any] = call) -> None:
                await call()

            with pytest.raises(FailedPrecondition, match="used in the event loop where it was made") as caught:
                second.run(run())
            assert caught.value.kind == "EVENT_LOOP"
        first.run(client.close())
