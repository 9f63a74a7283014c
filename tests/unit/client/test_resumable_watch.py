"""Watches of both clients that go on behind a revision when their connection breaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.clients.scripted_server import LOST, Fails, ScriptedServer

from pagekv.client import PageKVClient, TableReplica, errors
from pagekv.client.resumable_watch import ResumableWatch
from pagekv.common.errors import Draining
from pagekv.v1 import operator_service_pb2 as pb
from pagekv.v1 import types_pb2


def batch(
    sequence: int, *names: str, revision: int = 0, more: bool = False, snapshot: bool = False
) -> pb.WatchEventsResponse:
    blocks = [pb.BlockStored(block_hash=name, tier=types_pb2.TIER_DEVICE) for name in names]
    return pb.WatchEventsResponse(
        sequence=sequence,
        snapshot=snapshot,
        more=more,
        events=[pb.CacheEvent(stored=block) for block in blocks],
        revision=revision,
        instance_id="run-1" if sequence == 1 else "",
    )


def behind(revision: int) -> Callable[[pb.WatchEventsRequest], None]:
    def check(request: pb.WatchEventsRequest) -> None:
        assert (request.start_revision, request.instance_id) == (revision, "run-1" if revision else "")

    return check


def watch(resume_timeout: float = 10.0, clock: Callable[[], float] = lambda: 0.0) -> ResumableWatch:
    return ResumableWatch(
        token_ids=True, snapshot_only=False, start_revision=5, instance_id="run-1", progress_interval=None,
        resume_timeout=resume_timeout, clock=clock,
    )  # fmt: skip  # several arguments a line


def test_a_broken_watch_goes_on_behind_its_last_whole_batch(server: ScriptedServer, client: PageKVClient) -> None:
    """A batch of which a part had come is told once, whole; an orderly end of the server is no end of the watch."""
    first = [batch(1, "a", snapshot=True, more=True), batch(2, "b", snapshot=True, revision=3)]
    server.expect("WatchEvents", *first, batch(3, "c", more=True), Fails(LOST), check=behind(0))
    server.expect("WatchEvents", Fails(Draining("going", 0.0)), check=behind(3))
    again = [batch(1, "c", more=True), batch(2, "d", revision=6), batch(3, revision=6), batch(4, "e", revision=7)]
    server.expect("WatchEvents", *again, check=behind(3))
    replica, watched = TableReplica(), client.watch_events()
    found = [replica.apply(next(watched)) for _ in range(6)]
    assert found == [False, True, False, True, True, True]
    assert "".join(replica.blocks) == "abcde"
    assert (replica.revision, replica.instance_id) == (7, "run-1")
    watched.close()


def test_a_replica_takes_up_another_watch_where_it_stands(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("WatchEvents", batch(1, "a", snapshot=True, revision=3))
    server.expect("WatchEvents", batch(1, "b", revision=4), check=behind(3))
    replica = TableReplica()
    for _ in range(2):
        for found in client.watch_events(start_revision=replica.revision, instance_id=replica.instance_id):
            assert replica.apply(found)
    assert ("".join(replica.blocks), replica.revision) == ("ab", 4)


def test_changes_that_are_gone_are_told(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("WatchEvents", batch(1, snapshot=True, revision=3), Fails(LOST))
    server.expect("WatchEvents", Fails(errors.RevisionGone("watch from a snapshot")), check=behind(3))
    watched = client.watch_events()
    next(watched)
    with pytest.raises(errors.RevisionGone, match="watch from a snapshot"):
        next(watched)


def test_trying_ends_after_a_while_that_a_message_begins_anew() -> None:
    now = 0.0
    going = watch(clock=lambda: now)
    lost = errors.ConnectionLost("lost")
    assert 0 < going.failed(lost) <= 0.1
    now = 9.0
    assert 0 < going.failed(lost) <= 0.2
    going.request()
    assert [found.revision for found in going.take(pb.WatchEventsResponse(sequence=1, revision=6))] == [6]
    now = 18.9
    assert 0 < going.failed(lost) <= 0.1
    now = 29.0
    with pytest.raises(errors.ConnectionLost):
        going.failed(lost)


def test_a_server_that_still_counts_the_broken_call_is_asked_again_when_it_says() -> None:
    now = 0.0
    going = watch(clock=lambda: now)
    full = errors.Overloaded("max_calls: your tenant has 1 of at most 1, and asked for 1 more", 1.0)
    going.failed(errors.ConnectionLost("lost"))
    assert going.failed(full) == 1.0
    now = 9.5
    assert going.failed(full) == 0.5
    now = 10.0
    with pytest.raises(errors.Overloaded):
        going.failed(full)


@pytest.mark.parametrize(
    "error", [errors.FellBehind("slow"), errors.InvalidRequest("f", "bad"), errors.Overloaded("full", 1.0)]
)
def test_what_another_connection_cannot_mend_ends_a_watch(error: errors.PageKVError) -> None:
    with pytest.raises(type(error)):
        watch().failed(error)


def test_without_time_to_resume_the_first_loss_is_told() -> None:
    with pytest.raises(errors.ConnectionLost):
        watch(resume_timeout=0).failed(errors.ConnectionLost("lost"))


@pytest.mark.parametrize("interval", [0.5, 3601.0, float("nan"), float("inf")])
def test_a_silence_out_of_bounds_is_refused_by_name(client: PageKVClient, interval: float) -> None:
    with pytest.raises(errors.InvalidRequest, match="progress_interval: must be 1 to 3,600 seconds"):
        client.watch_events(progress_interval=interval)


@pytest.mark.parametrize("option", ["token_id", "clock", "resume_timeout"])
def test_an_unknown_option_is_refused(client: PageKVClient, option: str) -> None:
    """Also one that the reader inside takes."""
    with pytest.raises(TypeError, match=f"^unknown option '{option}'; known are instance_id, .*, token_ids$"):
        client.watch_events(**{option: 1})  # type: ignore[arg-type]  # the mistake under test


def test_an_outage_is_one_warning_for_those_who_listen(caplog: pytest.LogCaptureFixture) -> None:
    """As of a generation; none where the first loss is the end."""
    watched = watch()
    for begun in (1, 2):
        for _ in range(3):
            watched.failed(errors.Unavailable("gone"))
        assert [(each.levelname, each.name, each.getMessage()) for each in caplog.records] == [
            ("WARNING", "pagekv.client.resumable_watch", "connection lost, trying again for up to 10 s")
        ] * begun
        list(watched.take(batch(begun, revision=5 + begun)))
    with pytest.raises(errors.Unavailable):
        watch(resume_timeout=0).failed(errors.Unavailable("gone"))
    assert len(caplog.records) == 2
