"""pagekv.v1.CacheService: looking into the KV cache. Hashes cross the wire in hex, for people to read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, NoReturn

from pagekv.common.errors import FailedPrecondition, InvalidRequest, NotFound, NotImplementedYet
from pagekv.kvmanager.engine import BlockView, Engine
from pagekv.kvmanager.prompt_input import PromptReader
from pagekv.kvmanager.serving_state import ServingState
from pagekv.kvmanager.validation import check_media, check_request_id, read_cache_controls
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import cache_service_pb2_grpc as pb_grpc

DEFAULT_LIMIT = 100
MAX_LIMIT = 10_000
_STATES = {
    pb.BLOCK_STATE_UNSPECIFIED: None,
    pb.BLOCK_STATE_FREE: "free",
    pb.BLOCK_STATE_CACHED: "cached",
    pb.BLOCK_STATE_ACTIVE: "active",
}


class CacheService(pb_grpc.CacheServiceServicer):
    """Every answer is a snapshot between two steps. Errors are raised as `PageKVError`."""

    def __init__(self, engine: Engine, state: ServingState) -> None:
        self._engine = engine
        self._state = state

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(**asdict(self._engine.stats()))

    async def LookupPrefix(self, request: pb.LookupPrefixRequest, context: Any) -> pb.LookupPrefixResponse:
        served = self._state.served()
        model = served.model
        identity = read_cache_controls(request.cache)
        reader = PromptReader(
            served.tokenizer, model.vocab_size, model.max_model_len, f"the context has {model.max_model_len} tokens"
        )
        prompt = await reader.read(request)
        check_media(identity, len(prompt))
        match = self._engine.lookup_prefix(prompt, identity)
        return pb.LookupPrefixResponse(
            prompt_tokens=len(prompt),
            device_tokens=match.device_tokens,
            host_tokens=match.host_tokens,
            block_ids=match.block_ids,
            partial_tokens=match.partial_tokens,
        )

    async def ExplainPrefix(self, request: pb.ExplainPrefixRequest, context: Any) -> pb.ExplainPrefixResponse:
        _not_yet("ExplainPrefix")

    async def GetBlockTable(self, request: pb.GetBlockTableRequest, context: Any) -> pb.GetBlockTableResponse:
        check_request_id("request_id", request.request_id)
        views = self._engine.block_tables(request.request_id)
        if views is None:
            raise NotFound(f"no request {request.request_id!r} is running or waiting")
        return pb.GetBlockTableResponse(
            sequences=[
                pb.SequenceBlocks(
                    index=view.index,
                    state=view.state,
                    num_tokens=view.num_tokens,
                    computed_tokens=view.computed_tokens,
                    block_ids=view.block_ids,
                    block_hashes=[digest.hex() for digest in view.block_hashes],
                )
                for view in views
            ]
        )

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Any) -> pb.ListBlocksResponse:
        num_blocks = self._state.served().model.num_device_blocks
        if request.start >= num_blocks:
            raise InvalidRequest("start", f"must be from 0 to {num_blocks - 1} (the pool), got {request.start}")
        if request.limit > MAX_LIMIT:
            raise InvalidRequest("limit", f"must be from 0 to {MAX_LIMIT}, got {request.limit}")
        if request.state not in _STATES:
            raise InvalidRequest("state", f"must be from 0 to {len(_STATES) - 1}, got {request.state}")
        blocks, next_start = self._engine.list_blocks(
            request.start, request.limit or DEFAULT_LIMIT, _STATES[request.state]
        )
        return pb.ListBlocksResponse(blocks=map(_block_info, blocks), next_start=next_start)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Any) -> pb.PinPrefixResponse:
        _not_yet("PinPrefix")

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Any) -> pb.UnpinPrefixResponse:
        _not_yet("UnpinPrefix")

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, context: Any) -> pb.ResetPrefixCacheResponse:
        if request.force:
            _not_yet("ResetPrefixCache with force")
        removed = self._engine.reset_prefix_cache()
        if removed is None:
            raise FailedPrecondition("running requests hold blocks: wait for them to end, or abort them first")
        return pb.ResetPrefixCacheResponse(removed_blocks=removed)

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        _not_yet("WatchEvents")
        yield pb.WatchEventsResponse()  # never reached; makes this a stream, as the contract has it


def _not_yet(what: str) -> NoReturn:
    raise NotImplementedYet(f"{what} is part of the contract and not served by this version")


def _block_info(view: BlockView) -> pb.BlockInfo:
    state = (
        pb.BLOCK_STATE_ACTIVE if view.ref_count else pb.BLOCK_STATE_CACHED if view.block_hash else pb.BLOCK_STATE_FREE
    )
    return pb.BlockInfo(
        block_id=view.block_id,
        ref_count=view.ref_count,
        state=state,
        block_hash=view.block_hash.hex(),
        parent_hash=view.parent_hash.hex(),
    )
