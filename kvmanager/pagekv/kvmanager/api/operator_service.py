"""pagekv.v1.OperatorService: pool, requests and prefix tables of all callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from pagekv.common.errors import FailedPrecondition, InvalidRequest, NotFound
from pagekv.common.turns import let_others_run
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.api.validation import check_request_id
from pagekv.kvmanager.api.watch_call import check_watch, open_watch, watch_messages
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.paging import BLOCKS_AT_ONCE, page_in_slices, read_page_size
from pagekv.v1 import operator_service_pb2 as pb
from pagekv.v1 import operator_service_pb2_grpc as pb_grpc


class OperatorService(pb_grpc.OperatorServiceServicer):
    """Every answer is a snapshot between two steps; a long list is made in slices, each a snapshot of its own. Errors
    are raised as `PageKVError`.
    """

    def __init__(self, engine: EngineLoop, served_model: ServedModel) -> None:
        self._queries, self._snapshots, self._statistics = engine.queries, engine.snapshots, engine.statistics
        self._served_model = served_model
        # Held by a watch while it copies the tables or makes a piece of its snapshot.
        self._snapshot_turns = asyncio.Lock()

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        return self._statistics.stats()

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        return await self._snapshots.list_requests_in_slices(read_page_size(request.page_size), request.page_token)

    async def GetBlockTable(self, request: pb.GetBlockTableRequest, context: Any) -> pb.GetBlockTableResponse:
        check_request_id("request_id", request.request_id)
        tables = await self._snapshots.block_tables(request.request_id)
        if tables is None:
            raise NotFound(f"no request {request.request_id!r} is running or waiting", "request", request.request_id)
        return tables

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Any) -> pb.ListBlocksResponse:
        page_size = read_page_size(request.page_size)
        if request.state not in pb.BlockState.values():
            raise InvalidRequest("state", f"must be from 0 to {max(pb.BlockState.values())}, got {request.state}")
        answer = await page_in_slices(
            lambda size, token: self._snapshots.list_blocks(size, token, request.state), page_size, request.page_token
        )
        if len(answer.blocks) > BLOCKS_AT_ONCE:
            await asyncio.sleep(0)  # serialising the answer takes as long as a slice
        return answer

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, context: Any) -> pb.ResetPrefixCacheResponse:
        reset = self._queries.reset_prefix_cache(request.force)
        if reset is None:
            held = (
                "running requests or pins hold blocks: wait for them to end, or set force (pagekv reset-cache --force)"
            )
            raise FailedPrecondition(held, "BLOCKS_HELD", "prefix cache")
        return reset

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        instance_id = self._queries.instance_id
        check_watch(request, instance_id)
        account = self._served_model.asking().account
        async with self._snapshot_turns:
            watch = open_watch(self._queries, account, context, request.start_revision)
            await let_others_run()
        async for message in watch_messages(request, watch, instance_id, self._snapshot_turns):
            yield message

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Any) -> pb.ListTenantsResponse:
        return await self._snapshots.list_tenants()
