"""Everything that watches, publishes and records, switched on at once, while memory is short and clients leave: outputs
stay what they are, and all of them tell of the same run.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from support.browser.page_reader import PageReader
from support.clients.calls import Caller, request_for
from support.clients.everything_on import flags, replays
from support.clients.gate import Gate, standing
from support.clients.kv_event_reader import EventReplica, replayed
from support.clients.otlp_collector import collector
from support.clients.plain_text import plain_text
from support.clients.stack import ORACLE, Stack, running_stack

from pagekv.kvmanager.replay.cli import main as replay
from pagekv.kvmanager.replay.trace import read_trace
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb

pytestmark = pytest.mark.e2e

# A third of what the requests below hold at their ends.
BLOCKS = 48
SMALL = ["--num-device-blocks", str(BLOCKS), "--num-host-blocks", "128", "--watermark", "0"]
SMALL += ["--preemption", "swap", "--write-back"]
REQUESTS, CANCELS, TOKENS = 16, 80, 60


def requests() -> list[pb.GenerateRequest]:
    """Greedy and drawn ones, some with a common prefix."""
    rng = random.Random(5)
    common = [rng.randrange(1, 3000) for _ in range(48)]
    prompts = [
        [*(common if index % 3 == 0 else []), *(rng.randrange(1, 3000) for _ in range(rng.randint(40, 120)))]
        for index in range(REQUESTS)
    ]
    return [
        request_for(prompt, TOKENS, ignore_eos=True, temperature=index % 2, seed=index)
        for index, prompt in enumerate(prompts)
    ]


async def leave(caller: Caller, rng: random.Random) -> None:
    """A client that goes away."""
    prompt = [rng.randrange(1, 3000) for _ in range(rng.randint(1, 200))]
    call = caller.inference.Generate(request_for(prompt, 100, ignore_eos=True))
    try:
        for _ in range(rng.randint(0, 4)):
            await asyncio.wait_for(call.read(), rng.choice([0.001, 0.01, 0.1]))
    except TimeoutError:
        pass
    call.cancel()


@asynccontextmanager
async def working(task: asyncio.Task[None]) -> AsyncIterator[None]:
    """Cancelled in the end, and not before."""
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def look(url: str, reader: PageReader) -> None:
    """As a browser that shows the page."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/api/stream") as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                reader.take(json.loads(line[6:]))


async def subscribe(target: str, index: set[int]) -> None:
    """As a gateway: the names of all blocks on the device, which are 56 bits of their hashes."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        async for batch in stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()):
            for event in batch.events:
                if event.HasField("cleared"):
                    index.clear()
                index.difference_update(event.removed.block_hashes)
                index.update(block.block_hash for block in event.stored.blocks)


async def run_load(target: str, gate: Gate) -> operator_pb.GetStatsResponse:
    """Outputs at once, among clients that leave, are those of one at a time; stats of the idle manager."""
    rng, wanted = random.Random(6), requests()
    async with Caller(target) as caller:
        before = (await caller.idle_stats()).free_blocks
        async with standing(gate, caller, [caller.generate(request) for request in wanted]) as staying:
            leaving = [asyncio.create_task(leave(caller, rng)) for _ in range(CANCELS)]
        await asyncio.gather(*leaving)
        together = await asyncio.gather(*staying)
        alone = [(await caller.generate(request)).tokens for request in wanted]
        assert [result.tokens for result in together] == alone
        assert {len(tokens) for tokens in alone} == {TOKENS}
        stats = await caller.idle_stats()
        assert stats.free_blocks == before
        return stats


async def hashes_of(target: str) -> set[int]:
    """The 64-bit hashes of what is cached on the device."""
    async with Caller(target) as caller:
        listed = await caller.operator.ListBlocks(operator_pb.ListBlocksRequest(page_size=4096))
    return {int(block.block_hash[:16], 16) for block in listed.blocks if block.block_hash}


async def missed(directory: Path) -> EventReplica:
    """The table of a subscriber that asks for every event there was."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(replays(directory))
    try:
        return await replayed(dealer)
    finally:
        dealer.close()
        context.term()


async def watched_load(stack: Stack, directory: Path) -> operator_pb.GetStatsResponse:
    """Runs the load, and checks that all watchers have seen it."""
    target, url = stack.target, f"http://{stack.manager.http}"
    reader, index = PageReader(), set[int]()
    async with AsyncExitStack() as watchers:
        for watching in (look(url, reader), subscribe(target, index)):
            await watchers.enter_async_context(working(asyncio.create_task(watching)))
        stats = await run_load(target, stack.gate)
        cached = await hashes_of(target)
        names = {block >> 8 for block in cached}
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            replica = await missed(directory)
            tables = set(replica.blocks["GPU"]) == cached and len(replica.blocks["CPU"]) == stats.host_cached_blocks
            if index == names and tables and not reader.requests and len(reader.device) == BLOCKS:
                break
            await asyncio.sleep(0.02)
        assert set(replica.blocks["GPU"]) == cached != set()
        assert index == names
        assert len(replica.blocks["CPU"]) == stats.host_cached_blocks
        assert (reader.snapshots, len(reader.device), reader.requests) == (1, BLOCKS, {})
        assert reader.messages > 2
    answer = await asyncio.to_thread(urllib.request.urlopen, f"{url}/metrics", timeout=120)
    families = text_string_to_metric_families(answer.read().decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert values["vllm:generation_tokens_total"] == stats.generated_tokens_total
    assert values["vllm:num_preemptions_total"] == stats.preemptions_total
    # Some of the requests that left may have been done by then.
    assert 2 * REQUESTS <= values["vllm:e2e_request_latency_seconds_count"] <= stats.requests_total
    return stats


@plain_text
def test_everything_at_once_changes_no_output_and_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DESIGN 7: what is shown and recorded changes nothing."""
    with collector() as spans:
        with running_stack(ORACLE, [*SMALL, "--page-text", *flags(tmp_path, spans.url)], gated=True) as stack:
            stats = asyncio.run(watched_load(stack, tmp_path))
            assert stack.manager.stop() == 0
            assert " error " not in stack.manager.tail(1000)
        assert stats.swap_preemptions_total > 0
        assert stats.swapped_in_blocks_total > 0
        assert {"generate", "decode", "swapped"} <= {span.name for span in spans.spans}
    records = read_trace(tmp_path / "trace.jsonl", tokens_per_id=16)
    assert sum(record.output_length == TOKENS for record in records) >= 2 * REQUESTS
    assert replay([str(tmp_path / "trace.jsonl"), "--mode", "cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["requests"] == len(records)
    assert replay(["--steps", str(tmp_path / "steps")]) == 0
    assert f"for {stats.requests_total:,} requests in 1 epoch, " in capsys.readouterr().out
