"""The blocking client. `pagekv.client.aio` is its asyncio twin: the same methods, one suite of tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

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

Response = TypeVar("Response")


class PageKVClient:
    """A connection to a PageKV manager, for use by any number of threads. Close it, or use it in a `with` statement.

    Every method raises subclasses of `pagekv.client.errors.PageKVError`: InvalidRequest names the field that is wrong,
    Overloaded and Unavailable say when to come back, Unreachable that nothing answers at the address.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S,
    ) -> None:
        """`target` is host:port or unix:/path. `timeout`: seconds for each call but generating ones, None for no limit.

        `resume_timeout_s`: how long a generation whose connection broke goes on trying to reach the server again; 0
        raises ConnectionLost at once. Nothing is connected before the first call.
        """
        self.target = target
        self._timeout = timeout
        self._resume_timeout_s = resume_timeout_s
        self._channel = grpc.insecure_channel(target, options=channel_options(target))
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._cache = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls still running are cancelled. Idempotent."""
        self._channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates one continuation of a prompt and returns it whole. Options: see GenerateOptions."""
        return self._complete(prompt, 1, options)[0]

    def generate_n(self, prompt: Prompt, n: int, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Generates `n` independent continuations, 1 to 64, by index; with `beam_width` the `n` best, best first."""
        return self._complete(prompt, n, options)

    def stream(self, prompt: Prompt, *, n: int = 1, **options: Unpack[GenerateOptions]) -> Stream:
        """Generates and yields chunks as they arrive. Closing the stream aborts the request.

        The call starts with the first `next`. A broken connection is resumed without a token lost or repeated;
        with `n` above 1 the server computes again what was received.
        """
        generation = ResumableGeneration(prompt, n, options, default_resume_timeout_s=self._resume_timeout_s)
        return Stream(generation, self._chunks(generation))

    def abort(self, *request_ids: str) -> list[str]:
        """Ends requests early; their streams finish with "abort". Returns the ids that were live."""
        return list(self._call(self._inference.Abort, pb.AbortRequest(request_ids=request_ids)).aborted)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a text or conversation, exactly as generating would encode it."""
        return list(self._call(self._inference.Tokenize, wire.tokenize_request(prompt)).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._call(self._inference.Detokenize, wire.detokenize_request(token_ids)).text

    def model_info(self) -> ModelInfo:
        """The model served and the limits of the deployment."""
        return wire.flat(ModelInfo, self._call(self._inference.GetModelInfo, pb.GetModelInfoRequest()))

    def stats(self) -> Stats:
        """Counters and gauges of pool, prefix cache and scheduler."""
        return wire.flat(Stats, self._call(self._cache.GetStats, cache_pb.GetStatsRequest()))

    def lookup_prefix(self, prompt: Prompt, *, cache: CacheControls | None = None) -> PrefixLookup:
        """How many leading tokens of a prompt are cached now. Changes nothing."""
        return wire.flat(PrefixLookup, self._call(self._cache.LookupPrefix, wire.lookup_request(prompt, cache)))

    def explain_prefix(
        self, prompt: Prompt, *, cache: CacheControls | None = None, start: int = 0, limit: int = 1000
    ) -> PrefixExplanation:
        """Why each block of a prompt hits or misses, from block `start` on, `limit` (1 to 10000) at most."""
        request = wire.explain_request(prompt, cache, start, limit)
        return wire.explanation(self._call(self._cache.ExplainPrefix, request))

    def pin_prefix(self, prompt: Prompt, lease_seconds: int, *, cache: CacheControls | None = None) -> Pin:
        """Keeps what is cached of a prompt from eviction for 1 to 86400 seconds. Raises LimitExceeded."""
        return wire.flat(Pin, self._call(self._cache.PinPrefix, wire.pin_request(prompt, cache, lease_seconds)))

    def unpin_prefix(self, pin_id: str) -> int:
        """Ends a pin; tokens no longer pinned by it, 0 when it was unknown or had expired."""
        return self._call(self._cache.UnpinPrefix, cache_pb.UnpinPrefixRequest(pin_id=pin_id)).unpinned_tokens

    def list_requests(self, limit: int = 100) -> RequestList:
        """Up to `limit` (1 to 10000) live requests, those that run first."""
        return wire.request_list(self._call(self._cache.ListRequests, wire.list_requests_request(limit)))

    def block_table(self, request_id: str) -> list[SequenceBlocks]:
        """The block tables of a live request, one per sequence. Raises NotFound."""
        response = self._call(self._cache.GetBlockTable, cache_pb.GetBlockTableRequest(request_id=request_id))
        return [wire.flat(SequenceBlocks, sequence) for sequence in response.sequences]

    def list_blocks(self, start: int = 0, limit: int = 100, state: BlockState | None = None) -> BlockList:
        """Blocks of the pool by id from `start`, `limit` (1 to 10000) at most, only those in `state` if given."""
        return wire.block_list(self._call(self._cache.ListBlocks, wire.list_blocks_request(start, limit, state)))

    def reset_prefix_cache(self, *, force: bool = False) -> CacheReset:
        """Forgets every cached prefix. While requests or pins hold blocks it raises FailedPrecondition, unless `force`
        preempts the requests, which go on by themselves, and ends the pins.
        """
        request = cache_pb.ResetPrefixCacheRequest(force=force)
        return wire.flat(CacheReset, self._call(self._cache.ResetPrefixCache, request))

    def watch_events(self, *, token_ids: bool = True, snapshot_only: bool = False) -> Generator[EventBatch]:
        """The prefix table as it changes: a snapshot, then a batch at every step border with changes.

        `TableReplica` applies them. Goes on until it is closed, unless `snapshot_only`. Raises FellBehind when the
        batches are taken too slowly, and does not reconnect: another server has another table.
        """
        request = cache_pb.WatchEventsRequest(omit_token_ids=not token_ids, snapshot_only=snapshot_only)
        call = self._cache.WatchEvents(request)
        try:
            for response in call:
                yield wire.event_batch(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
        finally:
            call.cancel()

    def health(self, service: str = "") -> HealthStatus:
        """Health of the server, or of one of its services by full name. Raises Unreachable when nothing answers."""
        try:
            response = self._call(self._health.Check, health_pb2.HealthCheckRequest(service=service))
        except NotFound:
            return "SERVICE_UNKNOWN"
        status: HealthStatus = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        return status

    def _call(self, method: Callable[..., Response], request: Any) -> Response:
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error

    def _complete(self, prompt: Prompt, n: int, options: GenerateOptions) -> list[Completion]:
        generation = ResumableGeneration(
            prompt, n, options, default_resume_timeout_s=self._resume_timeout_s, only_complete=True
        )
        for _ in self._chunks(generation):
            pass
        return [generation.completions[index] for index in range(n)]

    def _chunks(self, generation: ResumableGeneration) -> Generator[Chunk]:
        while not generation.done:
            try:
                self._prepare(generation)
                call = self._inference.Generate(generation.request(), timeout=generation.remaining_s())
                try:
                    for response in call:
                        chunk = generation.take(response)
                        if chunk is not None:
                            yield chunk
                finally:
                    # Aborts the request when the caller gave up; no effect on a call that has ended.
                    call.cancel()
                generation.ended()
            except grpc.RpcError as error:
                if not generation.done:
                    time.sleep(generation.failed(from_rpc_error(error, self.target)))

    def _prepare(self, generation: ResumableGeneration) -> None:
        request = generation.prompt_to_encode()
        if request is not None:
            token_ids = self._inference.Tokenize(request, timeout=self._unary_timeout(generation)).token_ids
            info = self._inference.GetModelInfo(pb.GetModelInfoRequest(), timeout=self._unary_timeout(generation))
            generation.prompt_encoded(list(token_ids), wire.flat(ModelInfo, info).longest_sequence)

    def _unary_timeout(self, generation: ResumableGeneration) -> float | None:
        limits = [limit for limit in (self._timeout, generation.remaining_s()) if limit is not None]
        return min(limits, default=None)


class Stream(Iterator[Chunk]):
    """Chunks of a running generation; at the end `completion` has the whole. Use it in a `with` statement, or close it.

    States: open → ended (every chunk was taken, or an error was raised) or closed (the request is aborted).
    """

    def __init__(self, generation: ResumableGeneration, chunks: Generator[Chunk]) -> None:
        self._generation = generation
        self._chunks = chunks

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the request unless it has ended. Idempotent."""
        self._chunks.close()

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
