"""KV events over ZeroMQ, as vLLM publishes them (`ZmqEventPublisher`), for routers, indexers and viewers made for vLLM.

A PUB socket sends three frames for each batch: topic, sequence number (8 bytes, big-endian, from 0) and events, as
`vllm_format` packs them. A ROUTER socket replays batches. A request is an empty frame and a sequence number of 8 bytes.
The answer is every kept batch from this number on, each with an empty frame before its three, and at the end the number
-1 without events.

The publisher reads the tables as any watcher does, so the engine loop never waits for it. The publisher never waits for
a subscriber: one that reads too slowly misses batches, notices that by their numbers, and asks for a replay. Only
topics and sequence numbers of bounded size are read from subscribers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable

import zmq
import zmq.asyncio

from pagekv.common.errors import FellBehind, Overloaded, Unavailable
from pagekv.common.logs import Log
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.kvcache.events.subscription import TableWatch
from pagekv.kvmanager.observe.kv_events.vllm_format import BEGINNING, Events, KvEventFormat, MediaKeysOf, pack
from pagekv.kvmanager.scheduling.step_plan import StepPlan

log = Log(__name__)

# Batches that wait for one slow subscriber before it misses any; batches kept for replay, as many as vLLM keeps, and
# their bytes, because a batch may be large.
MAX_UNSENT = 256
MAX_REPLAY_BATCHES = 10_000
MAX_REPLAY_BYTES = 256 * 2**20
# Most replays at once; messages that wait for one slow peer of a replay; and seconds until a peer that reads none of
# them is given up.
MAX_REPLAYS = 8
MAX_UNSENT_REPLAYS = 64
REPLAY_PATIENCE_S = 10.0
# Blocks of the first snapshot, and batches of a replay, that are sent between two turns of the event loop.
SNAPSHOT_PIECE = 256
REPLAY_PIECE = 8
RETRY_S = 1.0
# Seconds between two batches: a reader may be so far behind while much changes. A batch has the changes of all steps
# since the one before. Making and sending a batch takes some tenths of a millisecond, however small it is.
PAUSE_S = 0.2
# Topic of every batch: vLLM's default.
_TOPIC = b""
_END = ((-1).to_bytes(8, "big", signed=True), b"")


class KvEventPublisher(Observer):
    """States: made → bound (`bind`) → publishing (`run`) → closed (`close`)."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", clock: Callable[[], float] = time.time) -> None:
        """Endpoints as of the flags; an empty `replay_endpoint`: no replays. `clock` gives seconds since 1970."""
        self._clock = clock
        self._media = MediaKeysOf()
        self._format = KvEventFormat(self._media)
        self._block_size = 0
        self._numbers = itertools.count()
        # Number and bytes of the batches that can be replayed, oldest first.
        self._sent: deque[tuple[int, bytes]] = deque()
        self._sent_bytes = 0
        self._replays: set[asyncio.Task[None]] = set()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = zmq.asyncio.Context(self._context).socket(zmq.ROUTER) if replay_endpoint else None
        # After `bind` they have the port that was bound, if the flag asks for port 0.
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint

    # -- observer

    def attached(self, model: EngineInfo, epoch: int) -> None:
        self._block_size = model.block_size

    def planned(self, plan: StepPlan) -> None:
        for new in plan.new:
            identity = new.sequence.request.command.identity
            if identity.media:
                self._media.note(new.sequence.digests, self._block_size, identity)

    # -- sockets

    def bind(self) -> None:
        """Opens the sockets. Raises OSError, which names the flag, if an endpoint cannot be bound."""
        self._pub.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        self.endpoint = _bind(self._pub, "--kv-events-endpoint", self.endpoint)
        if self._router is not None:
            self._router.setsockopt(zmq.SNDHWM, MAX_UNSENT_REPLAYS)
            self._router.setsockopt(zmq.RCVHWM, MAX_REPLAYS)
            # Sending to a peer that cannot take more, or is gone, is an error; by default its messages are dropped.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.replay_endpoint = _bind(self._router, "--kv-events-replay-endpoint", self.replay_endpoint)

    def close(self) -> None:
        """Closes the sockets; messages that are not sent within 100 ms are dropped."""
        for task in self._replays:
            task.cancel()
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=100)
        self._context.term()

    async def run(self, engine: EngineLoop) -> None:
        """Publishes until the manager stops."""
        log.info("publishing KV events", endpoint=self.endpoint, replay=self.replay_endpoint or None)
        replays = asyncio.create_task(self._serve_replays(), name="KV event replays")
        try:
            await engine.wait_ready()
            while True:
                try:
                    watch = engine.queries.watch_events()
                    try:
                        await self._publish_changes(watch)
                    finally:
                        watch.close()
                except FellBehind as error:
                    log.warning("KV events begin anew: they could not be published in time", reason=error)
                except Overloaded as error:
                    log.warning("no KV events for now", reason=error)
                    await asyncio.sleep(RETRY_S)
        except Unavailable:
            pass  # the manager is shutting down
        except Exception:
            log.exception("no more KV events")
        finally:
            replays.cancel()

    async def _publish_changes(self, watch: TableWatch) -> None:
        self._publish(BEGINNING)
        while blocks := watch.take_snapshot(SNAPSHOT_PIECE):
            for events in self._format.snapshot(blocks):
                self._publish(events)
            await asyncio.sleep(0)
        while True:
            for events in self._format.changed(await watch.take()):
                self._publish(events)
                await asyncio.sleep(0)
            await asyncio.sleep(PAUSE_S)

    def _publish(self, events: Events) -> None:
        number, payload = next(self._numbers), pack(self._clock(), events)
        # PUB drops messages for which a subscriber has no room, so this never waits.
        self._pub.send_multipart((_TOPIC, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        if self._router is not None:
            self._sent.append((number, payload))
            self._sent_bytes += len(payload)
            while len(self._sent) > MAX_REPLAY_BATCHES or self._sent_bytes > MAX_REPLAY_BYTES:
                self._sent_bytes -= len(self._sent.popleft()[1])

    # -- replays

    async def _serve_replays(self) -> None:
        if self._router is None:
            return
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                log.debug("a malformed request for a replay was ignored", frames=[len(frame) for frame in frames])
                continue
            if len(self._replays) == MAX_REPLAYS:
                continue  # the peer has to ask again
            first = int.from_bytes(frames[2], "big")
            task = asyncio.create_task(self._replay(frames[0], first), name="KV event replay")
            self._replays.add(task)
            task.add_done_callback(self._replays.discard)

    async def _replay(self, asker: bytes, first: int) -> None:
        """Sends all kept batches from number `first` on, and the end. Gives up if the peer reads nothing."""
        batches = [(number.to_bytes(8, "big"), payload) for number, payload in self._sent if number >= first]
        for count, (number, payload) in enumerate([*batches, _END], 1):
            if not await self._answer((asker, b"", _TOPIC, number, payload)):
                return
            if count % REPLAY_PIECE == 0:
                await asyncio.sleep(0)

    async def _answer(self, frames: tuple[bytes, ...]) -> bool:
        assert self._router is not None
        deadline = time.monotonic() + REPLAY_PATIENCE_S
        while True:
            try:
                await self._router.send_multipart(frames, zmq.NOBLOCK)
                return True
            except zmq.Again:
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(0.01)
            except zmq.ZMQError:
                return False  # the peer is gone


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, flag: str, endpoint: str) -> str:
    """Binds a socket; returns the endpoint with its port. Raises OSError, which names the flag."""
    # Only subscriptions and sequence numbers are received.
    socket.setsockopt(zmq.MAXMSGSIZE, 1024)
    # A peer that is gone without closing its connection is noticed, and the messages that wait for it are dropped.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise OSError(f"{flag} {endpoint}: {error}") from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
