"""OperatorService over a real gRPC server, with an engine that gives known answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from support.engine.cache_harness import run_operator
from support.engine.fake_engine import FakeEngine
from support.event_loop import run_by

from pagekv.client.errors import Overloaded, from_rpc_error
from pagekv.kvmanager.engine import paging
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.tenants.limits import TenantLimits
from pagekv.v1 import operator_service_pb2 as pb
from pagekv.v1 import types_pb2

if TYPE_CHECKING:
    from pagekv.v1.operator_service_pb2_grpc import OperatorServiceAsyncStub as OperatorStub

RUNNING = types_pb2.SEQUENCE_STATE_RUNNING


@run_by(run_operator)
async def test_stats_arrive_under_their_names(engine: FakeEngine, stub: OperatorStub) -> None:
    answer = await stub.GetStats(pb.GetStatsRequest())
    assert answer == engine.statistics.stats()


@run_by(run_operator)
async def test_block_table_of_a_live_request(engine: FakeEngine, stub: OperatorStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no request 'r' is running or waiting") as caught:
        await stub.GetBlockTable(pb.GetBlockTableRequest(request_id="r"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    engine.submit(GenerateCommand("r", [5], SamplingParams()))
    answer = await stub.GetBlockTable(pb.GetBlockTableRequest(request_id="r"))
    assert answer.sequences[0] == pb.SequenceBlocks(
        state=RUNNING,
        num_tokens=9,
        computed_tokens=8,
        block_ids=[7, 3, 1],
        block_hashes=["01" * 32, "02" * 32],
    )


@run_by(run_operator)
async def test_live_requests_in_pages(engine: FakeEngine, stub: OperatorStub) -> None:
    assert await stub.ListRequests(pb.ListRequestsRequest()) == pb.ListRequestsResponse()
    for name in "ab":
        engine.submit(GenerateCommand(name, [5], SamplingParams()))
    answer = await stub.ListRequests(pb.ListRequestsRequest(page_size=1))
    assert (len(answer.requests), answer.total) == (1, 2)
    assert answer.requests[0] == pb.RequestInfo(
        request_id="a", state=RUNNING, priority=-1, num_sequences=1, prompt_tokens=9, cached_tokens=4,
        computed_tokens=8, generated_tokens=2, max_total_tokens=20, num_blocks=3, preemptions=1,
    )  # fmt: skip  # several entries a line: one each would fill a screen
    answer = await stub.ListRequests(pb.ListRequestsRequest(page_size=1, page_token=answer.next_page_token))
    assert ([info.request_id for info in answer.requests], answer.next_page_token) == (["b"], "")


@run_by(run_operator)
async def test_tenants_arrive_under_their_names(engine: FakeEngine, stub: OperatorStub) -> None:
    answer = await stub.ListTenants(pb.ListTenantsRequest())
    assert answer == await engine.snapshots.list_tenants()
    assert (answer.tenants[0].HasField("max_waiting"), answer.tenants[0].HasField("max_running")) == (True, False)


@run_by(run_operator)
async def test_list_blocks_in_pieces_and_by_state(engine: FakeEngine, stub: OperatorStub) -> None:
    answer = await stub.ListBlocks(pb.ListBlocksRequest(page_size=4))
    free, cached, active, pinned = answer.blocks
    assert free == pb.BlockInfo(state=pb.BLOCK_STATE_FREE)
    assert cached == pb.BlockInfo(block_id=1, state=pb.BLOCK_STATE_CACHED, block_hash="cc")
    assert active == pb.BlockInfo(block_id=2, ref_count=2, state=pb.BLOCK_STATE_ACTIVE, block_hash="aa", pins=1)
    assert pinned == pb.BlockInfo(block_id=3, ref_count=1, state=pb.BLOCK_STATE_PINNED, block_hash="ee", pins=1)
    answer = await stub.ListBlocks(pb.ListBlocksRequest(page_size=4, page_token=answer.next_page_token))
    assert [block.block_id for block in answer.blocks] == [4, 5, 6, 7]
    answer = await stub.ListBlocks(pb.ListBlocksRequest(state=pb.BLOCK_STATE_PINNED))
    assert [block.block_id for block in answer.blocks] == [3, 7]
    assert not answer.next_page_token


@pytest.mark.parametrize(("page_size", "pieces"), [(10, [3, 3, 3, 1]), (7, [3, 3, 1]), (3, [3])])
def test_a_long_list_of_blocks_is_made_in_slices(
    page_size: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "BLOCKS_AT_ONCE", 3)
    asked: list[int] = []
    whole = FakeEngine.list_blocks

    def watched(engine: FakeEngine, size: int, *more: Any) -> pb.ListBlocksResponse:
        asked.append(size)
        return whole(engine, size, *more)

    monkeypatch.setattr(FakeEngine, "list_blocks", watched)

    async def body(engine: FakeEngine, stub: OperatorStub) -> None:
        answer = await stub.ListBlocks(pb.ListBlocksRequest(page_size=page_size))
        assert answer == whole(engine, page_size, "", pb.BLOCK_STATE_UNSPECIFIED)

    run_operator(body)
    assert asked == pieces


@run_by(run_operator)
async def test_reset(engine: FakeEngine, stub: OperatorStub) -> None:
    assert (await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())).removed_blocks == 5
    engine.held_blocks = True
    with pytest.raises(grpc.aio.AioRpcError, match="running requests or pins hold blocks") as caught:
        await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    answer = await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(force=True))
    assert answer == pb.ResetPrefixCacheResponse(removed_blocks=5, preempted_sequences=2, ended_pins=1)


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("GetBlockTable", pb.GetBlockTableRequest(), "request_id"),
        ("ListBlocks", pb.ListBlocksRequest(page_token="3"), "page_token"),
        ("ListRequests", pb.ListRequestsRequest(page_token="3"), "page_token"),
        ("ListRequests", pb.ListRequestsRequest(page_size=10001), "page_size"),
        ("ListBlocks", pb.ListBlocksRequest(page_size=10001), "page_size"),
        ("ListBlocks", pb.ListBlocksRequest(state=cast("pb.BlockState.ValueType", 5)), "state"),
    ],
)
@run_by(run_operator)
async def test_bad_fields(engine: FakeEngine, stub: OperatorStub, *, method: str, message: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(field)


@run_by(run_operator)
async def test_a_tenant_has_so_many_watches_open(engine: FakeEngine, stub: OperatorStub) -> None:
    account = engine.accounts.of("")
    account.set_limits(TenantLimits(max_watchers=1))
    first = stub.WatchEvents(pb.WatchEventsRequest())
    await first.read()
    with pytest.raises(grpc.aio.AioRpcError, match="max_watchers: your tenant has 1 of at most 1") as caught:
        await stub.WatchEvents(pb.WatchEventsRequest()).read()
    # As an error with a delay, which a watch that is resumed waits for: its broken call may still count.
    refusal = from_rpc_error(caught.value, "")
    assert isinstance(refusal, Overloaded)
    assert (refusal.retry_delay_s, refusal.limit) == (1.0, 1)
    first.cancel()
    for _ in range(10_000):
        if not account.watchers:
            break
        await asyncio.sleep(0.002)
    await stub.WatchEvents(pb.WatchEventsRequest()).read()
    assert account.usage.refusals == {"max_watchers": 1}
