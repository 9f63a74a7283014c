"""Watching the prefix table: both clients, and the replica that their batches keep up."""

from __future__ import annotations

import pytest
from support.clients.scripted_server import LOST, Fails, Hangs, ScriptedServer

from pagekv.client import BlockStored, ConnectionLost, EventBatch, FellBehind, PageKVClient, TableReplica, wire
from pagekv.common import errors
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2

DEVICE, HOST = types_pb2.TIER_DEVICE, types_pb2.TIER_HOST


def stored(name: str, parent: str = "", tier: types_pb2.Tier.ValueType = DEVICE) -> operator_pb.CacheEvent:
    block = operator_pb.BlockStored(block_hash=name, parent_hash=parent, token_ids=[1, 2], tier=tier)
    return operator_pb.CacheEvent(stored=block)


def removed(name: str, tier: types_pb2.Tier.ValueType) -> operator_pb.CacheEvent:
    return operator_pb.CacheEvent(removed=operator_pb.BlockRemoved(block_hash=name, tier=tier))


REMOVED_A = removed("a", DEVICE)
CLEARED = operator_pb.CacheEvent(cleared=operator_pb.AllBlocksCleared())


def test_watched_events_make_a_replica(server: ScriptedServer, client: PageKVClient) -> None:
    def check(request: operator_pb.WatchEventsRequest) -> None:
        assert (request.token_ids, request.snapshot_only) == (True, False)

    server.expect(
        "WatchEvents",
        operator_pb.WatchEventsResponse(sequence=1, snapshot=True, events=[stored("a")], more=True),
        operator_pb.WatchEventsResponse(sequence=2, snapshot=True, events=[stored("b", "a")]),
        operator_pb.WatchEventsResponse(sequence=3, events=[REMOVED_A, stored("c", "b")]),
        operator_pb.WatchEventsResponse(sequence=4, events=[CLEARED, stored("d")]),
        Fails(errors.FellBehind("start again")),
        check=check,
    )
    replica = TableReplica()
    seen: list[tuple[object, object]] = []
    watched = client.watch_events()
    for _ in range(4):
        whole = replica.apply(next(watched))
        seen.append((whole, "".join(sorted(replica.blocks))))
    assert seen == [(False, "a"), (True, "ab"), (True, "bc"), (True, "d")]
    assert replica.blocks["d"] == BlockStored(block_hash="d", parent_hash="", token_ids=(1, 2), tier="device")
    with pytest.raises(FellBehind, match="start again"):
        next(watched)


def test_a_replica_keeps_the_tiers_apart() -> None:
    """One hash may be in both tables, and is removed from each separately."""
    replica = TableReplica()
    seen: list[tuple[object, object]] = []
    for events in (
        [stored("a"), stored("a", tier=HOST)],
        [REMOVED_A, stored("b", "a", HOST)],
        [removed("a", HOST), stored("c")],
        [CLEARED],
    ):
        sequence = len(seen) + 1
        message = operator_pb.WatchEventsResponse(sequence=sequence, snapshot=sequence == 1, events=events)
        assert replica.apply(wire.flat(EventBatch, message))
        seen.append(("".join(replica.blocks), "".join(replica.host_blocks)))
    assert seen == [("a", "a"), ("", "ab"), ("c", "b"), ("", "")]


def test_a_watch_begins_again_until_its_first_message(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("WatchEvents", Fails(LOST))
    server.expect("WatchEvents", operator_pb.WatchEventsResponse(sequence=1, snapshot=True), Fails(LOST))
    watched = client.watch_events()
    assert next(watched).snapshot
    with pytest.raises(ConnectionLost):
        next(watched)


def test_a_watch_ends_when_it_is_closed(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("WatchEvents", operator_pb.WatchEventsResponse(sequence=1, snapshot=True), Hangs())
    watched = client.watch_events(token_ids=False, snapshot_only=True)
    assert next(watched).events == ()
    watched.close()
    server.wait_cancelled("WatchEvents")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (operator_pb.WatchEventsResponse(sequence=2, snapshot=True), "batch 2 does not follow batch 0"),
        (operator_pb.WatchEventsResponse(sequence=1), "before the end of the snapshot"),
        (operator_pb.WatchEventsResponse(sequence=1, snapshot=True, events=[REMOVED_A]), "removes a, which is not"),
        (
            operator_pb.WatchEventsResponse(sequence=1, snapshot=True, events=[stored("a"), removed("a", HOST)]),
            "removes a, which is not",
        ),
        (operator_pb.WatchEventsResponse(sequence=1, snapshot=True, events=[stored("a")] * 2), "stores a, which is"),
        (
            operator_pb.WatchEventsResponse(sequence=1, snapshot=True, events=[stored("a"), operator_pb.CacheEvent()]),
            "has an event unknown to this client",
        ),
    ],
)
def test_a_replica_refuses_what_cannot_be_true(message: operator_pb.WatchEventsResponse, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TableReplica().apply(wire.flat(EventBatch, message))
