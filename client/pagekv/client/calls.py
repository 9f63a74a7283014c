"""Every call with one answer, written once for both clients: the request, and how the answer is read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekv.client import wire
from pagekv.client.resumable_generation import ResumableGeneration
from pagekv.client.types import (
    BlockList,
    BlockState,
    CacheControls,
    CacheReset,
    Completion,
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
    from pagekv.client.aio import AsyncPageKVClient
    from pagekv.client.client import PageKVClient

P = ParamSpec("P")
Request = TypeVar("Request")
Answer = TypeVar("Answer")
Result = TypeVar("Result")
ResultOut = TypeVar("ResultOut", covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """One call: the stub's method, the request, and the function from answer to result.

    A method of `ClientCalls` that is annotated with Call[T] returns T from the blocking client, and is awaited for T
    from the asyncio one.
    """

    method: Callable[..., Any]
    request: Any
    read: Callable[[Any], Result]
    # The result where the server answers NOT_FOUND; None: NotFound is raised.
    if_not_found: Result | None = None


class UnaryMethod(Protocol[P, ResultOut]):
    """How type checkers see a method made by `unary`."""

    @overload
    def __get__(self, client: PageKVClient, owner: Any = None) -> Callable[P, ResultOut]: ...
    @overload
    def __get__(self, client: AsyncPageKVClient, owner: Any = None) -> Callable[P, Coroutine[Any, Any, ResultOut]]: ...


def unary(make: Callable[Concatenate[Any, P], Call[Result]]) -> UnaryMethod[P, Result]:
    """Makes a method that carries out the Call of `make`: at once, or as a coroutine of the asyncio client."""

    @wraps(make)
    def method(client: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return client._call(make(client, *args, **kwargs))

    # For help(), which shows the result as type checkers do.
    make.__annotations__["return"] = str(make.__annotations__["return"]).removeprefix("Call[").removesuffix("]")
    return cast("UnaryMethod[P, Result]", method)


def _call(
    method: grpc.UnaryUnaryMultiCallable[Request, Answer], request: Request, read: Callable[[Answer], Result]
) -> Call[Result]:
    return Call(method, request, read)


class ClientCalls:
    """The part that both clients share: the stubs of one channel, the time limits, and the calls with one answer."""

    def __init__(self, target: str, channel: Any, timeout: float | None, resume_timeout_s: float) -> None:
        self.target = target
        self._timeout = timeout
        self._resume_timeout_s = resume_timeout_s
        # At run time one stub class serves both kinds of channel.
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(channel)
        self._cache = cache_service_pb2_grpc.CacheServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    @unary
    def abort(self, *request_ids: str) -> Call[list[str]]:
        """Ends requests early; their streams finish with "abort". Returns the ids that were live."""
        request = pb.AbortRequest(request_ids=request_ids)
        return _call(self._inference.Abort, request, lambda answer: list(answer.aborted))

    @unary
    def tokenize(self, prompt: Prompt) -> Call[list[int]]:
        """Token ids of a text or conversation, exactly as generating would encode it."""
        request = wire.prompt_request(pb.TokenizeRequest(), prompt)
        return _call(self._inference.Tokenize, request, lambda answer: list(answer.token_ids))

    @unary
    def detokenize(self, token_ids: Sequence[int]) -> Call[str]:
        """Text of token ids, special tokens left out."""
        request = wire.filled(pb.DetokenizeRequest(), token_ids=token_ids)
        return _call(self._inference.Detokenize, request, lambda answer: answer.text)

    @unary
    def model_info(self) -> Call[ModelInfo]:
        """The model served and the limits of the deployment."""
        request = pb.GetModelInfoRequest()
        return _call(self._inference.GetModelInfo, request, lambda answer: wire.flat(ModelInfo, answer))

    @unary
    def stats(self) -> Call[Stats]:
        """Counters and gauges of pool, prefix cache and scheduler."""
        return _call(self._cache.GetStats, cache_pb.GetStatsRequest(), lambda answer: wire.flat(Stats, answer))

    @unary
    def lookup_prefix(self, prompt: Prompt, *, cache: CacheControls | None = None) -> Call[PrefixLookup]:
        """How many leading tokens of a prompt are cached now. Changes nothing."""
        request = wire.prompt_request(cache_pb.LookupPrefixRequest(), prompt, cache)
        return _call(self._cache.LookupPrefix, request, lambda answer: wire.flat(PrefixLookup, answer))

    @unary
    def explain_prefix(
        self, prompt: Prompt, *, cache: CacheControls | None = None, start: int = 0, limit: int = 1000
    ) -> Call[PrefixExplanation]:
        """Why each block of a prompt hits or misses, from block `start` on, `limit` (1 to 10000) at most."""
        request = wire.prompt_request(cache_pb.ExplainPrefixRequest(), prompt, cache, start=start, limit=limit)
        return _call(self._cache.ExplainPrefix, request, wire.explanation)

    @unary
    def pin_prefix(self, prompt: Prompt, lease_seconds: int, *, cache: CacheControls | None = None) -> Call[Pin]:
        """Keeps what is cached of a prompt from eviction for 1 to 86400 seconds. Raises LimitExceeded."""
        request = wire.prompt_request(cache_pb.PinPrefixRequest(), prompt, cache, lease_seconds=lease_seconds)
        return _call(self._cache.PinPrefix, request, lambda answer: wire.flat(Pin, answer))

    @unary
    def unpin_prefix(self, pin_id: str) -> Call[int]:
        """Ends a pin; tokens no longer pinned by it, 0 when it was unknown or had expired."""
        request = cache_pb.UnpinPrefixRequest(pin_id=pin_id)
        return _call(self._cache.UnpinPrefix, request, lambda answer: answer.unpinned_tokens)

    @unary
    def list_requests(self, limit: int = 100) -> Call[RequestList]:
        """Up to `limit` (1 to 10000) live requests, those that run first."""
        request = wire.filled(cache_pb.ListRequestsRequest(), limit=limit)
        return _call(self._cache.ListRequests, request, wire.request_list)

    @unary
    def block_table(self, request_id: str) -> Call[list[SequenceBlocks]]:
        """The block tables of a live request, one per sequence. Raises NotFound."""

        def read(answer: cache_pb.GetBlockTableResponse) -> list[SequenceBlocks]:
            return [wire.flat(SequenceBlocks, sequence) for sequence in answer.sequences]

        return _call(self._cache.GetBlockTable, cache_pb.GetBlockTableRequest(request_id=request_id), read)

    @unary
    def list_blocks(self, start: int = 0, limit: int = 100, state: BlockState | None = None) -> Call[BlockList]:
        """Blocks of the pool by id from `start`, `limit` (1 to 10000) at most, only those in `state` if given."""
        return _call(self._cache.ListBlocks, wire.list_blocks_request(start, limit, state), wire.block_list)

    @unary
    def reset_prefix_cache(self, *, force: bool = False) -> Call[CacheReset]:
        """Removes every cached prefix. While requests or pins hold blocks it raises FailedPrecondition, unless
        `force` preempts the requests, which go on by themselves, and ends the pins.
        """
        request = cache_pb.ResetPrefixCacheRequest(force=force)
        return _call(self._cache.ResetPrefixCache, request, lambda answer: wire.flat(CacheReset, answer))

    @unary
    def health(self, service: str = "") -> Call[HealthStatus]:
        """Health of the server, or of one of its services by full name. Raises Unreachable when nothing answers."""

        def read(answer: Any) -> HealthStatus:
            status: HealthStatus = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            return status

        request = health_pb2.HealthCheckRequest(service=service)
        return Call(self._health.Check, request, read, if_not_found="SERVICE_UNKNOWN")

    def _generation(
        self, prompt: Prompt, n: int, options: GenerateOptions, *, only_complete: bool = False
    ) -> ResumableGeneration:
        return ResumableGeneration(
            prompt, n, options, default_resume_timeout_s=self._resume_timeout_s, only_complete=only_complete
        )

    def _unary_timeout(self, generation: ResumableGeneration) -> float | None:
        """Seconds for a call that `generation` waits for."""
        limits = [limit for limit in (self._timeout, generation.remaining_s()) if limit is not None]
        return min(limits, default=None)


class StreamState:
    """The part that both streams share: results of the generation that they carry."""

    def __init__(self, generation: ResumableGeneration) -> None:
        self._generation = generation

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
