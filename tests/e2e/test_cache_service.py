"""Explaining, pinning, resetting and watching the cache of a real stack that is busy with something else."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from contextlib import suppress

import pytest
from support.clients import everything_on
from support.clients.calls import Caller, request_for
from support.clients.gate import at_once, standing
from support.clients.stack import ORACLE, Process, Stack, running_manager, running_stack

from pagekv.client import AsyncPageKVClient, BlockStored, FailedPrecondition, LimitExceeded, TableReplica
from pagekv.client.cli.main import main
from pagekv.client.errors import PageKVError

pytestmark = pytest.mark.e2e

SMALL = ["--num-device-blocks", "96", "--block-size", "4", "--max-batch-tokens", "64"]


async def stored(client: AsyncPageKVClient) -> dict[str, str]:
    """Hash to parent hash of every block in the prefix table, from ListBlocks."""
    listed = await client.list_blocks(page_size=4096)
    return {block.block_hash: block.parent_hash for block in listed.blocks if block.block_hash}


def copied(replica: TableReplica) -> dict[str, str]:
    return {block.block_hash: block.parent_hash for block in replica.blocks.values()}


class Load:
    """Requests with prefixes in common, in a pool that is too small for them, and people who steer the cache."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self.stack = stack
        self.rng = random.Random(seed)
        self.families = [[self.rng.randrange(3, 400) for _ in range(40)] for _ in range(5)]

    def prompt(self) -> list[int]:
        prefix = self.rng.choice(self.families)[: self.rng.randrange(4, 41)]
        return prefix + [self.rng.randrange(3, 400) for _ in range(self.rng.randrange(1, 20))]

    async def generate_one(self, caller: Caller) -> None:
        length = self.rng.randrange(5, 40)
        result = await caller.generate(request_for(self.prompt(), length, ignore_eos=True))
        assert len(result.tokens) == length

    async def generate(self, caller: Caller, count: int, until: asyncio.Event | None = None) -> None:
        """One after the other, so many and until the event is set."""
        while count > 0 or (until is not None and not until.is_set()):
            await self.generate_one(caller)
            count -= 1

    async def steer(self, client: AsyncPageKVClient, killed: asyncio.Event, stop: asyncio.Event) -> None:
        """Until `stop`: pins, unpins, explains, resets, and kills the executor once."""
        pins: list[str] = []
        for round_number in itertools.count():
            if stop.is_set():
                break
            prompt = self.prompt()
            with suppress(LimitExceeded):
                pins.append((await client.pin_prefix(prompt, 600)).pin_id)
            explained = await client.explain_prefix(prompt)
            assert explained.prompt_tokens == len(prompt) == explained.blocks[-1].end
            if pins and self.rng.random() < 0.5:
                pin = pins.pop(self.rng.randrange(len(pins)))
                if pin:
                    await client.unpin_prefix(pin)
            if self.rng.random() < 0.1:
                with suppress(FailedPrecondition):
                    await client.reset_prefix_cache(force=self.rng.random() < 0.5)
            if round_number == 20:
                await asyncio.to_thread(self.stack.executor.kill)
                await asyncio.to_thread(self.stack.executor.start, self.stack.executor.port)
                killed.set()
            await asyncio.sleep(0.01)
        for pin in filter(None, pins):
            await client.unpin_prefix(pin)


