"""The blocking client. `pagekv.client.aio` is its asyncio twin: the same methods, one suite of tests."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Self, Unpack

import grpc

from pagekv.client import wire
from pagekv.client.calls import Call, ClientCalls, Result, StreamState
from pagekv.client.channel import DEFAULT_RESUME_TIMEOUT_S, DEFAULT_TARGET, DEFAULT_TIMEOUT_S, channel_options
from pagekv.client.errors import NotFound, from_rpc_error
from pagekv.client.resumable_generation import ResumableGeneration
from pagekv.client.types import Chunk, Completion, EventBatch, GenerateOptions, ModelInfo, Prompt
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb

__all__ = ["PageKVClient", "Stream"]


class PageKVClient(ClientCalls):
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
        self._channel = grpc.insecure_channel(target, options=channel_options(target))
        super().__init__(target, self._channel, timeout, resume_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls still running are cancelled. Idempotent."""
        self._channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates one continuation of a prompt and returns it whole. Options: see GenerateOptions."""
        return self.generate_n(prompt, 1, **options)[0]

    def generate_n(self, prompt: Prompt, n: int, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Generates `n` independent continuations, 1 to 64, by index; with `beam_width` the `n` best, best first."""
        generation = self._generation(prompt, n, options, only_complete=True)
        for _ in self._chunks(generation):
            pass
        return [generation.completions[index] for index in range(n)]

    def stream(self, prompt: Prompt, *, n: int = 1, **options: Unpack[GenerateOptions]) -> Stream:
        """Generates and yields chunks as they arrive. Closing the stream aborts the request.

        The call starts with the first `next`. A broken connection is resumed without a token lost or repeated;
        with `n` above 1 the server computes again what was received.
        """
        generation = self._generation(prompt, n, options)
        return Stream(generation, self._chunks(generation))

    def watch_events(self, *, token_ids: bool = True, snapshot_only: bool = False) -> Generator[EventBatch]:
        """The prefix table as it changes: a snapshot, then a batch at every step boundary with changes.

        `TableReplica` applies them. Goes on until it is closed, unless `snapshot_only`. Raises FellBehind when the
        batches are taken too slowly, and does not reconnect: another server has another table.
        """
        call = self._cache.WatchEvents(
            cache_pb.WatchEventsRequest(omit_token_ids=not token_ids, snapshot_only=snapshot_only)
        )
        try:
            for response in call:
                yield wire.event_batch(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
        finally:
            call.cancel()

    def _call(self, call: Call[Result]) -> Result:
        try:
            return call.read(call.method(call.request, timeout=self._timeout))
        except grpc.RpcError as error:
            failure = from_rpc_error(error, self.target)
            if isinstance(failure, NotFound) and call.if_not_found is not None:
                return call.if_not_found
            raise failure from error

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
            encoded = self._inference.Tokenize(request, timeout=self._unary_timeout(generation))
            info = self._inference.GetModelInfo(pb.GetModelInfoRequest(), timeout=self._unary_timeout(generation))
            generation.prompt_encoded(list(encoded.token_ids), wire.flat(ModelInfo, info).longest_sequence)


class Stream(StreamState, Iterator[Chunk]):
    """Chunks of a running generation; at the end `completion` has the whole. Use it in a `with` statement, or close it.

    States: open → ended (every chunk was taken, or an error was raised) or closed (the request is aborted).
    """

    def __init__(self, generation: ResumableGeneration, chunks: Generator[Chunk]) -> None:
        super().__init__(generation)
        self._chunks = chunks

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the request unless it has ended. Idempotent."""
        self._chunks.close()
