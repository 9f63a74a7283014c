"""KV events over real ZeroMQ sockets: frames, numbers, replay, slow and silent subscribers, and radixview."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest
import zmq
import zmq.asyncio
from radixview.discover import PublisherSet, RankPublisher
from radixview.subscribe import listen
from radixview.tree import CacheTree
from support.clients.kv_event_reader import AllBlocksCleared, EventReplica, decode
from support.engine.engine_harness import VOCAB, Bench, command, expect, read, run, until
from support.event_loop import in_event_loop

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.kvcache.block_hash import short_hash
from pagekv.kvmanager.observe.kv_events import publisher as kv_event_publisher
from pagekv.kvmanager.observe.kv_events.publisher import KvEventPublisher
from pagekv.kvmanager.observe.kv_events.vllm_format import Events
from pagekv.v1 import operator_service_pb2 as pb

Body = Callable[[EngineLoop, Bench, KvEventPublisher], Awaitable[None]]
EIGHT = [*range(8)]


def published(monkeypatch: pytest.MonkeyPatch, directory: Path, body: Body, **config: int) -> None:
    """Runs a test beside an engine whose events are published."""
    publisher = KvEventPublisher(f"ipc://{directory}/events", f"ipc://{directory}/replay", clock=lambda: 7.5)
    # So that there are many batches.
    monkeypatch.setattr(kv_event_publisher, "PAUSE_S", 0.001)

    async def with_publisher(engine: EngineLoop, bench: Bench) -> None:
        publisher.bind()
        publishing = asyncio.create_task(publisher.run(engine))
        try:
            await body(engine, bench, publisher)
            assert not publishing.done()
        finally:
            publishing.cancel()
            publisher.close()

    run(with_publisher, observers=[publisher], **config)


class Subscriber:
    """As vLLM's example subscriber: SUB for new batches, a DEALER with an empty frame for missed ones."""

    def __init__(self, publisher: KvEventPublisher, topic: bytes = b"", most_unread: int = 1000) -> None:
        context = zmq.asyncio.Context.instance()
        self.sub, self.dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        for socket, endpoint in ((self.sub, publisher.endpoint), (self.dealer, publisher.replay_endpoint)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, most_unread)
            socket.connect(endpoint)
        self.replica = EventReplica()
        self.next = 0

    async def follow(self) -> None:
        """Applies batches for ever; asks for missed ones."""
        while True:
            _, number, payload = await self.sub.recv_multipart()
            if int.from_bytes(number, "big") > self.next:
                await self.catch_up()
            self.apply(number, payload)

    def apply(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") == self.next:
            self.replica.apply(decode(payload))
            self.next += 1

    async def replayed(self, first: int) -> list[list[bytes]]:
        """The answer to a request for everything from `first` on, the end included."""
        await self.dealer.send_multipart((b"", first.to_bytes(8, "big")))
        answer: list[list[bytes]] = []
        while not answer or answer[-1][2] != b"\xff" * 8:
            answer.append(await self.dealer.recv_multipart())
        return answer

    async def catch_up(self) -> None:
        for _, _, number, payload in (await self.replayed(self.next))[:-1]:
            self.apply(number, payload)

    def close(self) -> None:
        self.sub.close()
        self.dealer.close()


def device_hashes(engine: EngineLoop) -> set[int]:
    blocks = engine.snapshots.list_blocks(9999, "", pb.BLOCK_STATE_UNSPECIFIED).blocks
    return {short_hash(bytes.fromhex(block.block_hash)) for block in blocks if block.block_hash}


async def work(engine: EngineLoop, rounds: int = 6, first: int = 0) -> None:
    for number in range(first, first + rounds):
        streams = [engine.submit(command(f"{number}-{i}", [i, number, *EIGHT], 8)) for i in range(4)]
        assert [await read(stream) for stream in streams] == [expect([i, number, *EIGHT], 8) for i in range(4)]


async def work_until(engine: EngineLoop, condition: Callable[[], bool]) -> None:
    """A batch has all that happened since the one before: a fast machine makes few of the same work."""
    numbers = itertools.count()
    while not condition():
        await work(engine, 1, next(numbers) % VOCAB)


def test_frames_numbers_and_replay_are_vllms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def body(engine: EngineLoop, bench: Bench, publisher: KvEventPublisher) -> None:
        subscriber = Subscriber(publisher)
        await work_until(engine, lambda: len(publisher._sent) > 3)
        answer = await subscriber.replayed(0)
        assert all(len(frames) == 4 and frames[0] == b"" for frames in answer)
        assert [frames[1] for frames in answer] == [b""] * len(answer)
        assert [int.from_bytes(frames[2], "big") for frames in answer[:-1]] == [*range(len(answer) - 1)]
        assert answer[-1] == [b"", b"", b"\xff" * 8, b""]
        first = decode(answer[0][3])
        assert (first.ts, first.events, first.data_parallel_rank) == (7.5, [AllBlocksCleared()], 0)
        assert await subscriber.replayed(len(answer) + 99) == answer[-1:]
        assert (await subscriber.replayed(2))[0] == answer[2]
        # Malformed requests are not answered, and harm nobody.
        for frames in ((b"x",), (b"", b"short"), (b"", b"8 bytes!", b"more"), (b"y", b"8 bytes!")):
            await subscriber.dealer.send_multipart(frames)
        again = await subscriber.replayed(1)  # with what was sent meanwhile
        assert len(again) >= len(answer) - 1
        assert [int.from_bytes(frames[2], "big") for frames in again[:-1]] == [*range(1, len(again))]
        subscriber.close()

    published(monkeypatch, tmp_path, body)


def test_a_subscriber_that_joins_late_and_asks_for_the_rest_holds_the_managers_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Evictions, a reset and a lost executor on the way; a subscriber to another topic gets nothing."""

    async def body(engine: EngineLoop, bench: Bench, publisher: KvEventPublisher) -> None:
        await work(engine)
        subscriber, deaf = Subscriber(publisher), Subscriber(publisher, b"kv@other")
        following = [asyncio.create_task(one.follow()) for one in (subscriber, deaf)]
        # Subscriptions take a moment; what goes by meanwhile is asked for.
        for number in itertools.count():
            await work(engine, 1)
            if subscriber.next:
                break
            if number % 2:
                engine.queries.reset_prefix_cache(force=True)
        engine.queries.reset_prefix_cache(force=False)
        await work(engine)
        assert bench.link is not None
        bench.link.lose()
        await until(lambda: len(bench.attaches) == 2)
        await work(engine)
        await until(lambda: set(subscriber.replica.blocks["GPU"]) == device_hashes(engine))
        assert device_hashes(engine)
        assert engine.statistics.stats().evicted_blocks_total > 0
        assert deaf.next == 0
        for task in following:
            task.cancel()
        subscriber.close()
        deaf.close()

    published(monkeypatch, tmp_path, body, num_device_blocks=24)


def test_replays_reach_back_as_far_as_the_buffer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def body(engine: EngineLoop, bench: Bench, publisher: KvEventPublisher) -> None:
        await work_until(engine, lambda: bool(publisher._sent) and publisher._sent[0][0] > 0)
        subscriber = Subscriber(publisher)
        numbers = [int.from_bytes(frames[2], "big") for frames in (await subscriber.replayed(0))[:-1]]
        assert numbers[0] > 0
        assert numbers == [*range(numbers[0], numbers[0] + 3)]
        subscriber.close()

    monkeypatch.setattr(kv_event_publisher, "MAX_REPLAY_BATCHES", 3)
    published(monkeypatch, tmp_path, body)


def test_neither_a_subscriber_nor_an_asker_that_reads_nothing_holds_anything_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CVE-2025-30202: a subscriber that stops reading must not stall the publisher; the memory it takes is bounded."""
    monkeypatch.setattr(kv_event_publisher, "MAX_UNSENT", 4)
    monkeypatch.setattr(kv_event_publisher, "MAX_UNSENT_REPLAYS", 4)
    # Only the test makes time go by: on a busy machine the keen one must not seem to be stuck too.
    now = [0.0]
    monkeypatch.setattr(kv_event_publisher, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def body(engine: EngineLoop, bench: Bench, publisher: KvEventPublisher) -> None:
        stuck, keen = Subscriber(publisher, most_unread=1), Subscriber(publisher)
        # Enough to fill what the operating system keeps for a socket that nobody reads.
        for _ in range(400):
            publisher._publish(Events(1, msgpack.packb({"type": "AllBlocksCleared", "padding": "x" * 8000})))
        for _ in range(3):
            await stuck.dealer.send_multipart((b"", bytes(8)))
        await until(lambda: len(publisher._replays) == 3)
        await work(engine)
        assert len(await keen.replayed(0)) > 400
        # All but the keen one's, which may not have ended yet.
        await until(lambda: len(publisher._replays) == 3)
        # Given up.
        now[0] = kv_event_publisher.REPLAY_PATIENCE_S + 1
        await until(lambda: not publisher._replays)
        received = 0
        while await stuck.dealer.poll(100):
            received += len(await stuck.dealer.recv_multipart()) > 0
        assert received < 3 * 400
        stuck.close()
        keen.close()

    published(monkeypatch, tmp_path, body)


def test_a_stream_that_could_not_be_published_in_time_begins_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def body(engine: EngineLoop, bench: Bench, publisher: KvEventPublisher) -> None:
        await work(engine)
        (watch,) = engine._state.cache.log._watches
        watch._max_unread = 0
        await work(engine, 1)
        await until(lambda: engine._state.cache.log._watches not in ([], [watch]))
        await work(engine, 1)
        subscriber = Subscriber(publisher)
        await subscriber.catch_up()
        while set(subscriber.replica.blocks["GPU"]) != device_hashes(engine):
            await asyncio.sleep(0.01)
            await subscriber.catch_up()
        subscriber.close()

    published(monkeypatch, tmp_path, body)


def test_radixview_draws_the_managers_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real consumer: its own subscriber thread, decoder and tree."""

    async def body(engine: EngineLoop, bench: Bench, publisher: KvEventPublisher) -> None:
        tree, stop = CacheTree(), threading.Event()
        publishers = PublisherSet(4, (RankPublisher(0, publisher.endpoint, ""),))
        viewer = threading.Thread(target=listen, args=(publishers, stop), kwargs={"tree": tree})
        viewer.start()
        try:
            while not tree.snapshot()["stats"]["blocks"]:
                await work(engine, 1)
                engine.queries.reset_prefix_cache(force=True)
            engine.queries.reset_prefix_cache(force=False)
            await work(engine, 2)
            wanted = {str(number) for number in device_hashes(engine)}

            def drawn() -> set[str]:
                return {block.hash for run in tree.view().runs.values() for block in run}

            await until(lambda: drawn() == wanted)
            assert tree.view().stats["missing"] == 0
            assert tree.view().stats["tokens"] == 4 * len(wanted) > 0
        finally:
            stop.set()
            await asyncio.to_thread(viewer.join)

    published(monkeypatch, tmp_path, body)


def test_an_endpoint_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    for wrong in ("tcp://203.0.113.1:5557", f"ipc://{tmp_path}/none/such"):
        publisher = KvEventPublisher(wrong)
        with pytest.raises(OSError, match=f"--kv-events-endpoint {wrong}: "):
            publisher.bind()
        publisher.close()


@in_event_loop
async def test_port_0_takes_a_free_one() -> None:
    publisher = KvEventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    publisher.bind()
    ports = [int(endpoint.rpartition(":")[2]) for endpoint in (publisher.endpoint, publisher.replay_endpoint)]
    assert min(ports) > 0
    assert ports[0] != ports[1]
    publisher.close()
