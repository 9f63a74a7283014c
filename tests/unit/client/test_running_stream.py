"""Ending a generation or a watch from another thread, or another task."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.clients.scripted_server import Fails, Hangs, ScriptedServer, chunk

from pagekv.client import AsyncPageKVClient, Cancelled, PageKVClient, Watch
from pagekv.client.resumable_watch import ResumableWatch
from pagekv.client.running_stream import RunningStream
from pagekv.common import errors
from pagekv.v1 import operator_service_pb2 as pb

# By the method called: how each client opens it, and the first answer.
OPENED: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "Generate": (lambda client: client.stream("x"), chunk(4)),
    "WatchEvents": (lambda client: client.watch_events(), pb.WatchEventsResponse(sequence=1, snapshot=True)),
}
both = pytest.mark.parametrize("method", OPENED)


@both
def test_closing_ends_an_iteration_elsewhere(server: ScriptedServer, client: PageKVClient, method: str) -> None:
    begin, first = OPENED[method]
    server.expect(method, first, Hangs())
    stream = begin(client)
    next(stream)
    with ThreadPoolExecutor(1) as other:
        rest = other.submit(list, stream)
        # So that it waits for an item by then, most likely; earlier it ends as well.
        time.sleep(0.2)
        stream.close()
        assert rest.result(60) == []
    server.wait_cancelled(method)
    stream.close()
    assert list(stream) == []


def test_a_closed_stream_has_no_completion(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4), Hangs())
    with client.stream("x") as stream:
        assert next(stream).token_ids == (4,)
    with pytest.raises(RuntimeError, match="closed before it ended"):
        _ = stream.completion


def test_a_stream_that_an_error_ended_has_no_completion(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", Fails(errors.NotFound("no such adapter")))
    stream = client.stream("x")
    with pytest.raises(errors.NotFound):
        next(stream)
    with pytest.raises(RuntimeError, match="or an error ended it"):
        _ = stream.completion


@both
def test_leaving_the_with_statement_closes(server: ScriptedServer, client: PageKVClient, method: str) -> None:
    begin, first = OPENED[method]
    server.expect(method, first, Hangs())
    with begin(client) as stream:
        next(stream)
    server.wait_cancelled(method)
    assert list(stream) == []


class SlowToCancel:
    """A call with one message. Its first cancellation is `end`'s, the second one the generator's, which takes long."""

    def __init__(self) -> None:
        self.cancelling, self.go_on = threading.Event(), threading.Event()
        self._cancelled = 0

    def __iter__(self) -> Iterator[Any]:
        yield OPENED["WatchEvents"][1]

    def cancel(self) -> None:
        self._cancelled += 1
        if self._cancelled == 2:
            self.cancelling.set()
            assert self.go_on.wait(60)


def test_a_reader_that_comes_while_another_thread_closes_finds_the_end() -> None:
    call = SlowToCancel()
    with PageKVClient("127.0.0.1:1") as client, ThreadPoolExecutor(1) as other:
        wanted = ResumableWatch(
            token_ids=True, snapshot_only=False, start_revision=0, instance_id="", progress_interval=None,
            resume_timeout=0,
        )  # fmt: skip  # several arguments a line
        watch = Watch(RunningStream(client, wanted, lambda request, timeout: call))
        next(watch)
        closing = other.submit(watch.close)
        assert call.cancelling.wait(60)
        try:
            assert list(watch) == []
        finally:
            call.go_on.set()
        closing.result(60)


def test_closing_ends_a_pause_before_a_retry(server: ScriptedServer, client: PageKVClient) -> None:
    refused = threading.Event()
    server.expect("Generate", refused.set, Fails(errors.Overloaded("full", 50.0)))
    stream = client.stream("x")
    with ThreadPoolExecutor(1) as other:
        rest = other.submit(list, stream)
        assert refused.wait(60)
        stream.close()
        assert rest.result(40) == []


@pytest.mark.parametrize("end_stream", [False, True])
def test_closing_the_client_ends_a_pause_before_a_retry(
    server: ScriptedServer, make_client: Callable[..., Any], end_stream: bool
) -> None:
    refused = threading.Event()
    server.expect("Generate", refused.set, Fails(errors.Overloaded("full", 50.0)))
    client = make_client(server.target)
    stream = client.with_options(max_retries=5).stream("x")
    with ThreadPoolExecutor(1) as other:
        rest = other.submit(list, stream)
        assert refused.wait(60)
        # So that the pause has begun by then, most likely; before it, the end is the same.
        time.sleep(0.2)
        if end_stream:
            stream.close()
        client.close()
        if end_stream:
            assert rest.result(40) == []
        else:
            with pytest.raises(Cancelled):
                rest.result(40)


@both
def test_closing_before_the_first_item_sends_nothing(server: ScriptedServer, client: PageKVClient, method: str) -> None:
    stream = OPENED[method][0](client)
    stream.close()
    assert list(stream) == []


# Every way to wait, by the method called, with a first answer that does not end the wait.
WAITS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "GetModelInfo": (lambda client: client.model_info(), ()),
    "Generate": (lambda client: client.generate("x"), (chunk(4),)),
    "WatchEvents": (lambda client: list(client.watch_events()), ()),
}


@pytest.mark.parametrize("method", WAITS)
def test_closing_the_client_cancels_calls_elsewhere(
    server: ScriptedServer, make_client: Callable[..., Any], method: str
) -> None:
    call, first = WAITS[method]
    called = threading.Event()
    server.expect(method, called.set, *first, Hangs())
    client = make_client(server.target)
    with ThreadPoolExecutor(1) as other:
        result = other.submit(call, client)
        assert called.wait(60)
        client.close()
        with pytest.raises(Cancelled) as caught:
            result.result(60)
    assert str(caught.value) == f"the call to PageKV at {server.target} was cancelled"


async def _read_in_a_group(client: AsyncPageKVClient) -> None:
    stream = client.stream("x")
    await anext(stream)
    async with asyncio.TaskGroup() as group:
        group.create_task(anext(stream))
        # It waits in the call by then.
        await asyncio.sleep(0)
        await client.close()


async def _close_in_a_group(server: ScriptedServer) -> None:
    """A task that was not cancelled itself may not end as if it were: its group would not notice."""
    with pytest.raises(ExceptionGroup) as caught:
        await _read_in_a_group(AsyncPageKVClient(server.target))
    assert [type(error) for error in caught.value.exceptions] == [Cancelled]


def test_closing_the_client_fails_a_group_that_reads(server: ScriptedServer) -> None:
    server.expect("Generate", chunk(4), Hangs())
    asyncio.run(_close_in_a_group(server))


async def _close_elsewhere(server: ScriptedServer, method: str) -> None:
    """A task that waits for an item ends as at the end of the stream when another one closes it."""
    async with AsyncPageKVClient(server.target) as client:
        stream = OPENED[method][0](client)
        await anext(stream)
        reader = asyncio.create_task(anext(stream, None))
        # It waits in the call by then.
        await asyncio.sleep(0)
        await stream.close()
        assert await asyncio.wait_for(reader, 60) is None
        await stream.close()
        assert [item async for item in stream] == []


@both
def test_closing_ends_another_task(server: ScriptedServer, method: str) -> None:
    server.expect(method, OPENED[method][1], Hangs())
    asyncio.run(_close_elsewhere(server, method))
    server.wait_cancelled(method)


async def _cancel_reader(server: ScriptedServer, method: str, *, close_client: bool) -> None:
    """A task that is cancelled while its stream, or its client, is closed is a cancelled task."""
    async with AsyncPageKVClient(server.target) as client:
        stream = OPENED[method][0](client)
        await anext(stream)
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        await (client if close_client else stream).close()
        with pytest.raises(asyncio.CancelledError):
            await reader


@both
@pytest.mark.parametrize("close_client", [False, True])
def test_a_cancelled_task_stays_cancelled(server: ScriptedServer, method: str, close_client: bool) -> None:
    server.expect(method, OPENED[method][1], Hangs())
    asyncio.run(_cancel_reader(server, method, close_client=close_client))
    server.wait_cancelled(method)
