"""The asyncio client: `pagekv.client.client` method for method; see there for what each raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack, cast

import grpc

from pagekv.client import wire
from pagekv.client.calls import Call, ClientCalls, Result, StreamState
from pagekv.client.channel import DEFAULT_RESUME_TIMEOUT_S, DEFAULT_TARGET, DEFAULT_TIMEOUT_S, channel_options
from pagekv.client.errors import NotFound, from_rpc_error
from pagekv.client.resumable_generation import ResumableGeneration
from pagekv.client.types import Chunk, Completion, EventBatch, GenerateOptions, ModelInfo, Prompt
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb

if TYPE_CHECKING:
    # Classes that exist in the stubs' type files only: at run time one stub class serves both kinds of channel.
    from pagekv.v1.cache_service_pb2_grpc import CacheServiceAsyncStub
    from pagekv.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

__all__ = ["AsyncPageKVClient", "AsyncStream"]


class AsyncPageKVClient(ClientCalls):
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
        self._channel = grpc.aio.insecure_channel(target, options=channel_options(target))
        super().__init__(target, self._channel, timeout, resume_timeout_s)
        self._async_inference = cast("InferenceServiceAsyncStub", self._inference)
        self._async_cache = cast("CacheServiceAsyncStub", self._cache)

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
        return (await self.generate_n(prompt, 1, **options))[0]

    async def generate_n(self, prompt: Prompt, n: int, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Generates `n` independent continuations, 1 to 64, by index; with `beam_width` the `n` best, best first."""
        generation = self._generation(prompt, n, options, only_complete=True)
        async for _ in self._chunks(generation):
            pass
        return [generation.completions[index] for index in range(n)]

    def stream(self, prompt: Prompt, *, n: int = 1, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Generates and yields chunks as they arrive. Closing the stream, or cancelling its task, aborts the request.

        The call starts with the first chunk asked for. A broken connection is resumed as in `PageKVClient.stream`.
        """
        generation = self._generation(prompt, n, options)
        return AsyncStream(generation, self._chunks(generation))

    async def watch_events(self, *, token_ids: bool = True, snapshot_only: bool = False) -> AsyncGenerator[EventBatch]:
        """The prefix table as it changes, as `PageKVClient.watch_events` tells it."""
        call = self._async_cache.WatchEvents(
            cache_pb.WatchEventsRequest(omit_token_ids=not token_ids, snapshot_only=snapshot_only)
        )
        try:
            async for response in call:
                yield wire.event_batch(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
        finally:
            call.cancel()

    async def _call(self, call: Call[Result]) -> Result:
        try:
            return call.read(await call.method(call.request, timeout=self._timeout))
        except grpc.RpcError as error:
            failure = from_rpc_error(error, self.target)
            if isinstance(failure, NotFound) and call.if_not_found is not None:
                return call.if_not_found
            raise failure from error

    async def _chunks(self, generation: ResumableGeneration) -> AsyncGenerator[Chunk]:
        while not generation.done:
            try:
                await self._prepare(generation)
                call = self._async_inference.Generate(generation.request(), timeout=generation.remaining_s())
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
        request, inference = generation.prompt_to_encode(), self._async_inference
        if request is not None:
            encoded = await inference.Tokenize(request, timeout=self._unary_timeout(generation))
            info = await inference.GetModelInfo(pb.GetModelInfoRequest(), timeout=self._unary_timeout(generation))
            generation.prompt_encoded(list(encoded.token_ids), wire.flat(ModelInfo, info).longest_sequence)


class AsyncStream(StreamState, AsyncIterator[Chunk]):
    """Chunks of a running generation; at the end `completion` has the whole. Use it in `async with`, or close it.

    States: open → ended (every chunk was taken, or an error was raised) or closed (the request is aborted).
    """

    def __init__(self, generation: ResumableGeneration, chunks: AsyncGenerator[Chunk]) -> None:
        super().__init__(generation)
        self._chunks = chunks

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