def test_a_replica_holds_the_managers_tables_after_everything_that_can_happen_to_it() -> None:
    """Evictions, pins, resets, a killed executor, and a watcher that joins in the middle of it."""

    async def follow(client: AsyncPageKVClient, replica: TableReplica) -> None:
        async for batch in client.watch_events():
            replica.apply(batch)

    async def run(stack: Stack) -> None:
        load = Load(stack, seed=1)
        killed, stop = asyncio.Event(), asyncio.Event()
        replicas = [TableReplica(), TableReplica()]
        async with Caller(stack.target) as caller, AsyncPageKVClient(stack.target) as client:
            watching = [asyncio.create_task(follow(client, replicas[0]))]
            # Twelve at once want more than twice the pool, so that some are preempted.
            await at_once(stack.gate, caller, [load.generate_one(caller) for _ in range(12)])
            steering = asyncio.create_task(load.steer(client, killed, stop))
            working = asyncio.gather(*(load.generate(caller, 10, killed) for _ in range(12)))
            await killed.wait()
            watching.append(asyncio.create_task(follow(client, replicas[1])))
            await working
            stop.set()
            await steering
            await load.generate(caller, 1)  # the last thing that happened may have been a reset
            stats = await caller.idle_stats()
            assert stats.evicted_blocks_total > 0
            # Published KV events are read from a watch, too.
            watchers = 2 + everything_on.ASKED_FOR
            assert (stats.executor_restarts_total, stats.watchers, stats.pins) == (1, watchers, 0)
            table = await stored(client)
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                if all(copied(replica) == table for replica in replicas):
                    break
                await asyncio.sleep(0.01)
            assert [copied(replica) for replica in replicas] == [table, table]
            assert len(table) == stats.published_blocks > 0
            assert all(len(block.token_ids) == 4 for block in replicas[0].blocks.values())
            # Another copy, begun now, has the same host tier as those that followed all the way.
            late = TableReplica()
            async for batch in client.watch_events(snapshot_only=True):
                late.apply(batch)
            assert [replica.host_blocks for replica in replicas] == [late.host_blocks, late.host_blocks]
            assert len(late.host_blocks) == stats.host_cached_blocks
            assert min(stats.swapped_out_blocks_total, stats.written_back_blocks_total) > 0
            for task in watching:
                task.cancel()
            # The server notices that its readers are gone.
            await caller.stats_when(lambda stats: stats.watchers == everything_on.ASKED_FOR)

    tiers = ["--num-host-blocks", "64", "--preemption", "swap", "--write-back"]
    with running_stack([*ORACLE, "--step-time-ms", "2"], [*SMALL, *tiers], gated=True) as stack:
        asyncio.run(run(stack))


def test_a_reader_that_comes_back_needs_no_snapshot(executor: Process) -> None:
    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller, AsyncPageKVClient(stack.target) as client:
            await caller.generate(request_for([*range(3, 40)], 1))
            replica = TableReplica()
            async for batch in client.watch_events(snapshot_only=True):
                replica.apply(batch)
            before = (replica.revision, replica.instance_id, len(replica.blocks))
            assert before[1] == (await client.stats()).instance_id
            named = request_for([*range(100, 140)], 1)
            named.cache.namespace = "n"
            await caller.generate(named)
            watched = client.watch_events(start_revision=before[0], instance_id=before[1], progress_interval=1)
            async for batch in watched:
                assert not batch.snapshot
                assert replica.apply(batch)
                if not batch.events:
                    break
            await watched.close()
            whole = TableReplica()
            async for batch in client.watch_events(snapshot_only=True):
                whole.apply(batch)
            assert copied(replica) == copied(whole)
            assert (replica.revision, len(replica.blocks) > before[2]) == (whole.revision, True)
            for read in (replica, whole):
                names = [(block.namespace, block.adapter) for block in read.blocks.values()]
                assert (names.count(("", "")), names.count(("n", ""))) == (before[2], len(names) - before[2])

    with running_manager(executor, SMALL) as stack:
        asyncio.run(run(stack))


@pytest.mark.long
def test_a_pinned_prefix_outlives_a_flood_and_an_expired_one_does_not(executor: Process) -> None:
    """A lease does what a dummy request would otherwise be kept running for."""

    async def run(stack: Stack) -> None:
        pinned, expired, free = ([base + i for i in range(16)] for base in (10, 100, 200))
        async with Caller(stack.target) as caller, AsyncPageKVClient(stack.target) as client:
            for prompt in (pinned, expired, free):
                await caller.generate(request_for(prompt, 1))
            pin = await client.pin_prefix(pinned, 86_400)
            assert pin.pinned_tokens == 16
            await client.pin_prefix(expired, 1)
            await caller.stats_when(lambda stats: stats.pins == 1)
            await Load(stack, seed=2).generate(caller, 15)
            tokens = [(await client.lookup_prefix(prompt)).device_tokens for prompt in (pinned, expired, free)]
            assert tokens == [16, 0, 0]
            outcomes = {block.outcome for block in (await client.explain_prefix(free)).blocks}
            assert outcomes == {"evicted"}
            states = {block.state for block in (await client.list_blocks(state="pinned")).blocks}
            assert states == {"pinned"}

    with running_manager(executor, SMALL) as stack:
        asyncio.run(run(stack))


