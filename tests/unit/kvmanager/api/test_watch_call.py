"""WatchEvents over a real gRPC server: the snapshot in pieces, batches, slow readers, and how a watch ends."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from support.engine.cache_harness import run_operator
from support.engine.fake_engine import FakeEngine
from support.event_loop import run_by, until

from pagekv.common.errors import Overloaded, Unavailable
from pagekv.kvmanager.api.watch_call import EVENTS_AT_ONCE, MAX_EVENTS, watch_messages
from pagekv.kvmanager.kvcache.events.batch import Diff, Removed, Stored, Tier
from pagekv.kvmanager.kvcache.events.subscription import TableWatch
from pagekv.v1 import operator_service_pb2 as pb
from pagekv.v1 import types_pb2

if TYPE_CHECKING:
    from pagekv.v1.operator_service_pb2_grpc import OperatorServiceAsyncStub as OperatorStub

ROOT = b"\xff"


def digest(number: int) -> bytes:
    return number.to_bytes(4, "big")


def tier(number: int) -> Tier:
    """Even numbers are on the device, odd ones in the host pool."""
    return Tier.HOST if number % 2 else Tier.DEVICE


def block(number: int, where: Tier | None = None) -> Stored:
    parent = digest(number - 1) if number else ROOT
    return Stored(where or tier(number), [digest(number)], [parent], array("I", [number, number + 1]).tobytes())


def diff(*changes: int, cleared: bool = False) -> Diff:
    """Stores the numbers that are not negative and removes the others, ~n for n."""
    made = Diff()
    if cleared:
        made.clear()
    for number in changes:
        if number >= 0:
            made.store(block(number))
        else:
            made.remove(Removed(tier(~number), [digest(~number)]))
    return made


def shown(message: pb.WatchEventsResponse) -> list[str]:
    """Events as "+n", "-n" and "clear"."""
    names = []
    for event in message.events:
        if event.HasField("cleared"):
            names.append("clear")
        elif event.HasField("stored"):
            names.append(f"+{int(event.stored.block_hash, 16)}")
        else:
            names.append(f"-{int(event.removed.block_hash, 16)}")
    return names


def push(watch: TableWatch, change: Diff) -> None:
    watch.push(change, watch._pushed + 1)


def watch_of(engine: FakeEngine) -> TableWatch:
    assert engine.watch is not None
    return engine.watch


async def read(call: grpc.aio.UnaryStreamCall[pb.WatchEventsRequest, pb.WatchEventsResponse]) -> pb.WatchEventsResponse:
    message = await call.read()
    assert isinstance(message, pb.WatchEventsResponse), "the stream has ended"
    return message


@pytest.mark.parametrize(("size", "pieces"), [(0, [0]), (3, [3]), (1024, [1024, 0]), (2100, [1024, 1024, 52])])
@run_by(run_operator)
async def test_the_snapshot_comes_in_pieces_that_fit_a_message(
    engine: FakeEngine, stub: OperatorStub, *, size: int, pieces: list[int]
) -> None:
    engine.table = [block(number) for number in range(size)]
    messages = [message async for message in stub.WatchEvents(pb.WatchEventsRequest(snapshot_only=True))]
    assert [len(message.events) for message in messages] == pieces
    assert [message.sequence for message in messages] == list(range(1, len(pieces) + 1))
    assert [message.more for message in messages] == [True] * (len(pieces) - 1) + [False]
    assert all(message.snapshot for message in messages)
    assert [name for message in messages for name in shown(message)] == [f"+{number}" for number in range(size)]
    await until(lambda: engine.ended_watches == [engine.watch])


@run_by(run_operator)
async def test_a_stored_block_tells_hash_parent_tokens_and_tier(engine: FakeEngine, stub: OperatorStub) -> None:
    engine.table = [block(7, Tier.DEVICE), block(7, Tier.HOST)]
    for wanted in (None, True, False):
        request = pb.WatchEventsRequest(snapshot_only=True, token_ids=wanted)
        (message,) = [message async for message in stub.WatchEvents(request)]
        tokens = [] if wanted is False else [7, 8]
        assert [event.stored for event in message.events] == [
            pb.BlockStored(block_hash="00000007", parent_hash="00000006", token_ids=tokens, tier=tier)
            for tier in (types_pb2.TIER_DEVICE, types_pb2.TIER_HOST)
        ]


@run_by(run_operator)
async def test_a_stored_block_tells_namespace_and_adapter(engine: FakeEngine, stub: OperatorStub) -> None:
    engine.table = [block(1)._replace(names=[("n", "a")]), block(2)._replace(names=[None]), block(3)]
    (message,) = [message async for message in stub.WatchEvents(pb.WatchEventsRequest(snapshot_only=True))]
    found = [(event.stored.namespace, event.stored.adapter) for event in message.events]
    assert found == [("n", "a"), ("", ""), ("", "")]


@run_by(run_operator)
async def test_a_removed_block_tells_its_tier(engine: FakeEngine, stub: OperatorStub) -> None:
    call = stub.WatchEvents(pb.WatchEventsRequest())
    await read(call)
    push(watch_of(engine), diff(~4, ~5))
    assert [event.removed for event in (await read(call)).events] == [
        pb.BlockRemoved(block_hash="00000004", tier=types_pb2.TIER_DEVICE),
        pb.BlockRemoved(block_hash="00000005", tier=types_pb2.TIER_HOST),
    ]
    call.cancel()


@run_by(run_operator)
async def test_batches_follow_the_snapshot_and_a_slow_reader_gets_them_as_one(
    engine: FakeEngine, stub: OperatorStub
) -> None:
    engine.table = [block(0)]
    call = stub.WatchEvents(pb.WatchEventsRequest())
    assert shown(await read(call)) == ["+0"]
    watch = watch_of(engine)
    push(watch, diff(1, 2))
    message = await read(call)
    assert (message.sequence, message.snapshot, message.more, shown(message)) == (2, False, False, ["+1", "+2"])
    # Nobody awaits in between, so the handler sees both at once: what 3 and 0 did cancels out or comes once.
    push(watch, diff(3, ~0))
    push(watch, diff(~3, ~1, 4))
    assert shown(await read(call)) == ["-0", "-1", "+4"]
    push(watch, diff(~4))
    push(watch, diff(4, cleared=True))
    assert shown(await read(call)) == ["clear", "+4"]
    push(watch, diff(*range(10, 10 + 1500), cleared=True))
    first, second = await read(call), await read(call)
    assert (len(first.events), first.more, len(second.events), second.more) == (1024, True, 477, False)
    assert shown(first)[0] == "clear"
    assert second.sequence == 6
    call.cancel()
    await until(lambda: engine.ended_watches == [watch])


@run_by(run_operator)
async def test_a_reader_too_far_behind_is_told_to_start_again(engine: FakeEngine, stub: OperatorStub) -> None:
    call = stub.WatchEvents(pb.WatchEventsRequest())
    await read(call)
    push(watch_of(engine), diff(*range(5001)))
    with pytest.raises(grpc.aio.AioRpcError, match="more than 5000 changes were not read in time") as caught:
        await read(call)
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert engine.ended_watches == [engine.watch]


@run_by(run_operator)
async def test_a_watch_ends_with_what_ended_it(engine: FakeEngine, stub: OperatorStub) -> None:
    call = stub.WatchEvents(pb.WatchEventsRequest())
    await read(call)
    watch_of(engine).fail(Unavailable("the manager is shutting down"))
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
        await read(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    engine.refusal = Overloaded("16 readers", 1.0)
    with pytest.raises(grpc.aio.AioRpcError, match="16 readers") as caught:
        await read(stub.WatchEvents(pb.WatchEventsRequest()))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@run_by(run_operator)
async def test_revisions_stand_on_whole_batches_and_the_instance_on_the_first_message(
    engine: FakeEngine, stub: OperatorStub
) -> None:
    engine.table = [block(number) for number in range(1500)]
    call = stub.WatchEvents(pb.WatchEventsRequest())
    found = [await read(call), await read(call)]
    watch = watch_of(engine)
    push(watch, diff(*range(2000, 3100)))
    push(watch, diff(5000))
    found += [await read(call), await read(call)]
    assert [(m.revision, m.more, m.instance_id) for m in found] == [
        (0, True, "run-1"), (7, False, ""), (0, True, ""), (9, False, "")
    ]  # fmt: skip  # a message a column
    call.cancel()


@run_by(run_operator)
async def test_a_reader_goes_on_behind_its_revision_without_a_snapshot(engine: FakeEngine, stub: OperatorStub) -> None:
    engine.table = [block(0)]
    call = stub.WatchEvents(pb.WatchEventsRequest(start_revision=40, instance_id="run-1"))
    await until(lambda: engine.watch is not None)
    push(watch_of(engine), diff(1))
    message = await read(call)
    assert (message.sequence, message.snapshot, message.revision, message.instance_id) == (1, False, 41, "run-1")
    assert shown(message) == ["+1"]
    call.cancel()
    other = stub.WatchEvents(pb.WatchEventsRequest(start_revision=40, instance_id="run-0"))
    with pytest.raises(grpc.aio.AioRpcError, match="of another run of the manager; watch from a snapshot") as caught:
        await read(other)
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


@run_by(run_operator)
async def test_a_silent_watch_says_that_it_lives(engine: FakeEngine, stub: OperatorStub) -> None:
    """The empty message has the revision that the reader has by then, also where changes cancelled each other out."""
    call = stub.WatchEvents(pb.WatchEventsRequest(progress_interval=Duration(seconds=1)))
    await read(call)
    watch = watch_of(engine)
    watch.push(diff(1), 8)
    watch.push(diff(~1), 9)
    told = await read(call)
    if told.revision == 7:
        # It was on its way before the changes.
        told = await read(call)
    for message in (told, await read(call)):
        assert message == pb.WatchEventsResponse(sequence=message.sequence, revision=9)
    assert message.sequence == told.sequence + 1
    push(watch, diff(2))
    while not (message := await read(call)).events:
        assert message.revision == 9
    assert shown(message) == ["+2"]
    call.cancel()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.WatchEventsRequest(start_revision=1), "instance_id"),
        (pb.WatchEventsRequest(instance_id="run-1"), "start_revision"),
        (pb.WatchEventsRequest(start_revision=1, instance_id="r" * 65), "instance_id"),
        (pb.WatchEventsRequest(start_revision=1, instance_id="run-1", snapshot_only=True), "snapshot_only"),
        (pb.WatchEventsRequest(progress_interval=Duration()), "progress_interval"),
        (pb.WatchEventsRequest(progress_interval=Duration(nanos=999_999_999)), "progress_interval"),
        (pb.WatchEventsRequest(progress_interval=Duration(seconds=-5)), "progress_interval"),
        (pb.WatchEventsRequest(progress_interval=Duration(seconds=2, nanos=-5)), "progress_interval.nanos"),
        (pb.WatchEventsRequest(progress_interval=Duration(nanos=2 * 10**9)), "progress_interval.nanos"),
        (pb.WatchEventsRequest(progress_interval=Duration(seconds=2), snapshot_only=True), "progress_interval"),
        (pb.WatchEventsRequest(progress_interval=Duration(seconds=3600, nanos=1)), "progress_interval"),
        (pb.WatchEventsRequest(progress_interval=Duration(seconds=2**62)), "progress_interval"),
    ],
)
@run_by(run_operator)
async def test_wishes_out_of_bounds_are_refused_by_name(
    engine: FakeEngine, stub: OperatorStub, *, request_: pb.WatchEventsRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub.WatchEvents(request_))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{field}: must be")
    assert engine.watch is None


def test_an_ended_watch_keeps_nothing() -> None:
    """Pushes after the reader went, and a second close, do nothing."""
    ended: list[TableWatch] = []
    watch = TableWatch(iter([block(1)]), ended.append, 0)
    push(watch, diff(2))
    watch.close()
    watch.close()
    assert ended == [watch]
    assert watch.take_snapshot(9) == []


def test_between_two_turns_of_the_event_loop_a_few_events_are_made_however_many_watches_begin() -> None:
    """Each behind the other, so that the engine waits for none of the rest."""
    made, most = 0, 0

    def blocks() -> Iterator[Stored]:
        nonlocal made
        for number in range(2 * MAX_EVENTS):
            made += 1
            yield block(number)

    async def read(watch: TableWatch, turns: asyncio.Lock) -> int:
        request = pb.WatchEventsRequest(snapshot_only=True)
        return sum([len(message.events) async for message in watch_messages(request, watch, "", turns)])

    async def main() -> None:
        nonlocal most
        turns = asyncio.Lock()
        watches = [TableWatch(blocks(), lambda watch: None, 1) for _ in range(8)]
        reading = asyncio.gather(*(read(watch, turns) for watch in watches))
        while not reading.done():
            before = made
            await asyncio.sleep(0)
            most = max(most, made - before)
        assert await reading == [2 * MAX_EVENTS] * 8

    asyncio.run(main())
    assert most == EVENTS_AT_ONCE
