"""The calls of both clients. Each call is written once, as a coroutine; the blocking client runs it at once, the
asyncio client returns it.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, Unpack, cast

from pagekv.client.connection import Connection, for_both
from pagekv.client.errors import InvalidRequest, NotFound
from pagekv.client.generation_types import CacheControls, Chunk, Completion, GenerateOptions, Prompt
from pagekv.client.options import check_known, with_options_of
from pagekv.client.resumable_generation import MOST_SEQUENCES, ResumableGeneration
from pagekv.client.resumable_watch import ResumableWatch
from pagekv.client.running_stream import RunningStream
from pagekv.client.settings import WatchOptions, check_whole
from pagekv.client.types import (
    BlockInfo,
    BlockList,
    BlockState,
    CacheReset,
    EventBatch,
    HealthStatus,
    ModelInfo,
    Pin,
    PinInfo,
    PrefixExplanation,
    PrefixLookup,
    RequestInfo,
    RequestList,
    SequenceBlocks,
    Stats,
    TenantInfo,
)
from pagekv.client.wire import filled, flat, list_blocks_request, prompt_request
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb

# Most entries that the server returns in one answer.
LARGEST_PAGE = 4096


class ClientCalls(Connection):
    @for_both
    @with_options_of(GenerateOptions)
    async def generate(self, prompt: Prompt, *, n: int = 1, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates one continuation of a prompt and returns it whole."""
        check_whole("n", n, 1, MOST_SEQUENCES)
        if n != 1:
            raise InvalidRequest("n", f"must be 1: generate returns one sequence, generate_n several; is {n!r:.80}")
        return (await self._generate_whole(prompt, 1, options))[0]

    @for_both
    async def generate_n(self, prompt: Prompt, n: int, **options: Unpack[GenerateOptions]) -> tuple[Completion, ...]:
        """Generates `n` independent continuations, 1 to 64, by index; with `beam_width` the `n` best, best first.
        Options: those of `generate`.
        """
        return await self._generate_whole(prompt, n, options)

    async def _generate_whole(self, prompt: Prompt, n: int, options: GenerateOptions) -> tuple[Completion, ...]:
        running = self._begin(prompt, n, options, only_complete=True)
        async for _ in running.items():
            pass
        return tuple(running.resumable.completions[index] for index in range(n))

    @for_both
    async def abort(self, *request_ids: str) -> tuple[str, ...]:
        """Ends requests early; their streams finish with "abort". Returns the ids that were live."""
        request = filled(pb.AbortRequest(), request_ids=request_ids)
        return tuple((await self._ask(self._inference.Abort, request)).aborted_request_ids)

    @for_both
    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, encoded exactly as for generation; token ids are returned unchanged."""
        request = prompt_request(pb.TokenizeRequest(), prompt)
        return tuple((await self._ask(self._inference.Tokenize, request)).token_ids)

    @for_both
    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        request = filled(pb.DetokenizeRequest(), token_ids=token_ids)
        return (await self._ask(self._inference.Detokenize, request)).text

    @for_both
    async def model_info(self) -> ModelInfo:
        """The model served and the limits of the deployment."""
        return await self._ask_for(ModelInfo, self._inference.GetModelInfo, pb.GetModelInfoRequest())

    @for_both
    async def stats(self) -> Stats:
        """Counters and gauges of pool, prefix cache and scheduler."""
        return await self._ask_for(Stats, self._operator.GetStats, operator_pb.GetStatsRequest())

    @for_both
    async def lookup_prefix(
        self, prompt: Prompt, *, cache: CacheControls | None = None, adapter: str = ""
    ) -> PrefixLookup:
        """How many leading tokens of a prompt are cached now. Changes nothing."""
        request = prompt_request(cache_pb.LookupPrefixRequest(), prompt, cache, adapter=adapter)
        return await self._ask_for(PrefixLookup, self._cache.LookupPrefix, request)

    @for_both
    async def explain_prefix(
        self,
        prompt: Prompt,
        *,
        cache: CacheControls | None = None,
        adapter: str = "",
        page_size: int | None = None,
        page_token: str = "",
    ) -> PrefixExplanation:
        """Why each block of a prompt hits or misses. Without `page_size` the answer has all blocks, from as many calls
        as needed; with it, one page of 1 to 4096 blocks. Begins with the first block, or at `page_token`, the
        `next_page_token` of the page before.
        """
        request = prompt_request(
            cache_pb.ExplainPrefixRequest(),
            prompt,
            cache,
            adapter=adapter,
            page_size=LARGEST_PAGE if page_size is None else checked_page_size(page_size),
            page_token=page_token,
        )
        page = await self._ask_for(PrefixExplanation, self._cache.ExplainPrefix, request)
        blocks = list(page.blocks)
        while page_size is None and page.next_page_token:
            request.page_token = page.next_page_token
            page = await self._ask_for(PrefixExplanation, self._cache.ExplainPrefix, request)
            blocks += page.blocks
        return replace(page, blocks=tuple(blocks))

    @for_both
    async def pin_prefix(
        self,
        prompt: Prompt,
        lease_seconds: int,
        *,
        pin_id: str = "",
        cache: CacheControls | None = None,
        adapter: str = "",
    ) -> Pin:
        """Keeps what is cached of a prompt from eviction for 1 to 86400 seconds. With the `pin_id` of an earlier pin,
        the call renews that pin, which then keeps the blocks that are cached now. Without a `pin_id` the client
        generates one, so that a call repeated after a lost connection makes no second pin. Raises LimitExceeded; a pin
        that could not be renewed stays as it was.
        """
        request = prompt_request(
            cache_pb.PinPrefixRequest(),
            prompt,
            cache,
            adapter=adapter,
            lease_seconds=lease_seconds,
            pin_id=f"pin-{secrets.token_hex(8)}" if pin_id == "" else pin_id,
        )
        return await self._ask_for(Pin, self._cache.PinPrefix, request)

    @for_both
    async def list_pins(self) -> tuple[PinInfo, ...]:
        """The pins whose lease has not ended, ordered by expiry."""
        answer = await self._ask(self._cache.ListPins, cache_pb.ListPinsRequest())
        return tuple(flat(PinInfo, pin) for pin in answer.pins)

    @for_both
    async def unpin_prefix(self, pin_id: str) -> int:
        """Ends a pin. Returns the number of tokens that it no longer pins, 0 if the pin is unknown or has expired."""
        request = filled(cache_pb.UnpinPrefixRequest(), pin_id=pin_id)
        return (await self._ask(self._cache.UnpinPrefix, request)).unpinned_tokens

    @for_both
    async def list_requests(self, page_size: int = 1000, page_token: str = "") -> RequestList:
        """A page of 1 to 4096 live requests, running requests first. `page_token` is empty for the first page, else the
        `next_page_token` of the page before.
        """
        return await self._request_page(page_size, page_token)

    async def _request_page(self, page_size: int, page_token: str) -> RequestList:
        size = checked_page_size(page_size)
        request = filled(operator_pb.ListRequestsRequest(), page_size=size, page_token=page_token)
        return await self._ask_for(RequestList, self._operator.ListRequests, request)

    def _requests(self) -> AsyncGenerator[RequestInfo]:
        return _entries("requests", partial(self._request_page, LARGEST_PAGE))

    @for_both
    async def list_tenants(self) -> tuple[TenantInfo, ...]:
        """The tenants, ordered by name: limits, current use and counters; empty if callers have no identities."""
        answer = await self._ask(self._operator.ListTenants, operator_pb.ListTenantsRequest())
        return tuple(flat(TenantInfo, tenant) for tenant in answer.tenants)

    @for_both
    async def block_table(self, request_id: str) -> tuple[SequenceBlocks, ...]:
        """The block tables of a live request, one per sequence. Raises NotFound."""
        request = filled(operator_pb.GetBlockTableRequest(), request_id=request_id)
        answer = await self._ask(self._operator.GetBlockTable, request)
        return tuple(flat(SequenceBlocks, sequence) for sequence in answer.sequences)

    @for_both
    async def list_blocks(
        self, state: BlockState | None = None, *, page_size: int = 1000, page_token: str = ""
    ) -> BlockList:
        """A page of 1 to 4096 blocks of the pool, ordered by id, only those in `state` if given. `page_token` is empty
        for the first page, else the `next_page_token` of the page before.
        """
        return await self._block_page(state, page_size, page_token)

    async def _block_page(self, state: BlockState | None, page_size: int, page_token: str) -> BlockList:
        request = list_blocks_request(state, checked_page_size(page_size), page_token)
        return await self._ask_for(BlockList, self._operator.ListBlocks, request)

    def _blocks(self, state: BlockState | None) -> AsyncGenerator[BlockInfo]:
        return _entries("blocks", partial(self._block_page, state, LARGEST_PAGE))

    @for_both
    async def reset_prefix_cache(self, *, force: bool = False) -> CacheReset:
        """Removes every cached prefix. Raises FailedPrecondition while requests or pins hold blocks, unless `force` is
        set: then the requests are preempted and continue by themselves, and the pins end.
        """
        request = filled(operator_pb.ResetPrefixCacheRequest(), force=force)
        return await self._ask_for(CacheReset, self._operator.ResetPrefixCache, request)

    @for_both
    async def health(self, service: str = "") -> HealthStatus:
        """Health of the server, or of one of its services by full name. Raises Unreachable when nothing answers."""
        # Imported here, because few programs ask for health.
        from grpc_health.v1 import health_pb2

        # Not by HealthStub, which crashes the process when it is made on a closed channel (gRPC 1.85).
        check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        request = filled(health_pb2.HealthCheckRequest(), service=service)
        try:
            answer: Any = await self._ask(check, request)
        except NotFound:
            return "service_unknown"
        known = health_pb2.HealthCheckResponse.ServingStatus
        status: Any = known.Name(answer.status).lower() if answer.status in known.values() else "unknown"
        return cast("HealthStatus", status)

    def _begin_watch(self, options: WatchOptions) -> RunningStream[EventBatch, ResumableWatch]:
        """A watch whose call has not been sent yet. Raises TypeError for unknown options."""
        check_known(options, WatchOptions)
        watch = ResumableWatch(**options, resume_timeout=self._settings.resume_timeout)
        return RunningStream(self, watch, partial(self._begin_call, self._operator.WatchEvents))

    def _begin(self, prompt: Prompt, n: int, options: GenerateOptions, *, only_complete: bool = False) -> Generating:
        """A generation whose call has not been sent yet."""
        generation = ResumableGeneration(prompt, n, options, self._settings, only_complete=only_complete)
        return RunningStream(self, generation, partial(self._begin_call, self._inference.Generate))


async def _entries(field: str, ask: Callable[[str], Awaitable[Any]]) -> AsyncGenerator[Any]:
    """The entries of all pages. `ask` returns the page for a page token."""
    page = await ask("")
    while True:
        for entry in getattr(page, field):
            yield entry
        if not page.next_page_token:
            return
        page = await ask(page.next_page_token)


def checked_page_size(size: int) -> int:
    """The size. Raises InvalidRequest unless it is 1 to LARGEST_PAGE: nobody means 0, the server's default."""
    check_whole("page_size", size, 1, LARGEST_PAGE)
    return size


Generating: TypeAlias = RunningStream[Chunk, ResumableGeneration]


class StreamState:
    """The results of the generation behind a stream, for both clients."""

    _running: Generating

    @property
    def request_id(self) -> str:
        """The request's id, for `abort` and `block_table`."""
        return self._running.resumable.request_id

    @property
    def completions(self) -> dict[int, Completion]:
        """The sequences that have ended so far, by index."""
        return dict(self._running.resumable.completions)

    @property
    def completion(self) -> Completion:
        """The finished sequence of a stream with one sequence. Raises RuntimeError before the stream has ended, and
        also if it was closed early or an error ended it.
        """
        if 0 not in self.completions:
            if self._running.was_ended:
                raise RuntimeError("the stream was closed before it ended: there is no completion")
            raise RuntimeError("there is no completion: the stream has not ended yet, or an error ended it")
        return self.completions[0]
