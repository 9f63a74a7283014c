"""An engine for tests of the services: does what the test says, and records what it was told."""

from __future__ import annotations

from dataclasses import fields

from pagekv.common.errors import AlreadyExists
from pagekv.kvmanager.engine.queries import EngineQueries
from pagekv.kvmanager.engine.views import (
    BlockOutcome,
    BlockView,
    EngineInfo,
    EngineStats,
    ExplainedBlock,
    ExplainedPrefix,
    PinResult,
    PrefixMatch,
    RequestView,
    ResetCounts,
    SequenceView,
)
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.events.batch import Stored
from pagekv.kvmanager.kvcache.events.subscription import TableWatch
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand
from pagekv.kvmanager.request.stream import RequestStream, SequenceDelta

MODEL = EngineInfo(
    model_id="small",
    model_fingerprint="f00d",
    max_model_len=64,
    vocab_size=400,
    eos_token_ids=(1,),
    block_size=4,
    num_device_blocks=10,
    num_host_blocks=0,
    backend="oracle",
)


class FakeEngine(EngineQueries):
    """Implements `interface.Engine` and its queries. The test pushes deltas with `push`; nothing happens by itself."""

    def __init__(self, model: EngineInfo | None = MODEL) -> None:
        self.queries: EngineQueries = self
        self.model = model
        self.live: dict[str, RequestStream] = {}
        self.commands: list[GenerateCommand] = []
        self.aborted: list[str] = []
        self.stopped: list[tuple[str, int]] = []
        # Streams whose readers went away.
        self.left: list[RequestStream] = []
        self.lookups: list[tuple[list[int], CacheIdentity]] = []
        self.refusal: Exception | None = None
        self.held_blocks = False
        # The table that a watch begins with, and the watch of the latest WatchEvents.
        self.table: list[Stored] = []
        self.watch: TableWatch | None = None
        self.ended_watches: list[TableWatch] = []

    def submit(self, command: GenerateCommand) -> RequestStream:
        if self.refusal is not None:
            raise self.refusal
        if command.request_id in self.live:
            raise AlreadyExists("request_id", f"{command.request_id!r} is in use by a running request")
        self.commands.append(command)
        stream = self.live[command.request_id] = RequestStream(command.request_id, command.n)
        return stream

    def push(self, request_id: str, *tokens: int, index: int = 0, finish: FinishReason | None = None) -> None:
        """Tokens for one sequence; a finish of STOP says that the last of them is a stop token."""
        stop = tokens[-1] if finish is FinishReason.STOP else None
        self.live[request_id].push(
            SequenceDelta(index, list(tokens), cached_tokens=4, preemptions=2, finish=finish, stop_token_id=stop)
        )

    def abort(self, request_id: str) -> bool:
        stream = self.live.pop(request_id, None)
        if stream is None:
            return False
        self.aborted.append(request_id)
        for index in range(len(stream._open)):
            stream.push(SequenceDelta(index, finish=FinishReason.ABORT))
        return True

    def release(self, stream: RequestStream) -> None:
        self.left.append(stream)
        if self.live.get(stream.request_id) is stream and stream._open:
            self.abort(stream.request_id)

    def finish_sequence(self, stream: RequestStream, index: int) -> None:
        self.stopped.append((stream.request_id, index))
        stream._open.discard(index)

    def stats(self) -> EngineStats:
        numbers = {field.name: number for number, field in enumerate(fields(EngineStats)) if field.type != "bool"}
        return EngineStats(**numbers, executor_attached=True)

    def lookup_prefix(self, token_ids: list[int], identity: CacheIdentity) -> PrefixMatch:
        self.lookups.append((token_ids, identity))
        return PrefixMatch(device_tokens=8, host_tokens=4, block_ids=[7, 3], partial_tokens=2)

    def explain_prefix(self, token_ids: list[int], identity: CacheIdentity, start: int, limit: int) -> ExplainedPrefix:
        self.lookups.append((token_ids, identity))
        hit = ExplainedBlock(0, 4, BlockOutcome.HIT, "cached", b"\xaa", 7, 4)
        old = ExplainedBlock(4, 8, BlockOutcome.EVICTED, "evicted", b"\xbb", steps_ago=0, seconds_ago=0.5)
        tail = ExplainedBlock(8, 9, BlockOutcome.PARTIAL_TAIL, "tail")
        end = min(3, start + limit)
        return ExplainedPrefix([hit, old, tail][start:end], end if end < 3 else None, 4)

    def pin_prefix(self, token_ids: list[int], identity: CacheIdentity, lease_s: int) -> PinResult:
        if self.refusal is not None:
            raise self.refusal
        self.lookups.append((token_ids, identity))
        return PinResult(f"pin-{lease_s}", 8)

    def unpin_prefix(self, pin_id: str) -> int:
        return 8 if pin_id == "pin-60" else 0

    def block_tables(self, request_id: str) -> list[SequenceView] | None:
        if request_id not in self.live:
            return None
        return [SequenceView(0, "running", 9, 8, [7, 3, 1], [b"\x01" * 32, b"\x02" * 32])]

    def list_requests(self, limit: int) -> tuple[list[RequestView], int]:
        views = [RequestView(name, "running", -1, 1, 9, 4, 8, 2, 20, 3, 1) for name in self.live]
        return views[:limit], len(views)

    def list_blocks(self, start: int, limit: int, state: str | None) -> tuple[list[BlockView], int | None]:
        kinds = [("free", 0, b"", 0), ("cached", 0, b"\xcc", 0), ("active", 2, b"\xaa", 1), ("pinned", 1, b"\xee", 1)]
        blocks = [
            BlockView(i, kinds[i % 4][1], kinds[i % 4][2], b"", kinds[i % 4][3])
            for i in range(start, 10)
            if state in (None, kinds[i % 4][0])
        ]
        return blocks[:limit], (blocks[limit].block_id if len(blocks) > limit else None)

    def reset_prefix_cache(self, force: bool) -> ResetCounts | None:
        if force:
            return ResetCounts(5, 2, 1)
        return None if self.held_blocks else ResetCounts(5)

    def watch_events(self) -> TableWatch:
        if self.refusal is not None:
            raise self.refusal
        self.watch = TableWatch(iter(self.table), self.ended_watches.append, max_unread=5000)
        return self.watch
