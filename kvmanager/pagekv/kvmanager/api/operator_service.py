"""pagekv.v1.OperatorService: pool, requests and prefix tables of all callers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any

from pagekv.common.errors import FailedPrecondition, InvalidRequest, NotFound
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.api.validation import check_request_id
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.paging import read_page_size
from pagekv.kvmanager.kvcache.events.batch import Diff, Removed, Stored, Tier
from pagekv.v1 import operator_service_pb2 as pb
from pagekv.v1 import operator_service_pb2_grpc as pb_grpc
from pagekv.v1 import types_pb2

# Events in one message: with token ids in blocks of 256 less than 2 MB, and a few milliseconds to write.
MAX_EVENTS = 1024
_TIERS = {Tier.DEVICE: types_pb2.TIER_DEVICE, Tier.HOST: types_pb2.TIER_HOST}


class OperatorService(pb_grpc.OperatorServiceServicer):
    """Every answer is a snapshot between two steps. Errors are raised as `PageKVError`."""

    def __init__(self, engine: EngineLoop, served_model: ServedModel) -> None:
        self._queries = engine.queries
        self._served_model = served_model

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        return self._queries.stats()

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        return self._queries.list_requests(read_page_size(request.page_size), request.page_token)

    async def GetBlockTable(self, request: pb.GetBlockTableRequest, context: Any) -> pb.GetBlockTableResponse:
        check_request_id("request_id", request.request_id)
        tables = self._queries.block_tables(request.request_id)
        if tables is None:
            raise NotFound(f"no request {request.request_id!r} is running or waiting", "request", request.request_id)
        return tables

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Any) -> pb.ListBlocksResponse:
        page_size = read_page_size(request.page_size)
        if request.state not in pb.BlockState.values():
            raise InvalidRequest("state", f"must be from 0 to {max(pb.BlockState.values())}, got {request.state}")
        return self._queries.list_blocks(page_size, request.page_token, request.state)

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, context: Any) -> pb.ResetPrefixCacheResponse:
        reset = self._queries.reset_prefix_cache(request.force)
        if reset is None:
            held = "running requests or pins hold blocks: wait for them to end, or use force"
            raise FailedPrecondition(held, "BLOCKS_HELD", "prefix cache")
        return reset

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        watch = self._queries.watch_events()
        # Runs also when the call is cancelled while a message is being written, where no `finally` here would.
        context.add_done_callback(lambda _: watch.close())
        with_tokens, sequence = not request.HasField("token_ids") or request.token_ids, count(1)
        more = True
        while more:
            # In pieces: the engine plans steps while each piece is on its way.
            blocks = watch.take_snapshot(MAX_EVENTS)
            more = len(blocks) == MAX_EVENTS
            yield pb.WatchEventsResponse(
                sequence=next(sequence), snapshot=True, events=_stored(blocks, with_tokens), more=more
            )
        while not request.snapshot_only:
            for events, more in _pieces(await watch.take(), with_tokens):
                yield pb.WatchEventsResponse(sequence=next(sequence), events=events, more=more)


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
        for digest, parent, token_ids in stored.each():
            yield pb.CacheEvent(
                stored=pb.BlockStored(
                    block_hash=digest.hex(),
                    parent_hash=parent.hex(),
                    token_ids=token_ids if with_tokens else (),
                    tier=_TIERS[stored.tier],
                )
            )


def _removed(found: Iterable[Removed]) -> Iterator[pb.CacheEvent]:
    for tier, digests in found:
        for digest in digests:
            yield pb.CacheEvent(removed=pb.BlockRemoved(block_hash=digest.hex(), tier=_TIERS[tier]))
