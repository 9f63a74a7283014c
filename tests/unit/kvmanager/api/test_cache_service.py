"""CacheService over a real gRPC server, with an engine that gives known answers."""

from __future__ import annotations

from typing import Any, cast

import grpc
import pytest
from support.engine.cache_harness import TOKENIZER, run
from support.engine.fake_engine import FakeEngine
from support.prompts import as_chat, as_prompt

from pagekv.common.errors import LimitExceeded
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import cache_service_pb2_grpc as pb_grpc
from pagekv.v1 import types_pb2

IDS = as_prompt([5, 6, 7])
NO_WRITE = types_pb2.CacheControls(write=False)


def test_stats_arrive_under_their_names() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        answer = await stub.GetStats(pb.GetStatsRequest())
        assert answer == engine.queries.stats()

    run(body)


def test_lookup_prefix() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        controls = types_pb2.CacheControls(
            namespace="n", media_hashes=[types_pb2.MediaHash(position=1, length=2, hash="h")]
        )
        answer = await stub.LookupPrefix(pb.LookupPrefixRequest(prompt=IDS, cache=controls))
        assert (answer.prompt_tokens, answer.device_tokens, answer.host_tokens) == (3, 8, 4)
        assert answer.partial_tokens == 2
        assert list(answer.block_ids) == [7, 3]
        assert engine.lookups == [([5, 6, 7], CacheIdentity("n", media=(MediaSpan(1, 2, "h"),)))]
        await stub.LookupPrefix(pb.LookupPrefixRequest(prompt=as_prompt("void")))
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


def test_live_requests_up_to_a_limit() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        assert await stub.ListRequests(pb.ListRequestsRequest()) == pb.ListRequestsResponse()
        for name in "ab":
            engine.submit(GenerateCommand(name, [5], SamplingParams()))
        answer = await stub.ListRequests(pb.ListRequestsRequest(limit=1))
        assert (len(answer.requests), answer.total) == (1, 2)
        assert answer.requests[0] == pb.RequestInfo(
            request_id="a", state="running", priority=-1, num_sequences=1, prompt_tokens=9, cached_tokens=4,
            computed_tokens=8, generated_tokens=2, max_total_tokens=20, num_blocks=3, preemptions=1,
        )  # fmt: skip  # several entries a line: one each would fill a screen
        with pytest.raises(grpc.aio.AioRpcError, match="limit: must be from 0 to 10000"):
            await stub.ListRequests(pb.ListRequestsRequest(limit=10_001))

    run(body)


