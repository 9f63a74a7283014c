"""One Generate call: from a validated command to the messages of its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from pagekv.kvmanager.api.output_processor import OutputDelta, OutputProcessor
from pagekv.kvmanager.api.served_model import Served
from pagekv.kvmanager.engine.interface import Engine
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand
from pagekv.kvmanager.request.logprobs import PackedLogprobs, TokenLogprobs
from pagekv.kvmanager.request.stream import RequestStream, SequenceDelta
from pagekv.kvmanager.text.stop_strings import StopStrings
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

# A chunk of so many tokens, without log-probabilities, is made in tens of microseconds.
SMALL_TOKENS = 16
FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
}


@dataclass(slots=True)
class _Sequence:
    """What has been reported of one sequence; its whole output goes into GenerateComplete."""

    output: OutputProcessor
    # What every chunk begins with, serialised: read back, half the time of setting it again.
    template: bytes
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)


class GenerateCall:
    """States: built → running → closed. `close` is to be called on every way out and aborts what still runs."""

    def __init__(
        self,
        engine: Engine,
        served: Served,
        command: GenerateCommand,
        stops: Sequence[str],
        *,
        only_complete: bool,
        serialise: Callable[[pb.GenerateResponse], bytes] = pb.GenerateResponse.SerializeToString,
    ) -> None:
        self._engine = engine
        self._serialise = serialise
        self._command = command
        # Of beam search nothing is known before its end.
        self._only_complete = only_complete or command.sampling.beam_width > 0
        self._eos = served.model.eos_token_ids
        # Said once, in the first message.
        self._fingerprint = served.model.model_fingerprint
        self._prompt_tokens = len(command.prompt_ids) - command.resumed_tokens
        prepared = StopStrings(stops)
        self._sequences = [
            _Sequence(OutputProcessor(command, prepared, served.tokenizer), self._template(index))
            for index in range(command.n)
        ]
        # Sequences that the engine is still generating for this call.
        self._open: set[int] = set()
        self._stream: RequestStream | None = None

    async def run(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes the messages in order, each as `serialise` makes it. Raises what `Engine.submit` raises, and what the
        engine fails the stream with.

        `write` and no generators: three layers of them took 8 of the 45 microseconds of a message.
        """
        ended = self._sequences[0].output.end_of_resumed(self._eos)
        if ended is not None:
            await write(self._serialise(self._complete(SequenceDelta(0), self._sequences[0], ended)))
            return
        stream = self._stream = self._engine.submit(self._command)
        self._open = set(range(self._command.n))
        while self._open and (messages := await stream.read(self._begin)) is not None:
            for message in messages:
                await write(message)

    def _begin(self, deltas: list[SequenceDelta]) -> Iterator[bytes]:
        """What is to be written of news. Each message is made when the one before it is written, but for a small first
        one, which is made here, in a row with those of other calls.
        """
        messages, first = self._messages(deltas), deltas[0]
        if first.finish is None and not first.logprobs and len(first.token_ids) <= SMALL_TOKENS:
            return chain(list(islice(messages, 1)), messages)
        return messages

    def _messages(self, deltas: list[SequenceDelta]) -> Iterator[bytes]:
        for delta in deltas:
            if delta.index not in self._open:
                continue  # tokens behind a stop string
            sequence = self._sequences[delta.index]
            out = sequence.output.take(delta)
            sequence.token_ids += out.token_ids
            sequence.texts.append(out.text)
            if out.logprobs:
                sequence.logprobs.extend(out.logprobs)
            if out.finish is not None:
                self._open.discard(delta.index)
                if delta.finish is None and self._stream is not None:
                    self._engine.stop_sequence(self._stream, delta.index)
            if (out.token_ids or out.text) and not self._only_complete:
                yield self._serialise(self._chunk(delta, sequence, out))
            if out.finish is not None:
                yield self._serialise(self._complete(delta, sequence, out))

    def close(self) -> None:
        """Nobody reads any more: aborts the request if the engine still generates for it. Idempotent."""
        self._open.clear()
        if self._stream is not None:
            self._engine.leave(self._stream)
        # gRPC keeps whom it calls at the end, in a cycle: all this would stay until the garbage collector comes.
        self._stream = None
        self._sequences.clear()
        self._command = replace(self._command, prompt_ids=[])

    def _template(self, index: int) -> bytes:
        chunk = pb.GenerateChunk(index=index, prompt_tokens=self._prompt_tokens)
        return pb.GenerateResponse(request_id=self._command.request_id, chunk=chunk).SerializeToString()

    def _chunk(self, delta: SequenceDelta, sequence: _Sequence, out: OutputDelta) -> pb.GenerateResponse:
        # Field by field: built from keywords, twice the time, and this is done for every token of every stream.
        response = pb.GenerateResponse.FromString(sequence.template)
        self._say_fingerprint(response)
        chunk = response.chunk
        chunk.token_ids.extend(out.token_ids)
        chunk.text = out.text
        chunk.completion_tokens = sequence.output.num_tokens
        chunk.cached_tokens = delta.cached_tokens
        if out.logprobs:
            chunk.logprobs.extend(map(_position_logprobs, out.logprobs))
        return response

    def _complete(self, delta: SequenceDelta, sequence: _Sequence, out: OutputDelta) -> pb.GenerateResponse:
        assert out.finish is not None
        complete = pb.GenerateComplete(
            index=delta.index,
            finish_reason=FINISH_REASONS[out.finish],
            output_ids=sequence.token_ids,
            text="".join(sequence.texts),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sequence.output.num_tokens,
            cached_tokens=delta.cached_tokens,
            preemptions=delta.preemptions,
            cumulative_logprob=delta.cumulative_logprob,
        )
        if out.stop_token_id is not None:
            complete.stop_token_id = out.stop_token_id
        elif out.stop_string is not None:
            complete.stop_string = out.stop_string
        response = pb.GenerateResponse(request_id=self._command.request_id, complete=complete)
        self._say_fingerprint(response)
        # Here and not above, so that they are not copied.
        response.complete.logprobs.extend(map(_position_logprobs, sequence.logprobs))
        return response

    def _say_fingerprint(self, response: pb.GenerateResponse) -> None:
        if self._fingerprint:
            response.model_fingerprint, self._fingerprint = self._fingerprint, ""


def _position_logprobs(logprobs: TokenLogprobs) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[types_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top],
    )
