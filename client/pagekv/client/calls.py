"""Both clients but for their way of waiting: each call is written once, as a coroutine that each client carries out."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekv.client.channel import DEFAULT_RESUME_TIMEOUT_S, DEFAULT_TARGET, DEFAULT_TIMEOUT_S, channel_options
from pagekv.client.errors import NotFound, from_rpc_error
from pagekv.client.resumable_generation import ResumableGeneration
from pagekv.client.resumable_watch import ResumableWatch
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
    PinInfo,
    PrefixExplanation,
    PrefixLookup,
    Prompt,
    RequestList,
    SequenceBlocks,
    Stats,
)
from pagekv.client.wire import filled, flat, list_blocks_request, prompt_request
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import cache_service_pb2_grpc, inference_service_pb2_grpc, operator_service_pb2_grpc
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from pagekv.client.aio import AsyncPageKVClient
    from pagekv.client.client import PageKVClient

P = ParamSpec("P")
Request = TypeVar("Request")
Answer = TypeVar("Answer")
Result = TypeVar("Result")
Values = TypeVar("Values", bound="DataclassInstance")
ResultOut = TypeVar("ResultOut", covariant=True)


class ClientMethod(Protocol[P, ResultOut]):
    """How type checkers see a method made by `for_both`."""

    @overload
    def __get__(self, client: PageKVClient, owner: Any = None) -> Callable[P, ResultOut]: ...
    @overload
    def __get__(self, client: AsyncPageKVClient, owner: Any = None) -> Callable[P, Coroutine[Any, Any, ResultOut]]: ...


def for_both(make: Callable[Concatenate[Any, P], Coroutine[Any, Any, Result]]) -> ClientMethod[P, Result]:
    """Makes a method that carries a coroutine out: at once in the blocking client, awaited in the asyncio one."""

    @wraps(make)
    def method(client: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return client._carry_out(make(client, *args, **kwargs))

    return cast("ClientMethod[P, Result]", method)


class ClientCalls:
    """The part that both clients share. A client says how it connects, sleeps, waits, and carries a coroutine out."""

    _connect: ClassVar[staticmethod[..., Any]]
    # The result is waited for too.
    _sleep: ClassVar[staticmethod[[float], Any]]

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S,
    ) -> None:
        """`target` is host:port or unix:/path. `timeout`: seconds for each call but generating ones, None for no limit.

        `resume_timeout_s`: how long a generation whose connection broke goes on trying to reach the server again; 0
        raises ConnectionLost at once. Nothing is connected before the first call. An asyncio client is made where its
        event loop runs.
        """
        self.target = target
        self._timeout = timeout
        self._resume_timeout_s = resume_timeout_s
        self._channel = self._connect(target, options=channel_options(target))
        # At run time one stub class serves both kinds of channel.
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._cache = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        self._operator = operator_service_pb2_grpc.OperatorServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def _carry_out(self, steps: Coroutine[Any, Any, Any]) -> Any:
        raise NotImplementedError

    async def _wait_for(self, begun: Any) -> Any:
        """The result of what a stub or `_sleep` returned."""
        raise NotImplementedError

    def _messages(self, call: Any) -> AsyncIterator[Any]:
        """The messages of a stream."""
        raise NotImplementedError

    async def _ask(self, method: grpc.UnaryUnaryMultiCallable[Request, Answer], request: Request) -> Answer:
        try:
            answer: Answer = await self._wait_for(method(request, timeout=self._timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
        return answer

    async def _ask_for(
        self, cls: type[Values], method: grpc.UnaryUnaryMultiCallable[Request, Any], request: Request
    ) -> Values:
        """The answer as a dataclass."""
        return flat(cls, await self._ask(method, request))

    @for_both
    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates one continuation of a prompt and returns it whole. Options: see GenerateOptions."""
        return (await self._generate_whole(prompt, 1, options))[0]

    @for_both
    async def generate_n(self, prompt: Prompt, n: int, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Generates `n` independent continuations, 1 to 64, by index; with `beam_width` the `n` best, best first."""
        return await self._generate_whole(prompt, n, options)

    async def _generate_whole(self, prompt: Prompt, n: int, options: GenerateOptions) -> list[Completion]:
        generation = self._generation(prompt, n, options, only_complete=True)
        async for _ in self._chunks(generation):
            pass
        return [generation.completions[index] for index in range(n)]

    @for_both
    async def abort(self, *request_ids: str) -> list[str]:
        """Ends requests early; their streams finish with "abort". Returns the ids that were live."""
        return list(
            (await self._ask(self._inference.Abort, pb.AbortRequest(request_ids=request_ids))).aborted_request_ids
        )

    @for_both
    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, exactly as generating would encode it; ids come back as they are."""
        request = prompt_request(pb.TokenizeRequest(), prompt)
        return list((await self._ask(self._inference.Tokenize, request)).token_ids)

    @for_both
    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
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
        page_size: int = 1000,
        page_token: str = "",
    ) -> PrefixExplanation:
        """Why each block of a prompt hits or misses, a page of 1 to 10000 blocks: the first one, or the one that
        `next_page_token` of the page before names.
        """
        request = prompt_request(
            cache_pb.ExplainPrefixRequest(), prompt, cache, adapter=adapter, page_size=page_size, page_token=page_token
        )
        return await self._ask_for(PrefixExplanation, self._cache.ExplainPrefix, request)

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
        """Keeps what is cached of a prompt from eviction for 1 to 86400 seconds. The `pin_id` of an earlier pin renews
        that one, which then keeps what is cached now; without one the client makes a new one, so that a call repeated
        after a lost connection makes no second pin. Raises LimitExceeded; a pin that could not be renewed stays.
        """
        request = prompt_request(
            cache_pb.PinPrefixRequest(pin_id=pin_id or f"pin-{secrets.token_hex(8)}"),
            prompt,
            cache,
            adapter=adapter,
            lease_seconds=lease_seconds,
        )
        return await self._ask_for(Pin, self._cache.PinPrefix, request)

    @for_both
    async def list_pins(self) -> list[PinInfo]:
        """The pins whose lease runs, the one that expires first standing first."""
        answer = await self._ask(self._cache.ListPins, cache_pb.ListPinsRequest())
        return [flat(PinInfo, pin) for pin in answer.pins]

    @for_both
    async def unpin_prefix(self, pin_id: str) -> int:
        """Ends a pin; tokens no longer pinned by it, 0 when it was unknown or had expired."""
        request = cache_pb.UnpinPrefixRequest(pin_id=pin_id)
        return (await self._ask(self._cache.UnpinPrefix, request)).unpinned_tokens

    @for_both
    async def list_requests(self, page_size: int = 1000, page_token: str = "") -> RequestList:
        """A page of 1 to 10000 live requests, those that run first: the first one, or the one that `next_page_token`
        of the page before names.
        """
        request = filled(operator_pb.ListRequestsRequest(), page_size=page_size, page_token=page_token)
        return await self._ask_for(RequestList, self._operator.ListRequests, request)

    @for_both
    async def block_table(self, request_id: str) -> list[SequenceBlocks]:
        """The block tables of a live request, one per sequence. Raises NotFound."""
        request = operator_pb.GetBlockTableRequest(request_id=request_id)
        answer = await self._ask(self._operator.GetBlockTable, request)
        return [flat(SequenceBlocks, sequence) for sequence in answer.sequences]

    @for_both
    async def list_blocks(
        self, state: BlockState | None = None, *, page_size: int = 1000, page_token: str = ""
    ) -> BlockList:
        """A page of 1 to 10000 blocks of the pool by id, only those in `state` if given: the first one, or the one
        that `next_page_token` of the page before names.
        """
        request = list_blocks_request(state, page_size, page_token)
        return await self._ask_for(BlockList, self._operator.ListBlocks, request)

    @for_both
    async def reset_prefix_cache(self, *, force: bool = False) -> CacheReset:
        """Removes every cached prefix. While requests or pins hold blocks it raises FailedPrecondition, unless
        `force` preempts the requests, which go on by themselves, and ends the pins.
        """
        request = operator_pb.ResetPrefixCacheRequest(force=force)
        return await self._ask_for(CacheReset, self._operator.ResetPrefixCache, request)

    @for_both
    async def health(self, service: str = "") -> HealthStatus:
        """Health of the server, or of one of its services by full name. Raises Unreachable when nothing answers."""
        try:
            answer: Any = await self._ask(self._health.Check, health_pb2.HealthCheckRequest(service=service))
        except NotFound:
            return "SERVICE_UNKNOWN"
        known = health_pb2.HealthCheckResponse.ServingStatus
        status: HealthStatus = known.Name(answer.status) if answer.status in known.values() else "UNKNOWN"
        return status

    def _watch(self, **wishes: Any) -> AsyncGenerator[EventBatch]:
        return self._events(ResumableWatch(**wishes, resume_timeout_s=self._resume_timeout_s))

    async def _events(self, watch: ResumableWatch) -> AsyncGenerator[EventBatch]:
        while True:
            call = self._operator.WatchEvents(watch.request())
            try:
                async for response in self._messages(call):
                    for batch in watch.take(response):
                        yield batch
                return
            except grpc.RpcError as error:
                pause_s = watch.failed(from_rpc_error(error, self.target))
            finally:
                call.cancel()
            await self._wait_for(self._sleep(pause_s))

    def _generation(
        self, prompt: Prompt, n: int, options: GenerateOptions, *, only_complete: bool = False
    ) -> ResumableGeneration:
        return ResumableGeneration(
            prompt, n, options, default_resume_timeout_s=self._resume_timeout_s, only_complete=only_complete
        )

    async def _chunks(self, generation: ResumableGeneration) -> AsyncGenerator[Chunk]:
        while not generation.done:
            try:
                call = self._inference.Generate(generation.request(), timeout=generation.remaining_s())
                try:
                    async for response in self._messages(call):
                        chunk = generation.take(response)
                        if chunk is not None:
                            yield chunk
                finally:
                    # Aborts the request when the caller gave up; no effect on a call that has ended.
                    call.cancel()
                generation.ended()
            except grpc.RpcError as error:
                if not generation.done:
                    pause_s = generation.failed(from_rpc_error(error, self.target))
                    await self._wait_for(self._sleep(pause_s))


class StreamState:
    """The part that both streams share: results of the generation that they carry."""

    def __init__(self, generation: ResumableGeneration, chunks: Any) -> None:
        self._generation, self._chunks = generation, chunks

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
        """The finished sequence of an ended stream of one. Raises RuntimeError while the stream has not ended."""
        if 0 not in self._generation.completions:
            raise RuntimeError("the stream has not ended: its completion is not there yet")
        return self._generation.completions[0]
