"""pagekv.v1.CacheService: looks into the KV cache. Hashes are written in hex, for people to read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any

from pagekv.common.errors import FailedPrecondition, InvalidRequest, NotFound
from pagekv.kvmanager.api.prompt_reader import PromptReader
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.api.validation import check_media, check_request_id, read_cache_controls
from pagekv.kvmanager.engine.interface import Engine
from pagekv.kvmanager.engine.views import BlockView, ExplainedBlock, by_name
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.events.batch import Diff, Removed, Stored, Tier
from pagekv.kvmanager.kvcache.pins import MAX_LEASE_S, MIN_LEASE_S
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import cache_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from pagekv.kvmanager.api.prompt_reader import PromptRequest

DEFAULT_BLOCKS = 100
DEFAULT_REQUESTS = 100
DEFAULT_EXPLANATIONS = 1000
MAX_LIMIT = 10_000
# Events in one message: with token ids in blocks of 256 less than 2 MB, and a few milliseconds to write.
MAX_EVENTS = 1024
MAX_PIN_ID_CHARACTERS = 64
_STATES = {
    pb.BLOCK_STATE_UNSPECIFIED: None,
    pb.BLOCK_STATE_FREE: "free",
    pb.BLOCK_STATE_CACHED: "cached",
    pb.BLOCK_STATE_ACTIVE: "active",
    pb.BLOCK_STATE_PINNED: "pinned",
}
_TIERS = {Tier.DEVICE: pb.TIER_DEVICE, Tier.HOST: pb.TIER_HOST}


class CacheService(pb_grpc.CacheServiceServicer):
    """Every answer is a snapshot between two steps. Errors are raised as `PageKVError`."""

    def __init__(self, engine: Engine, served_model: ServedModel) -> None:
        self._queries = engine.queries
        self._served_model = served_model

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(**by_name(self._queries.stats()))

    async def LookupPrefix(self, request: pb.LookupPrefixRequest, context: Any) -> pb.LookupPrefixResponse:
        prompt, identity = await self._read_prompt(request)
        return pb.LookupPrefixResponse(
            prompt_tokens=len(prompt), **by_name(self._queries.lookup_prefix(prompt, identity))
        )

    async def ExplainPrefix(self, request: pb.ExplainPrefixRequest, context: Any) -> pb.ExplainPrefixResponse:
        _check_limit(request.limit)
        prompt, identity = await self._read_prompt(request)
        num_blocks = -(-len(prompt) // self._served_model.served().model.block_size)
        if request.start >= num_blocks:
            raise InvalidRequest("start", f"must be from 0 to {num_blocks - 1} (the prompt), got {request.start}")
        found = self._queries.explain_prefix(prompt, identity, request.start, request.limit or DEFAULT_EXPLANATIONS)
        return pb.ExplainPrefixResponse(
            blocks=map(_explanation, found.blocks),
            next_start=found.next_start,
            prompt_tokens=len(prompt),
            cached_tokens=found.cached_tokens,
        )

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        _check_limit(request.limit)
        views, total = self._queries.list_requests(request.limit or DEFAULT_REQUESTS)
        return pb.ListRequestsResponse(requests=[pb.RequestInfo(**by_name(view)) for view in views], total=total)

    async def GetBlockTable(self, request: pb.GetBlockTableRequest, context: Any) -> pb.GetBlockTableResponse:
        check_request_id("request_id", request.request_id)
        views = self._queries.block_tables(request.request_id)
        if views is None:
            raise NotFound(f"no request {request.request_id!r} is running or waiting")
        return pb.GetBlockTableResponse(
            sequences=[
                pb.SequenceBlocks(**by_name(view) | {"block_hashes": [digest.hex() for digest in view.block_hashes]})
                for view in views
            ]
        )

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Any) -> pb.ListBlocksResponse:
        num_blocks = self._served_model.served().model.num_device_blocks
        if request.start >= num_blocks:
            raise InvalidRequest("start", f"must be from 0 to {num_blocks - 1} (the pool), got {request.start}")
        _check_limit(request.limit)
        if request.state not in _STATES:
            raise InvalidRequest("state", f"must be from 0 to {len(_STATES) - 1}, got {request.state}")
        blocks, next_start = self._queries.list_blocks(
            request.start, request.limit or DEFAULT_BLOCKS, _STATES[request.state]
        )
        return pb.ListBlocksResponse(blocks=map(_block_info, blocks), next_start=next_start)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Any) -> pb.PinPrefixResponse:
        lease = request.lease_seconds
        if not MIN_LEASE_S <= lease <= MAX_LEASE_S:
            raise InvalidRequest("lease_seconds", f"must be from {MIN_LEASE_S} to {MAX_LEASE_S}, got {lease}")
        prompt, identity = await self._read_prompt(request)
        return pb.PinPrefixResponse(**by_name(self._queries.pin_prefix(prompt, identity, lease)))

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Any) -> pb.UnpinPrefixResponse:
        if not 1 <= len(request.pin_id) <= MAX_PIN_ID_CHARACTERS:
            raise InvalidRequest(
                "pin_id", f"must be from 1 to {MAX_PIN_ID_CHARACTERS} characters, has {len(request.pin_id)}"
            )
        return pb.UnpinPrefixResponse(unpinned_tokens=self._queries.unpin_prefix(request.pin_id))

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, context: Any) -> pb.ResetPrefixCacheResponse:
        reset = self._queries.reset_prefix_cache(request.force)
        if reset is None:
            raise FailedPrecondition("running requests or pins hold blocks: wait for them to end, or use force")
        return pb.ResetPrefixCacheResponse(**by_name(reset))

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        watch = self._queries.watch_events()
        # Runs also when the call is cancelled while a message is being written, where no `finally` here would.
        context.add_done_callback(lambda _: watch.close())
        with_tokens, sequence = not request.omit_token_ids, count(1)
        more = True
        while more:
            # In pieces: the engine plans steps while each piece is on its way.
            blocks = watch.take_snapshot(MAX_EVENTS)
            more = len(blocks) == MAX_EVENTS
            yield pb.WatchEventsResponse(
                sequence=next(sequence),
                snapshot=True,
                events=_stored(blocks, with_tokens),
                more=more,
            )
        while not request.snapshot_only:
            for events, more in _pieces(await watch.take(), with_tokens):
                yield pb.WatchEventsResponse(sequence=next(sequence), events=events, more=more)

    async def _read_prompt(self, request: PromptRequest) -> tuple[list[int], CacheIdentity]:
        """Token ids and cache identity of a request about a prompt. Raises InvalidRequest, Unavailable."""
        served = self._served_model.served()
        model = served.model
        identity = read_cache_controls(request.cache)
        reader = PromptReader(
            served.tokenizer, model.vocab_size, model.max_model_len, f"the context has {model.max_model_len} tokens"
        )
        prompt = await reader.read(request)
        check_media(identity, len(prompt))
        return prompt, identity


def _check_limit(limit: int) -> None:
    if limit > MAX_LIMIT:
        raise InvalidRequest("limit", f"must be from 0 to {MAX_LIMIT}, got {limit}")


def _block_info(view: BlockView) -> pb.BlockInfo:
    if view.ref_count:
        state = pb.BLOCK_STATE_ACTIVE if view.ref_count > view.pins else pb.BLOCK_STATE_PINNED
    else:
        state = pb.BLOCK_STATE_CACHED if view.block_hash else pb.BLOCK_STATE_FREE
    hashes = {"block_hash": view.block_hash.hex(), "parent_hash": view.parent_hash.hex()}
    return pb.BlockInfo(state=state, **by_name(view) | hashes)


def _explanation(block: ExplainedBlock) -> pb.BlockExplanation:
    outcome = pb.BlockOutcome.Value(f"BLOCK_OUTCOME_{block.outcome.name}")
    digest = block.block_hash.hex() if block.block_hash is not None else ""
    return pb.BlockExplanation(**by_name(block) | {"outcome": outcome, "block_hash": digest})


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
