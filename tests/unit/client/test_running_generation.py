"""Ending a generation from another thread, or another task."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.clients.scripted_server import Fails, Hangs, ScriptedServer, chunk

from pagekv.client import AsyncPageKVClient, PageKVClient
from pagekv.common import errors


def test_closing_ends_an_iteration_elsewhere(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4), Hangs())
    stream = client.stream("x")
    assert next(stream).token_ids == (4,)
    with ThreadPoolExecutor(1) as other:
        rest = other.submit(list, stream)
        # So that it waits for a chunk by then, most likely; earlier it ends as well.
        time.sleep(0.2)
        stream.close()
        assert rest.result(60) == []
    server.wait_cancelled("Generate")
    stream.close()
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="closed before it ended"):
        _ = stream.completion


def test_closing_ends_a_pause_before_a_retry(server: ScriptedServer, client: PageKVClient) -> None:
    refused = threading.Event()
    server.expect("Generate", refused.set, Fails(errors.Overloaded("full", 50.0)))
    stream = client.stream("x")
    with ThreadPoolExecutor(1) as other:
        rest = other.submit(list, stream)
        assert refused.wait(60)
        stream.close()
        assert rest.result(40) == []


def test_closing_before_the_first_chunk_sends_nothing(server: ScriptedServer, client: PageKVClient) -> None:
    stream = client.stream("x")
    stream.close()
    assert list(stream) == []


async def _cancel_reader(server: ScriptedServer) -> None:
    """A task that is cancelled while its stream is closed is a cancelled task."""
    async with AsyncPageKVClient(server.target) as client:
        stream = client.stream("x")
        assert (await anext(stream)).token_ids == (4,)
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        await stream.close()
        with pytest.raises(asyncio.CancelledError):
            await reader


def test_a_cancelled_task_stays_cancelled(server: ScriptedServer) -> None:
    server.expect("Generate", chunk(4), Hangs())
    asyncio.run(_cancel_reader(server))
    server.wait_cancelled("Generate")