def test_a_forced_reset_preempts_and_no_stream_notices(executor: Process, capsys: pytest.CaptureFixture[str]) -> None:
    """By the library, and first by hand: the refusal on the screen names the command that does it."""

    async def type_in(stack: Stack, *words: str) -> tuple[int, str, str]:
        """Exit status and what is on the screen."""
        status = await asyncio.to_thread(main, ["--target", stack.target, *words])
        return status, *capsys.readouterr()

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller, AsyncPageKVClient(stack.target) as client:
            request = request_for([7] * 20, 60, ignore_eos=True)
            wanted = await caller.generate(request)
            async with standing(stack.gate, caller, [caller.generate(request)], steps=4) as (stream,):
                assert await type_in(stack, "reset-cache") == (
                    1,
                    "",
                    "pagekv: running requests or pins hold blocks: wait for them to end, or set force "
                    "(pagekv reset-cache --force)\n",
                )
                status, out, err = await type_in(stack, "reset-cache", "--force")
                assert (status, err) == (0, "")
                assert out.endswith(" blocks removed; 1 sequence preempted, 0 pins ended\n")
                await stack.gate.pass_through(8, caller)
                for _ in range(4):
                    with pytest.raises(FailedPrecondition):
                        await client.reset_prefix_cache()
                    assert (await client.reset_prefix_cache(force=True)).preempted_sequences == 1
                    # Its tokens in flight, its prompt again, and a few tokens more.
                    await stack.gate.pass_through(8, caller)
            assert (await stream).tokens == wanted.tokens

    with running_manager(executor, SMALL) as stack:
        asyncio.run(run(stack))


def test_a_watch_ends_with_its_manager(executor: Process) -> None:
    async def run(stack: Stack) -> None:
        async with AsyncPageKVClient(stack.target, resume_timeout=0) as client:
            watched = client.watch_events()
            first = await anext(watched)
            assert (first.snapshot, first.events) == (True, ())
            stopping = asyncio.create_task(asyncio.to_thread(stack.manager.stop))
            with pytest.raises(PageKVError, match="shutting down"):
                await anext(watched)
            assert await stopping == 0

    with running_manager(executor, SMALL) as stack:
        asyncio.run(run(stack))


def test_the_snapshot_of_a_large_table_fits_its_messages(executor: Process) -> None:
    """16,384 blocks in more than 16 messages."""

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller, AsyncPageKVClient(stack.target) as client:
            for base in range(8):
                await caller.generate(request_for([3 + (base + i) % 400 for i in range(2000)], 1))
            batches = [batch async for batch in client.watch_events(snapshot_only=True)]
            replica = TableReplica()
            assert [replica.apply(batch) for batch in batches] == [False] * (len(batches) - 1) + [True]
            assert len(batches) >= 16
            blocks = [block async for block in client.iter_blocks()]
            assert copied(replica) == {block.block_hash: block.parent_hash for block in blocks if block.block_hash}
            known: set[str] = set()
            roots: set[str] = set()
            for batch in batches:
                for event in batch.events:
                    assert isinstance(event, BlockStored)
                    if event.parent_hash not in known:
                        roots.add(event.parent_hash)
                    known.add(event.block_hash)
            # All in one namespace: the only parent that is no block before it is the one root.
            assert len(roots) == 1

    args = ["--num-device-blocks", "17000", "--block-size", "1", "--max-batch-tokens", "8192"]
    with running_manager(executor, args) as stack:
        asyncio.run(run(stack))
