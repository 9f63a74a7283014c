"""pagekv.v1.CacheService: what is cached of a prompt, and pins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.api.paging import check_limit, check_start
from pagekv.kvmanager.api.prompt_reader import PromptReader
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.api.validation import check_length, check_media, read_cache_controls
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.pins import MAX_LEASE_S, MIN_LEASE_S
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import cache_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from pagekv.kvmanager.api.prompt_reader import PromptRequest

DEFAULT_EXPLANATIONS = 1000
MAX_PIN_ID_CHARACTERS = 64


class CacheService(pb_grpc.CacheServiceServicer):
    """Every answer is a snapshot between two steps. Errors are raised as `PageKVError`."""

    def __init__(self, engine: EngineLoop, served_model: ServedModel) -> None:
        self._queries = engine.queries
        self._served_model = served_model

    async def LookupPrefix(self, request: pb.LookupPrefixRequest, context: Any) -> pb.LookupPrefixResponse:
        prompt, identity = await self._read_prompt(request)
        return self._queries.lookup_prefix(prompt, identity)

    async def ExplainPrefix(self, request: pb.ExplainPrefixRequest, context: Any) -> pb.ExplainPrefixResponse:
        check_limit(request.limit)
        prompt, identity = await self._read_prompt(request)
        num_blocks = -(-len(prompt) // self._served_model.served().model.block_size)
        check_start(request.start, num_blocks, "prompt")
        return self._queries.explain_prefix(prompt, identity, request.start, request.limit or DEFAULT_EXPLANATIONS)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Any) -> pb.PinPrefixResponse:
        lease = request.lease_seconds
        if not MIN_LEASE_S <= lease <= MAX_LEASE_S:
            raise InvalidRequest("lease_seconds", f"must be from {MIN_LEASE_S} to {MAX_LEASE_S}, got {lease}")
        prompt, identity = await self._read_prompt(request)
        return self._queries.pin_prefix(prompt, identity, lease)

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Any) -> pb.UnpinPrefixResponse:
        check_length("pin_id", request.pin_id, MAX_PIN_ID_CHARACTERS)
        return pb.UnpinPrefixResponse(unpinned_tokens=self._queries.unpin_prefix(request.pin_id))

    async def _read_prompt(self, request: PromptRequest) -> tuple[list[int], CacheIdentity]:
        """Token ids and cache identity of a request about a prompt. Raises InvalidRequest, Unavailable."""
        served = self._served_model.served()
        identity, most = read_cache_controls(request.cache), served.model.max_model_len
        reader = PromptReader(served.tokenizer, served.model.vocab_size, most, f"the context has {most} tokens")
        prompt = await reader.read(request)
        check_media(identity, len(prompt))
        return prompt, identity
