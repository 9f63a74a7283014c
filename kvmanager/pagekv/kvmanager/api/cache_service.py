"""pagekv.v1.CacheService: lookups of prompts in the prefix cache, and pins."""

from __future__ import annotations

from typing import Any

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.access.caller import sees_all, tenant_in_reach
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.api.validation import check_request_id, read_lookup
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.paging import read_page_size
from pagekv.kvmanager.kvcache.pins import MAX_LEASE_S, MIN_LEASE_S
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import cache_service_pb2_grpc as pb_grpc


class CacheService(pb_grpc.CacheServiceServicer):
    """Every answer is a snapshot between two steps. Errors are raised as `PageKVError`.

    Block ids and step counts depend on other tenants' requests, so answers to a tenant leave them out.
    """

    def __init__(self, engine: EngineLoop, served_model: ServedModel) -> None:
        self._queries = engine.queries
        self._served_model = served_model

    async def LookupPrefix(self, request: pb.LookupPrefixRequest, context: Any) -> pb.LookupPrefixResponse:
        served = self._served_model.served()
        prompt, identity = await read_lookup(request, served)
        prepared = await self._queries.prepare(prompt, identity, served.asking.tenant.name)
        answer = self._queries.lookup_prefix(prompt, identity, prepared)
        if not sees_all():
            del answer.block_ids[:]
        return answer

    async def ExplainPrefix(self, request: pb.ExplainPrefixRequest, context: Any) -> pb.ExplainPrefixResponse:
        page_size = read_page_size(request.page_size)
        served = self._served_model.served()
        prompt, identity = await read_lookup(request, served)
        prepared = await self._queries.prepare(prompt, identity, served.asking.tenant.name)
        return await self._queries.explain_prefix(
            prompt, identity, page_size, request.page_token, prepared, numbers=sees_all()
        )

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Any) -> pb.PinPrefixResponse:
        lease = request.lease_seconds
        if not MIN_LEASE_S <= lease <= MAX_LEASE_S:
            raise InvalidRequest("lease_seconds", f"must be from {MIN_LEASE_S} to {MAX_LEASE_S}, got {lease}")
        if request.pin_id:
            check_request_id("pin_id", request.pin_id)
        served = self._served_model.served()
        asking = served.asking
        prompt, identity = await read_lookup(request, served)
        prepared = await self._queries.prepare(prompt, identity, asking.tenant.name)
        return self._queries.pin_prefix(
            prompt, identity, lease, request.pin_id, prepared, account=asking.account, tenant=asking.tenant.name
        )

    async def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        return self._queries.cache.list_pins(tenant_in_reach())

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Any) -> pb.UnpinPrefixResponse:
        check_request_id("pin_id", request.pin_id)
        return pb.UnpinPrefixResponse(unpinned_tokens=self._queries.cache.unpin(request.pin_id, tenant_in_reach()))
