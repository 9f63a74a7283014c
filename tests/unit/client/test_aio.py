"""Behaviour of the asyncio client alone; everything else is tested with both clients."""

from __future__ import annotations

import asyncio

import pytest
from support.clients.scripted_server import Hangs, ScriptedServer, chunk

from pagekv.client import (
    AsyncPageKVClient,
)


async def _cancel(server: ScriptedServer) -> None:
    async with AsyncPageKVClient(server.target) as client:
        task = asyncio.create_task(client.generate("x"))
        while not server.deadlines:  # noqa: ASYNC110  # the server's thread knows no event loop
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_cancelling_the_task_aborts_the_request(server: ScriptedServer) -> None:
    server.expect("Generate", chunk(4), Hangs())
    asyncio.run(_cancel(server))
    server.wait_cancelled("Generate")
