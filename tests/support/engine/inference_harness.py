"""InferenceService on a real gRPC server on a socket, over a FakeEngine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from google.rpc import status_pb2
from support.engine import small_tokenizers
from support.engine.fake_engine import MODEL, FakeEngine
from support.event_loop import until
from support.prompts import as_prompt

from pagekv.common.server import GrpcServer
from pagekv.common.statuses import STATUS_DETAILS_KEY
from pagekv.kvmanager.api.inference_service import InferenceService
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.text.chat_template import ChatTemplate
from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import inference_service_pb2_grpc as pb_grpc
from pagekv.v1 import types_pb2

TOKENIZER = Tokenizer(
    small_tokenizers.byte_level(), ChatTemplate("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}", {})
)
STOP, LENGTH, ABORT = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_ABORT


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, special_tokens=False, limit=999)


def bytes_of(text: str) -> list[int]:
    """One token per byte of UTF-8."""
    byte_tokens = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(3, 3 + 256)}
    return [byte_tokens[bytes([byte])] for byte in text.encode()]


def request(request_id: str = "r", **fields: Any) -> pb.GenerateRequest:
    params = types_pb2.SamplingParams(**{"max_tokens": 40, **fields.pop("params", {})})
    prompt = as_prompt(fields.pop("ids", tokens_of("In the")))
    return pb.GenerateRequest(request_id=request_id, prompt=prompt, sampling_params=params, **fields)


class Stream:
    """The messages of a call, one at a time."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> None:
        self.cancel, self.code = call.cancel, call.code
        self._call = call

    async def read(self) -> pb.GenerateResponse:
        message = await self._call.read()
        assert isinstance(message, pb.GenerateResponse), "the stream has ended"
        return message

    async def rest(self) -> list[pb.GenerateResponse]:
        """Every message still to come."""
        messages: list[pb.GenerateResponse] = []
        while isinstance(message := await self._call.read(), pb.GenerateResponse):
            messages.append(message)
        return messages


class Harness:
    def __init__(self, engine: FakeEngine, stub: pb_grpc.InferenceServiceAsyncStub) -> None:
        self.engine = engine
        self.stub = stub

    async def start(self, message: pb.GenerateRequest) -> Stream:
        """A call whose request has reached the engine."""
        call = self.stub.Generate(message)
        await until(lambda: message.request_id in self.engine.live)
        return Stream(call)


@asynccontextmanager
async def serving(tokenizer: Tokenizer | None = TOKENIZER, opened: bool = True) -> AsyncIterator[Harness]:
    engine = FakeEngine(replace(MODEL, num_device_blocks=16))  # the whole context
    state = ServedModel(engine)
    if opened:
        state.open(MODEL.model_fingerprint, tokenizer)
    server = GrpcServer("127.0.0.1:0", ["pagekv.v1.InferenceService"])
    pb_grpc.add_InferenceServiceServicer_to_server(InferenceService(engine, state), server.server)
    port = await server.start()
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        try:
            yield Harness(engine, cast("pb_grpc.InferenceServiceAsyncStub", pb_grpc.InferenceServiceStub(channel)))
        finally:
            await server.stop(0)


def run(body: Callable[[Harness], Awaitable[None]], **how: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), serving(**how) as harness:
            await body(harness)

    asyncio.run(main())


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, status_pb2.Status]:
    """Status code, message and google.rpc details of a call that fails."""

    async def read() -> None:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        async for _ in call:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    status = status_pb2.Status()
    trailing = dict(caught.value.trailing_metadata() or ())
    status.ParseFromString(cast("bytes", trailing[STATUS_DETAILS_KEY]))
    return caught.value.code(), caught.value.details() or "", status


def detail(status: status_pb2.Status, message: Any) -> Any:
    for packed in status.details:
        if packed.Is(message.DESCRIPTOR):
            packed.Unpack(message)
            return message
    raise AssertionError(f"no {message.DESCRIPTOR.name} in {status}")
