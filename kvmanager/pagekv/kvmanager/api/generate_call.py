"""One Generate call, from the validated command to the messages of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from pagekv.kvmanager.access.caller import sees_all
from pagekv.kvmanager.api.output_processor import OutputProcessor, TextDelta
from pagekv.kvmanager.api.served_model import Served
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.request.logprobs import TokenLogprobs, in_turns
from pagekv.kvmanager.request.stream import RequestStream, SequenceDelta
from pagekv.kvmanager.text.stop_strings import StopStrings
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2


class GenerateCall:
    """States: built → running → closed. `close` has to be called however the call ends; it aborts a running request."""

    def __init__(
        self,
        engine: EngineLoop,
        served: Served,
        command: GenerateCommand,
        stops: Sequence[str],
        *,
        only_complete: bool,
    ) -> None:
        self._engine = engine
        self._command = command
        # A beam search has nothing to report before its end.
        self._only_complete = only_complete or command.sampling.beam_width > 0
        self._eos = served.model.eos_token_ids
        # Sent in the first message only, and empty from then on.
        self._fingerprint = served.model.model_fingerprint
        self._prompt_tokens = len(command.prompt_ids) - command.resumed_tokens
        # Stop strings are looked for in every token.
        self._at_ends = self._only_complete and not stops
        prepared = StopStrings(stops)
        self._outputs = [OutputProcessor(command, prepared, served.tokenizer) for _ in range(command.n)]
        # Preemptions depend on other tenants' requests, so a tenant is not told their number.
        self._tells_preemptions = sees_all()
        # Sequences that the engine is still generating for this call.
        self._open: set[int] = set()
        self._stream: RequestStream | None = None

    async def run(self, write: Callable[[pb.GenerateResponse], Awaitable[None]]) -> None:
        """Writes the messages in order. Raises as `OutputProcessor.resume` and `EngineLoop.queue` do, and the error
        with which the engine fails the stream.

        Messages go through `write` and not through asynchronous generators, because three layers of generators took 8
        of the 45 microseconds of a message.
        """
        first = self._outputs[0]
        for _ in first.resume(self._eos):
            await asyncio.sleep(0)
        ended = first.end_of_resumed()
        if ended is not None:
            await write(await self._complete(SequenceDelta(0), first, ended))
            return
        stream = self._stream = await self._engine.queue(self._command)
        self._open = set(range(self._command.n))
        while self._open and (deltas := await stream.take(at_ends=self._at_ends)):
            for delta in deltas:
                # Hundreds of thousands of tokens may wait for a slow reader.
                for part in delta.parts():
                    if delta.index not in self._open:
                        break  # the rest are tokens after a stop string
                    await self._report(part, write)
                    if part is not delta:
                        await asyncio.sleep(0)

    async def _report(self, delta: SequenceDelta, write: Callable[[pb.GenerateResponse], Awaitable[None]]) -> None:
        """Writes the messages of a delta. The last may be large, so it is made after the one before is written."""
        output = self._outputs[delta.index]
        news = output.take(delta)
        if news.finish is not None:
            self._open.discard(delta.index)
            if delta.finish is None and self._stream is not None:
                self._engine.finish_sequence(self._stream, delta.index)
        if (news.token_ids or news.text) and not self._only_complete:
            await write(self._chunk(delta, output, news))
        if news.finish is not None:
            await write(await self._complete(delta, output, news))

    def close(self) -> None:
        """Aborts the request if the engine still generates for it. Idempotent."""
        self._open.clear()
        if self._stream is not None:
            self._engine.release(self._stream)
        # gRPC keeps done callbacks in a reference cycle, so these objects would live until the next garbage collection.
        self._stream = None
        self._outputs.clear()
        self._command = replace(self._command, prompt_ids=[])

    def _chunk(self, delta: SequenceDelta, output: OutputProcessor, news: TextDelta) -> pb.GenerateResponse:
        # Field by field, because keywords take 1.5 times as long, and this runs for every token.
        response = pb.GenerateResponse(request_id=self._command.request_id)
        self._say_fingerprint(response)
        chunk = response.chunk
        chunk.index = delta.index
        chunk.prompt_tokens = self._prompt_tokens
        chunk.token_ids.extend(news.token_ids)
        chunk.text = news.text
        chunk.completion_tokens = output.num_tokens
        chunk.cached_tokens = self._cached_tokens(delta)
        if news.logprobs:
            chunk.logprobs.extend(map(_position_logprobs, news.logprobs))
        return response

    def _cached_tokens(self, delta: SequenceDelta) -> int:
        # The engine's prompt ends with resumed tokens, which may have been cached too.
        return min(delta.cached_tokens, self._prompt_tokens)

    async def _complete(self, delta: SequenceDelta, output: OutputProcessor, news: TextDelta) -> pb.GenerateResponse:
        assert news.finish is not None
        complete = pb.GenerateComplete(
            index=delta.index,
            finish_reason=types_pb2.FinishReason.Value(f"FINISH_REASON_{news.finish.name}"),
            token_ids=output.token_ids,
            text="".join(output.texts),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=output.num_tokens,
            cached_tokens=self._cached_tokens(delta),
            preemptions=delta.preemptions if self._tells_preemptions else 0,
            cumulative_logprob=delta.cumulative_logprob,
        )
        if news.stop_token_id is not None:
            complete.stop_token_id = news.stop_token_id
        elif news.stop_string is not None:
            complete.stop_string = news.stop_string
        response = pb.GenerateResponse(request_id=self._command.request_id, complete=complete)
        self._say_fingerprint(response)
        # Added here and not in the constructor above, which would copy them.
        async for some in in_turns(output.logprobs):
            response.complete.logprobs.extend(map(_position_logprobs, some))
        return response

    def _say_fingerprint(self, response: pb.GenerateResponse) -> None:
        if self._fingerprint:
            response.model_fingerprint, self._fingerprint = self._fingerprint, ""


def _position_logprobs(logprobs: TokenLogprobs) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[types_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top],
    )