def test_list_blocks_in_pieces_and_by_state() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        answer = await stub.ListBlocks(pb.ListBlocksRequest(limit=4))
        free, cached, active, pinned = answer.blocks
        assert free == pb.BlockInfo(state=pb.BLOCK_STATE_FREE)
        assert cached == pb.BlockInfo(block_id=1, state=pb.BLOCK_STATE_CACHED, block_hash="cc")
        assert active == pb.BlockInfo(block_id=2, ref_count=2, state=pb.BLOCK_STATE_ACTIVE, block_hash="aa", pins=1)
        assert pinned == pb.BlockInfo(block_id=3, ref_count=1, state=pb.BLOCK_STATE_PINNED, block_hash="ee", pins=1)
        assert answer.next_start == 4
        answer = await stub.ListBlocks(pb.ListBlocksRequest(start=3, state=pb.BLOCK_STATE_PINNED))
        assert [block.block_id for block in answer.blocks] == [3, 7]
        assert not answer.HasField("next_start")

    run(body)


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("LookupPrefix", pb.LookupPrefixRequest(), "prompt: exactly one of text, token_ids and chat"),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=as_prompt("")), "prompt.text"),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=as_prompt([5] * 65)), "prompt.token_ids.ids"),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=as_chat()), "prompt.chat"),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=IDS, adapter="a" * 257), "adapter"),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=IDS, cache=types_pb2.CacheControls(read=True)), "cache.read"),
        ("PinPrefix", pb.PinPrefixRequest(prompt=IDS, lease_seconds=1, cache=NO_WRITE), "cache.write"),
        (
            "LookupPrefix",
            pb.LookupPrefixRequest(prompt=IDS, cache=types_pb2.CacheControls(namespace="n" * 257)),
            "cache.namespace",
        ),
        (
            "LookupPrefix",
            pb.LookupPrefixRequest(
                prompt=IDS,
                cache=types_pb2.CacheControls(media_hashes=[types_pb2.MediaHash(position=3, length=1, hash="h")]),
            ),
            "cache.media_hashes[0].position",
        ),
        ("GetBlockTable", pb.GetBlockTableRequest(), "request_id"),
        ("ListBlocks", pb.ListBlocksRequest(start=10), "start"),
        ("ListBlocks", pb.ListBlocksRequest(limit=10001), "limit"),
        ("ListBlocks", pb.ListBlocksRequest(state=cast("pb.BlockState.ValueType", 5)), "state"),
        ("ExplainPrefix", pb.ExplainPrefixRequest(), "prompt"),
        ("ExplainPrefix", pb.ExplainPrefixRequest(prompt=IDS, start=1), "start"),
        ("ExplainPrefix", pb.ExplainPrefixRequest(prompt=IDS, limit=10001), "limit"),
        ("PinPrefix", pb.PinPrefixRequest(lease_seconds=1), "prompt"),
        ("PinPrefix", pb.PinPrefixRequest(prompt=IDS), "lease_seconds"),
        ("PinPrefix", pb.PinPrefixRequest(prompt=IDS, lease_seconds=86401), "lease_seconds"),
        ("UnpinPrefix", pb.UnpinPrefixRequest(), "pin_id"),
        ("UnpinPrefix", pb.UnpinPrefixRequest(pin_id="p" * 65), "pin_id"),
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
        with pytest.raises(grpc.aio.AioRpcError, match="running requests or pins hold blocks") as caught:
            await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        answer = await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(force=True))
        assert answer == pb.ResetPrefixCacheResponse(removed_blocks=5, preempted_sequences=2, ended_pins=1)

    run(body)


def test_explain_prefix_in_pages() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        prompt = as_prompt([5] * 9)
        controls = types_pb2.CacheControls(namespace="n")
        answer = await stub.ExplainPrefix(pb.ExplainPrefixRequest(prompt=prompt, cache=controls, adapter="a"))
        assert engine.lookups == [([5] * 9, CacheIdentity("n", "a"))]
        hit, old, tail = answer.blocks
        assert hit == pb.BlockExplanation(
            end=4, outcome=pb.BLOCK_OUTCOME_HIT, block_hash="aa", block_id=7, reason="cached", shared_tokens=4
        )
        assert (old.outcome, old.steps_ago, old.seconds_ago) == (pb.BLOCK_OUTCOME_EVICTED, 0, 0.5)
        assert old.HasField("steps_ago")
        assert not old.HasField("block_id")
        assert tail == pb.BlockExplanation(start=8, end=9, outcome=pb.BLOCK_OUTCOME_PARTIAL_TAIL, reason="tail")
        assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)
        assert not answer.HasField("next_start")
        answer = await stub.ExplainPrefix(pb.ExplainPrefixRequest(prompt=prompt, start=1, limit=1))
        assert [block.start for block in answer.blocks] == [4]
        assert answer.next_start == 2

    run(body)


def test_pin_and_unpin() -> None:
    async def body(engine: FakeEngine, stub: pb_grpc.CacheServiceAsyncStub) -> None:
        answer = await stub.PinPrefix(pb.PinPrefixRequest(prompt=IDS, lease_seconds=60))
        assert answer == pb.PinPrefixResponse(pin_id="pin-60", pinned_tokens=8)
        assert engine.lookups == [([5, 6, 7], CacheIdentity())]
        assert (await stub.UnpinPrefix(pb.UnpinPrefixRequest(pin_id="pin-60"))).unpinned_tokens == 8
        assert (await stub.UnpinPrefix(pb.UnpinPrefixRequest(pin_id="pin-61"))).unpinned_tokens == 0
        engine.refusal = LimitExceeded("12 blocks would be pinned, at most 5 of 10")
        with pytest.raises(grpc.aio.AioRpcError, match="12 blocks would be pinned, at most 5 of 10") as caught:
            await stub.PinPrefix(pb.PinPrefixRequest(prompt=IDS, lease_seconds=60))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(body)
