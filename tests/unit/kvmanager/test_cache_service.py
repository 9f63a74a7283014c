"""CacheService over a real gRPC server, with an engine that gives known answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, cast

import grpc
import pytest
import small_tokenizers
from fake_engine import MODEL, FakeEngine

from pagekv.common.server import GrpcServer
from pagekv.kvmanager.cache_service import CacheService
from pagekv.kvmanager.request import CacheIdentity, GenerateCommand, MediaSpan, SamplingParams
from pagekv.kvmanager.serving_state import ServingState
from pagekv.kvmanager.tokenizer import Tokenizer
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import cache_service_pb2_grpc as pb_grpc
from pagekv.v1 import types_pb2

TOKENIZER = Tokenizer(small_tokenizers.byte_level())
IDS = types_pb2.TokenizedInput(input_ids=[5, 6, 7])


def run(body: Callable[[FakeEngine, pb_grpc.CacheServiceAsyncStub], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = FakeEngine()
        state = ServingState(engine)
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


def test_stats_arrive_under_their_names() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        answer = await stub.GetStats(pb.GetStatsRequest())
        expected = asdict(engine.stats())
        assert {field.name for field in answer.DESCRIPTOR.fields} == expected.keys()
        assert {name: getattr(answer, name) for name in expected} == expected

    run(body)


def test_lookup_prefix() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        controls = types_pb2.CacheControls(
            namespace="n", media_hashes=[types_pb2.MediaHash(position=1, length=2, hash="h")]
        )
        answer = await stub.LookupPrefix(pb.LookupPrefixRequest(tokenized=IDS, cache=controls))
        assert (answer.prompt_tokens, answer.device_tokens, answer.host_tokens) == (3, 8, 4)
        assert list(answer.block_ids) == [7, 3]
        assert engine.lookups == [([5, 6, 7], CacheIdentity("n", media=(MediaSpan(1, 2, "h"),)))]
        await stub.LookupPrefix(pb.LookupPrefixRequest(text="void"))
        assert engine.lookups[1][0] == [0, *TOKENIZER.encode("void", special_tokens=False, limit=9)]

    run(body)


def test_block_table_of_a_live_request() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="no request 'r' is running or waiting") as caught:
            await stub.GetBlockTable(pb.GetBlockTableRequest(request_id="r"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        engine.submit(GenerateCommand("r", [5], SamplingParams()))
        answer = await stub.GetBlockTable(pb.GetBlockTableRequest(request_id="r"))
        assert answer.sequences[0] == pb.SequenceBlocks(
            state="running", num_tokens=9, computed_tokens=8, block_ids=[7, 3, 1], block_hashes=["01" * 32, "02" * 32]
        )

    run(body)


def test_list_blocks_in_pieces_and_by_state() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        answer = await stub.ListBlocks(pb.ListBlocksRequest(limit=3))
        free, cached, active = answer.blocks
        assert free == pb.BlockInfo(state=pb.BLOCK_STATE_FREE)
        assert cached == pb.BlockInfo(block_id=1, state=pb.BLOCK_STATE_CACHED, block_hash="cc")
        assert active == pb.BlockInfo(block_id=2, ref_count=2, state=pb.BLOCK_STATE_ACTIVE, block_hash="aa")
        assert answer.next_start == 3
        answer = await stub.ListBlocks(pb.ListBlocksRequest(start=3, state=pb.BLOCK_STATE_ACTIVE))
        assert [block.block_id for block in answer.blocks] == [5, 8]
        assert not answer.HasField("next_start")

    run(body)


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("LookupPrefix", pb.LookupPrefixRequest(), "input"),
        ("LookupPrefix", pb.LookupPrefixRequest(text=""), "text"),
        ("LookupPrefix", pb.LookupPrefixRequest(tokenized=types_pb2.TokenizedInput(input_ids=[5] * 65)), "tokenized"),
        ("LookupPrefix", pb.LookupPrefixRequest(chat=types_pb2.ChatInput()), "chat"),
        (
            "LookupPrefix",
            pb.LookupPrefixRequest(tokenized=IDS, cache=types_pb2.CacheControls(namespace="n" * 257)),
            "cache.namespace",
        ),
        (
            "LookupPrefix",
            pb.LookupPrefixRequest(
                tokenized=IDS,
                cache=types_pb2.CacheControls(media_hashes=[types_pb2.MediaHash(position=3, length=1, hash="h")]),
            ),
            "cache.media_hashes[0].position",
        ),
        ("GetBlockTable", pb.GetBlockTableRequest(), "request_id"),
        ("ListBlocks", pb.ListBlocksRequest(start=10), "start"),
        ("ListBlocks", pb.ListBlocksRequest(limit=10001), "limit"),
        ("ListBlocks", pb.ListBlocksRequest(state=cast("pb.BlockState.ValueType", 4)), "state"),
    ],
)
def test_bad_fields(method: str, message: Any, field: str) -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, method)(message)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(field)

    run(body)


def test_reset() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        assert (await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())).removed_blocks == 5
        engine.held_blocks = True
        with pytest.raises(grpc.aio.AioRpcError, match="running requests hold blocks") as caught:
            await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    run(body)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ExplainPrefix", pb.ExplainPrefixRequest(text="x")),
        ("PinPrefix", pb.PinPrefixRequest(text="x", lease_seconds=1)),
        ("UnpinPrefix", pb.UnpinPrefixRequest(pin_id="p")),
        ("ResetPrefixCache", pb.ResetPrefixCacheRequest(force=True)),
    ],
)
def test_what_is_not_served_yet_says_so(method: str, message: Any) -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match=rf"{method}.* not served by this version") as caught:
            await getattr(stub, method)(message)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(body)


def test_watching_events_is_not_served_yet() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match=r"WatchEvents .* not served by this version") as caught:
            async for _ in stub.WatchEvents(pb.WatchEventsRequest()):
                pass
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(body)
