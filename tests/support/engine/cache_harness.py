"""CacheService on a real gRPC server on a socket, with an engine that gives known answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import grpc
from support.engine import small_tokenizers
from support.engine.fake_engine import MODEL, FakeEngine

from pagekv.common.server import GrpcServer
from pagekv.kvmanager.api.cache_service import CacheService
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.v1 import cache_service_pb2_grpc as pb_grpc

TOKENIZER = Tokenizer(small_tokenizers.byte_level())


def run(body: Callable[[FakeEngine, pb_grpc.CacheServiceAsyncStub], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = FakeEngine()
        state = ServedModel(engine)
        state.open(MODEL.model_fingerprint, TOKENIZER)
        server = GrpcServer("127.0.0.1:0", ["pagekv.v1.CacheService"])
        pb_grpc.add_CacheServiceServicer_to_server(CacheService(engine, state), server.server)
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await body(engine, cast("pb_grpc.CacheServiceAsyncStub", pb_grpc.CacheServiceStub(channel)))
            finally:
                await server.stop(0)

    asyncio.run(main())
