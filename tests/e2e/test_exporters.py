"""KV events and recordings of a manager process that serves: real sockets and files, and a disk that is full."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from support.clients.calls import Caller, request_for
from support.clients.gate import standing
from support.clients.kv_event_reader import replayed
from support.clients.stack import ORACLE, Stack, environment, running_stack

from pagekv.client import AsyncPageKVClient

pytestmark = pytest.mark.e2e

SMALL = ["--num-device-blocks", "64", "--block-size", "4", "--num-host-blocks", "64", "--preemption", "swap"]


def pagekv(*arguments: str) -> str:
    """Standard output of the command."""
    command = [sys.executable, "-m", "pagekv.client.cli", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def load(stack: Stack, *, kill: bool = False) -> None:
    """Sixteen requests at once; `kill`: the executor is lost in the middle of them."""
    async with Caller(stack.target) as caller:
        prompts = [[3 + i % 7] * 12 + [20 + i] for i in range(16)]
        calls = [caller.generate(request_for(prompt, 20, ignore_eos=True)) for prompt in prompts]
        async with standing(stack.gate, caller, calls, steps=10) as working:
            if kill:
                await asyncio.to_thread(stack.executor.kill)
                await asyncio.to_thread(stack.executor.start, stack.executor.port)
        assert [len(result.tokens) for result in await asyncio.gather(*working)] == [20] * 16


def test_events_traces_and_decisions_of_one_run(tmp_path: Path) -> None:
    """An executor is killed on the way; the workload trace has every request, the decisions are derived again, and
    a subscriber that asks for every event holds the manager's tables.
    """
    events, replays = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"
    flags = ["--kv-events", "--kv-events-endpoint", events, "--kv-events-replay-endpoint", replays, "--write-back"]
    files = ["--record", str(tmp_path / "trace"), "--record-steps", str(tmp_path / "steps")]

    async def run(stack: Stack) -> None:
        await load(stack)
        await load(stack, kill=True)
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(replays)
        async with AsyncPageKVClient(stack.target) as client:
            stats = await client.stats()
            listed = await client.list_blocks(page_size=4096)
        hashes = {int(block.block_hash[:16], 16) for block in listed.blocks if block.block_hash}
        # The last batch comes a moment after its step.
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            replica = await replayed(dealer)
            if set(replica.blocks["GPU"]) == hashes and len(replica.blocks["CPU"]) == stats.host_cached_blocks:
                break
            await asyncio.sleep(0.01)
        dealer.close()
        context.term()
        assert set(replica.blocks["GPU"]) == hashes != set()
        assert len(replica.blocks["CPU"]) == stats.host_cached_blocks
        assert stats.preemptions_total > 0

    with running_stack(ORACLE, [*SMALL, *flags, *files], gated=True) as stack:
        asyncio.run(run(stack))
        assert stack.manager.stop() == 0
        lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
        assert [(line["input_length"], line["output_length"], len(line["hash_ids"])) for line in lines] == [
            (13, 20, 4)
        ] * 32
        (row,) = json.loads(pagekv("replay", str(tmp_path / "trace"), "--mode", "cache", "--json"))["rows"]
        assert row["requests"] == 32
        assert "for 32 requests in 2 epochs" in pagekv("replay", "--steps", str(tmp_path / "steps"))


def test_a_full_disk_ends_recordings_and_nothing_else() -> None:
    """DESIGN 7: serving goes on, and one line of the log says what ended."""
    flags = ["--record", "/dev/full", "--record-steps", "/dev/full", "--log-format", "json"]
    with running_stack(ORACLE, [*SMALL, *flags], gated=True) as stack:
        for _ in range(2):
            asyncio.run(load(stack))
        assert stack.manager.stop() == 0
        logged = [json.loads(line) for line in stack.manager.log.read_text().splitlines()]
        ended = [(line["what"], line["level"]) for line in logged if line["message"].startswith("recording ended")]
        assert sorted(ended) == [("requests", "error"), ("steps", "error")]
