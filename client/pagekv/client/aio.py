"""The asyncio client: `pagekv.client.client` method for method; see there for what each raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekv.client import wire
from pagekv.client.channel import DEFAULT_RESUME_TIMEOUT_S, DEFAULT_TARGET, DEFAULT_TIMEOUT_S, channel_options
from pagekv.client.errors import NotFound, from_rpc_error
from pagekv.client.resumable_generation import ResumableGeneration
from pagekv.client.types import (
    BlockList,
    BlockState,
    CacheControls,
    CacheReset,
    Chunk,
    Completion,
    EventBatch,
    GenerateOptions,
    HealthStatus,
    ModelInfo,
    Pin,
    PrefixExplanation,
    PrefixLookup,
    Prompt,
    RequestList,
    SequenceBlocks,
    Stats,
)
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import cache_service_pb2_grpc, inference_service_pb2_grpc
from pagekv.v1 import inference_service_pb2 as pb

if TYPE_CHECKING:
    # These classes exist in the stubs' type files only: at run time one stub class serves both kinds of channel.
    from pagekv.v1.cache_service_pb2_grpc import CacheServiceAsyncStub
    from pagekv.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

Response = TypeVar("Response")


class AsyncPageKVClient:
    """A connection to a PageKV manager, for one event loop. Close it, or use it in an `async with` statement.

    Cancelling a task that generates aborts its request. Errors as those of `PageKVClient`.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S,
    ) -> None:
        """As `PageKVClient`. Make it where its event loop runs."""
        self.target = target
        self._timeout = timeout
        self._resume_timeout_s = resume_timeout_s
        self._channel = grpc.aio.insecure_channel(target, options=channel_options(target))
        inference: object = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        cache: object = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        self._inference = cast("InferenceServiceAsyncStub", inference)
        self._cache = cast("CacheServiceAsyncStub", cache)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; calls still running are cancelled. Idempotent."""
        await self._channel.close()

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates one continuation of a prompt and returns it whole. Options: see GenerateOptions."""
        return (await self._complete(prompt, 1, options))[0]

    async def generate_n(self, prompt: Prompt, n: int, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Generates `n` independent continuations, 1 to 64, by index; with `beam_width` the `n` best, best first."""
        return await self._complete(prompt, n, options)

    def stream(self, prompt: Prompt, *, n: int = 1, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Generates and yields chunks as they arrive. Closing the stream, or cancelling its task, aborts the request.

        The call starts with the first chunk asked for. A broken connection is resumed as in `PageKVClient.stream`.
        """
        generation = ResumableGeneration(prompt, n, options, default_resume_timeout_s=self._resume_timeout_s)
        return AsyncStream(generation, self._chunks(generation))

    async def abort(self, *request_ids: str) -> list[str]:
        """Ends requests early; their streams finish with "abort". Returns the ids that were live."""
        return list((await self._call(self._inference.Abort, pb.AbortRequest(request_ids=request_ids))).aborted)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a text or conversation, exactly as generating would encode it."""
        return list((await self._call(self._inference.Tokenize, wire.tokenize_request(prompt))).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return (await self._call(self._inference.Detokenize, wire.detokenize_request(token_ids))).text

    async def model_info(self) -> ModelInfo:
        """The model served and the limits of the deployment."""
        return wire.flat(ModelInfo, await self._call(self._inference.GetModelInfo, pb.GetModelInfoRequest()))

    async def stats(self) -> Stats:
        """Counters and gauges of pool, prefix cache and scheduler."""
        return wire.flat(Stats, await self._call(self._cache.GetStats, cache_pb.GetStatsRequest()))

    async def lookup_prefix(self, prompt: Prompt, *, cache: CacheControls | None = None) -> PrefixLookup:
        """How many leading tokens of a prompt are cached now. Changes nothing."""
        return wire.flat(PrefixLookup, await self._call(self._cache.LookupPrefix, wire.lookup_request(prompt, cache)))

    async def explain_prefix(
        self, prompt: Prompt, *, cache: CacheControls | None = None, start: int = 0, limit: int = 1000
    ) -> PrefixExplanation:
        """Why each block of a prompt hits or misses, from block `start` on, `limit` (1 to 10000) at most."""
        request = wire.explain_request(prompt, cache, start, limit)
        return wire.explanation(await self._call(self._cache.ExplainPrefix, request))

    async def pin_prefix(self, prompt: Prompt, lease_seconds: int, *, cache: CacheControls | None = None) -> Pin:
        """Keeps what is cached of a prompt from eviction for 1 to 86400 seconds. Raises LimitExceeded."""
        return wire.flat(Pin, await self._call(self._cache.PinPrefix, wire.pin_request(prompt, cache, lease_seconds)))

    async def unpin_prefix(self, pin_id: str) -> int:
        """Ends a pin; tokens no longer pinned by it, 0 when it was unknown or had expired."""
        request = cache_pb.UnpinPrefixRequest(pin_id=pin_id)
        return (await self._call(self._cache.UnpinPrefix, request)).unpinned_tokens

    async def list_requests(self, limit: int = 100) -> RequestList:
        """Up to `limit` (1 to 10000) live requests, those that run first."""
        return wire.request_list(await self._call(self._cache.ListRequests, wire.list_requests_request(limit)))

    async def block_table(self, request_id: str) -> list[SequenceBlocks]:
        """The block tables of a live request, one per sequence. Raises NotFound."""
        response = await self._call(self._cache.GetBlockTable, cache_pb.GetBlockTableRequest(request_id=request_id))
        return [wire.flat(SequenceBlocks, sequence) for sequence in response.sequences]

    async def list_blocks(self, start: int = 0, limit: int = 100, state: BlockState | None = None) -> BlockList:
        """Blocks of the pool by id from `start`, `limit` (1 to 10000) at most, only those in `state` if given."""
        request = wire.list_blocks_request(start, limit, state)
        return wire.block_list(await self._call(self._cache.ListBlocks, request))

    async def reset_prefix_cache(self, *, force: bool = False) -> CacheReset:
        """Forgets every cached prefix. While requests or pins hold blocks it raises FailedPrecondition, unless `force`
        preempts the requests, which go on by themselves, and ends the pins.
        """
        request = cache_pb.ResetPrefixCacheRequest(force=force)
        return wire.flat(CacheReset, await self._call(self._cache.ResetPrefixCache, request))

    async def watch_events(self, *, token_ids: bool = True, snapshot_only: bool = False) -> AsyncGenerator[EventBatch]:
        """The prefix table as it changes: a snapshot, then a batch at every step border with changes.

        `TableReplica` applies them. Goes on until it is closed, unless `snapshot_only`. Raises FellBehind when the
        batches are taken too slowly, and does not reconnect: another server has another table.
        """
        request = cache_pb.WatchEventsRequest(omit_token_ids=not token_ids, snapshot_only=snapshot_only)
        call = self._cache.WatchEvents(request)
        try:
            async for response in call:
                yield wire.event_batch(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
        finally:
            call.cancel()

    async def health(self, service: str = "") -> HealthStatus:
        """Health of the server, or of one of its services by full name. Raises Unreachable when nothing answers."""
        try:
            response = await self._call(self._health.Check, health_pb2.HealthCheckRequest(service=service))
        except NotFound:
            return "SERVICE_UNKNOWN"
        status: HealthStatus = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        return status

    async def _call(self, method: Callable[..., Awaitable[Response]], request: Any) -> Response:
        try:
            return await method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error

    async def _complete(self, prompt: Prompt, n: int, options: GenerateOptions) -> list[Completion]:
        generation = ResumableGeneration(
            prompt, n, options, default_resume_timeout_s=self._resume_timeout_s, only_complete=True
        )
        async for _ in self._chunks(generation):
            pass
        return [generation.completions[index] for index in range(n)]

    async def _chunks(self, generation: ResumableGeneration) -> AsyncGenerator[Chunk]:
        while not generation.done:
            try:
                await self._prepare(generation)
                call = self._inference.Generate(generation.request(), timeout=generation.remaining_s())
                try:
                    async for response in call:
                        chunk = generation.take(response)
                        if chunk is not None:
                            yield chunk
                finally:
                    # Aborts the request when the caller gave up; no effect on a call that has ended.
                    call.cancel()
                generation.ended()
            except grpc.RpcError as error:
                if not generation.done:
                    await asyncio.sleep(generation.failed(from_rpc_error(error, self.target)))

    async def _prepare(self, generation: ResumableGeneration) -> None:
        request = generation.prompt_to_encode()
        if request is not None:
            encoded = await self._inference.Tokenize(request, timeout=self._unary_timeout(generation))
            info = await self._inference.GetModelInfo(pb.GetModelInfoRequest(), timeout=self._unary_timeout(generation))
            generation.prompt_encoded(list(encoded.token_ids), wire.flat(ModelInfo, info).longest_sequence)

    def _unary_timeout(self, generation: ResumableGeneration) -> float | None:
        limits = [limit for limit in (self._timeout, generation.remaining_s()) if limit is not None]
        return min(limits, default=None)


class AsyncStream(AsyncIterator[Chunk]):
    """Chunks of a running generation; at the end `completion` has the whole. Use it in `async with`, or close it.

    States: open → ended (every chunk was taken, or an error was raised) or closed (the request is aborted).
    """

    def __init__(self, generation: ResumableGeneration, chunks: AsyncGenerator[Chunk]) -> None:
        self._generation = generation
        self._chunks = chunks

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Aborts the request unless it has ended. Idempotent."""
        await self._chunks.aclose()

    @property
    def request_id(self) -> str:
        """The request's id, for `abort` and `block_table`."""
        return self._generation.request_id

    @property
    def completions(self) -> dict[int, Completion]:
        """The sequences that have ended so far, by index."""
        return dict(self._generation.completions)

    @property
    def completion(self) -> Completion:
        """The finished sequence of an ended stream of one. Raises RuntimeError while it is not there."""
        if 0 not in self._generation.completions:
            raise RuntimeError("the stream has not ended: its completion is not there yet")
        return self._generation.completions[0]
