"""CacheService and OperatorService on a real gRPC server on a socket, with an engine that gives known answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

import grpc
from support.engine import small_tokenizers
from support.engine.fake_engine import MODEL, FakeEngine

from pagekv.common.server import GrpcServer
from pagekv.kvmanager.api.cache_service import CacheService
from pagekv.kvmanager.api.operator_service import OperatorService
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.v1 import cache_service_pb2_grpc, operator_service_pb2_grpc

if TYPE_CHECKING:
    # Only type checkers know the stubs of asyncio channels.
    from pagekv.v1.cache_service_pb2_grpc import CacheServiceAsyncStub as CacheStub
    from pagekv.v1.operator_service_pb2_grpc import OperatorServiceAsyncStub as OperatorStub

TOKENIZER = Tokenizer(small_tokenizers.byte_level())


def run(body: Callable[[FakeEngine, CacheStub], Awaitable[None]]) -> None:
    """Calls `body` with an engine and a stub of its CacheService."""
    _serve(lambda engine, channel: body(engine, cast("CacheStub", cache_service_pb2_grpc.CacheServiceStub(channel))))


def run_operator(body: Callable[[FakeEngine, OperatorStub], Awaitable[None]]) -> None:
    """Calls `body` with an engine and a stub of its OperatorService."""
    _serve(
        lambda engine, channel: body(
            engine, cast("OperatorStub", operator_service_pb2_grpc.OperatorServiceStub(channel))
        )
    )


def _serve(body: Callable[[FakeEngine, grpc.aio.Channel], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = FakeEngine()
        state = ServedModel(engine)
        state.open(MODEL.model_fingerprint, TOKENIZER)
        server = GrpcServer("127.0.0.1:0", ["pagekv.v1.CacheService", "pagekv.v1.OperatorService"])
        cache_service_pb2_grpc.add_CacheServiceServicer_to_server(CacheService(engine, state), server.server)
        operator_service_pb2_grpc.add_OperatorServiceServicer_to_server(OperatorService(engine, state), server.server)
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await body(engine, channel)
            finally:
                await server.stop(0)

    asyncio.run(main())
