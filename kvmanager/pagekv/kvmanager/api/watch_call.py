"""One WatchEvents call: checks of its request, its watch, and the changes of the prefix tables as messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import chain, count, islice, repeat
from typing import Any

from pagekv.common.errors import InvalidRequest, RevisionGone
from pagekv.common.turns import let_others_run
from pagekv.kvmanager.engine.queries import EngineQueries
from pagekv.kvmanager.kvcache.events.batch import Diff, Removed, Stored, Tier
from pagekv.kvmanager.kvcache.events.log import RETRY_DELAY_S
from pagekv.kvmanager.kvcache.events.subscription import TableWatch
from pagekv.kvmanager.tenants.accounts import Account
from pagekv.v1 import operator_service_pb2 as pb
from pagekv.v1 import types_pb2

# Most events in one message. With token ids and blocks of 256 tokens it has less than 2 MB and takes a few milliseconds
# to write.
MAX_EVENTS = 1024
# Events of a snapshot that are made at once, which takes a millisecond.
EVENTS_AT_ONCE = 128
MIN_PROGRESS_S, MAX_PROGRESS_S = 1, 3600
MAX_INSTANCE_CHARACTERS = 64
_TIERS = {Tier.DEVICE: types_pb2.TIER_DEVICE, Tier.HOST: types_pb2.TIER_HOST}


def check_watch(request: pb.WatchEventsRequest, instance_id: str) -> None:
    """Raises InvalidRequest, and RevisionGone if start_revision is of another run than `instance_id`."""
    given = request.instance_id
    if len(given) > MAX_INSTANCE_CHARACTERS:
        raise InvalidRequest("instance_id", f"must be at most {MAX_INSTANCE_CHARACTERS} characters, has {len(given)}")
    if bool(given) != bool(request.start_revision):
        missing = "instance_id" if request.start_revision else "start_revision"
        raise InvalidRequest(missing, "must be given: start_revision and instance_id go together")
    if request.start_revision and request.snapshot_only:
        raise InvalidRequest("snapshot_only", "must be false with start_revision: there is no snapshot then")
    if request.HasField("progress_interval"):
        if request.snapshot_only:
            raise InvalidRequest("progress_interval", "must be absent with snapshot_only: no change is waited for then")
        interval = request.progress_interval
        nanos = interval.seconds * 10**9 + interval.nanos
        if not 0 <= interval.nanos < 10**9:
            raise InvalidRequest("progress_interval.nanos", f"must be from 0 to 999999999, got {interval.nanos}")
        if not MIN_PROGRESS_S * 10**9 <= nanos <= MAX_PROGRESS_S * 10**9:
            bounds = f"must be from {MIN_PROGRESS_S} to {MAX_PROGRESS_S} seconds"
            raise InvalidRequest("progress_interval", f"{bounds}, got {nanos / 1e9:g}")
    if given not in ("", instance_id):
        raise RevisionGone("start_revision is of another run of the manager; watch from a snapshot")


def open_watch(queries: EngineQueries, account: Account, context: Any, start_revision: int = 0) -> TableWatch:
    """A watch that ends with its call and counts for its tenant. Raises as `watch_events` does."""
    account.check_count("max_watchers", account.watchers, retry_delay_s=RETRY_DELAY_S)
    watch = queries.watch_events(start_revision)
    account.watchers += 1

    def close(_: object) -> None:
        watch.close()
        account.watchers -= 1

    # The callback runs even if the call is cancelled while a message is being written; a `finally` would not.
    context.add_done_callback(close)
    return watch


async def watch_messages(
    request: pb.WatchEventsRequest, watch: TableWatch, instance_id: str, turns: asyncio.Lock
) -> AsyncIterator[pb.WatchEventsResponse]:
    """The messages of the call: the snapshot, unless the request has a start_revision, and then the changes. `turns` is
    held while a piece of the snapshot is made; otherwise the engine would have to wait for a piece of every watch that
    has just begun.
    """
    with_tokens, sequence = not request.HasField("token_ids") or request.token_ids, count(1)
    interval = request.progress_interval.ToMilliseconds() / 1e3 or None
    more = not request.start_revision
    while more:
        revision = watch.revision
        async with turns:
            events, more = await _snapshot_piece(watch, with_tokens)
        message = pb.WatchEventsResponse(
            sequence=next(sequence), snapshot=True, events=events, more=more,
            revision=0 if more else revision, instance_id=instance_id,
        )  # fmt: skip  # several fields a line
        instance_id = ""
        yield message
    while not request.snapshot_only:
        diff = Diff()
        try:
            async with asyncio.timeout(interval):
                diff = await watch.take()
        except TimeoutError:
            pass  # nothing changed: the message below is empty
        revision = watch.revision
        for events, more in _pieces(diff, with_tokens):
            message = pb.WatchEventsResponse(
                sequence=next(sequence), events=events, more=more, revision=0 if more else revision,
                instance_id=instance_id,
            )  # fmt: skip  # several fields a line
            instance_id = ""
            yield message


async def _snapshot_piece(watch: TableWatch, with_tokens: bool) -> tuple[Sequence[pb.CacheEvent], bool]:
    """The next events of a snapshot, at most MAX_EVENTS, and whether more may follow. Steps go on meanwhile."""
    events: list[pb.CacheEvent] = []
    while len(events) < MAX_EVENTS:
        blocks = watch.take_snapshot(EVENTS_AT_ONCE)
        events += _stored(blocks, with_tokens)
        if len(blocks) < EVENTS_AT_ONCE:
            return events, False
        await let_others_run()
    return events, True


def _pieces(diff: Diff, with_tokens: bool) -> Iterator[tuple[Sequence[pb.CacheEvent], bool]]:
    """Events of a change, MAX_EVENTS at a time, and whether more follow."""
    left = chain(
        [pb.CacheEvent(cleared=pb.AllBlocksCleared())] if diff.cleared else [],
        _removed(diff.removed),
        _stored(diff.stored, with_tokens),
    )
    events = list(islice(left, MAX_EVENTS))
    while later := list(islice(left, MAX_EVENTS)):
        yield events, True
        events = later
    yield events, False


def _stored(found: Iterable[Stored], with_tokens: bool) -> Iterator[pb.CacheEvent]:
    for stored in found:
        for (digest, parent, token_ids), names in zip(stored.each(), stored.names or repeat(None), strict=False):
            namespace, adapter = names or ("", "")
            yield pb.CacheEvent(
                stored=pb.BlockStored(
                    block_hash=digest.hex(),
                    parent_hash=parent.hex(),
                    token_ids=token_ids if with_tokens else (),
                    tier=_TIERS[stored.tier],
                    namespace=namespace,
                    adapter=adapter,
                )
            )


def _removed(found: Iterable[Removed]) -> Iterator[pb.CacheEvent]:
    for tier, digests in found:
        for digest in digests:
            yield pb.CacheEvent(removed=pb.BlockRemoved(block_hash=digest.hex(), tier=_TIERS[tier]))
