"""An engine for tests of the services: does what the test says, and records what it was told."""

from __future__ import annotations

from collections.abc import Sequence

from pagekv.common.errors import AlreadyExists, Unavailable
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.paging import page_token, read_page_token
from pagekv.kvmanager.engine.queries import EngineQueries
from pagekv.kvmanager.engine.snapshots import EngineSnapshots
from pagekv.kvmanager.engine.statistics import EngineStatistics
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, root_digest
from pagekv.kvmanager.kvcache.events.batch import Stored
from pagekv.kvmanager.kvcache.events.subscription import TableWatch
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand
from pagekv.kvmanager.request.stream import RequestStream, SequenceDelta
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt
from pagekv.kvmanager.tenants.accounts import Account, Accounts
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2

RUNNING = types_pb2.SEQUENCE_STATE_RUNNING
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


class FakeCache(CacheAdmin):
    """The pins of a FakeEngine, and the roots of its prompts."""

    def __init__(self, pins_of: list[str | None]) -> None:
        self._pins_of = pins_of

    def root(self, identity: CacheIdentity) -> bytes:
        return root_digest(MODEL.model_fingerprint, identity.namespace, identity.adapter_id, tenant=identity.tenant)

    def list_pins(self, owner: str | None = None) -> pb.ListPinsResponse:
        self._pins_of.append(owner)
        return pb.ListPinsResponse(pins=[pb.PinInfo(pin_id="pin-60", pinned_tokens=8, namespace="n", adapter="a")])

    def unpin(self, pin_id: str, owner: str | None = None) -> int:
        self._pins_of.append(owner)
        return 8 if pin_id == "pin-60" else 0


class FakeEngine(EngineLoop, EngineQueries, EngineSnapshots, EngineStatistics):
    """An engine without a loop, and all that is asked of it. Tests push deltas with `push`; nothing else happens."""

    model: EngineInfo | None = MODEL

    def __init__(self, model: EngineInfo | None = MODEL) -> None:
        self.queries: EngineQueries = self
        self.snapshots: EngineSnapshots = self
        self.statistics: EngineStatistics = self
        self.model = model
        self.accounts = Accounts()
        self.live: dict[str, RequestStream] = {}
        self.commands: list[GenerateCommand] = []
        self.aborted: list[str] = []
        self.stopped: list[tuple[str, int]] = []
        # Streams whose readers went away.
        self.left: list[RequestStream] = []
        self.lookups: list[tuple[list[int], CacheIdentity]] = []
        # The tenant whose pins each call was about; None: everybody.
        self.pins_of: list[str | None] = []
        self._pins = FakeCache(self.pins_of)
        self.refusal: Exception | None = None
        # Of the tokens submitted, as every delta says.
        self.cached_tokens = 1
        self.held_blocks = False
        # The table that a watch begins with, and the watch of the latest WatchEvents.
        self.table: list[Stored] = []
        self.watch: TableWatch | None = None
        self.ended_watches: list[TableWatch] = []

    @property
    def cache(self) -> CacheAdmin:
        return self._pins

    def not_attached(self) -> Unavailable:
        return Unavailable("no executor is attached yet")

    async def queue(self, command: GenerateCommand) -> RequestStream:
        return self.submit(command)

    def submit(self, command: GenerateCommand, prepared: PreparedPrompt | None = None) -> RequestStream:
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
            SequenceDelta(
                index,
                list(tokens),
                cached_tokens=self.cached_tokens,
                preemptions=2,
                finish=finish,
                stop_token_id=stop,
            )
        )

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
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

    def stats(self) -> operator_pb.GetStatsResponse:
        fields = operator_pb.GetStatsResponse.DESCRIPTOR.fields
        names = [field.name for field in fields if field.name not in ("instance_id", "start_time", "executor_rank_us")]
        stats = operator_pb.GetStatsResponse(instance_id="run-1", executor_rank_us=[7, 8])
        for number, name in enumerate(names):
            setattr(stats, name, True if name == "executor_attached" else number)
        return stats

    async def prepare(
        self, token_ids: Sequence[int], identity: CacheIdentity, tenant: str = ""
    ) -> PreparedPrompt | None:
        return None

    def lookup_prefix(
        self, token_ids: Sequence[int], identity: CacheIdentity, prepared: PreparedPrompt | None = None
    ) -> pb.LookupPrefixResponse:
        self.lookups.append((list(token_ids), identity))
        return pb.LookupPrefixResponse(
            prompt_tokens=len(token_ids), device_tokens=8, host_tokens=4, block_ids=[7, 3], partial_tokens=2
        )

    async def explain_prefix(
        self,
        token_ids: Sequence[int],
        identity: CacheIdentity,
        page_size: int,
        token: str = "",
        prepared: PreparedPrompt | None = None,
        *,
        numbers: bool = True,
    ) -> pb.ExplainPrefixResponse:
        self.lookups.append((list(token_ids), identity))
        blocks = [
            pb.BlockExplanation(
                end=4, outcome=pb.BLOCK_OUTCOME_HIT, reason="cached", block_hash="aa", block_id=7, shared_tokens=4
            ),
            pb.BlockExplanation(
                start=4, end=8, outcome=pb.BLOCK_OUTCOME_EVICTED, reason="evicted", steps_ago=0, seconds_ago=0.5
            ),
            pb.BlockExplanation(start=8, end=9, outcome=pb.BLOCK_OUTCOME_PARTIAL_TAIL, reason="tail"),
        ]
        start = read_page_token(b"explain", token, 3)
        end = min(3, start + page_size)
        return pb.ExplainPrefixResponse(
            blocks=blocks[start:end],
            next_page_token=page_token(b"explain", end) if end < 3 else "",
            prompt_tokens=len(token_ids),
            cached_tokens=4,
        )

    def pin_prefix(
        self,
        token_ids: Sequence[int],
        identity: CacheIdentity,
        lease_s: int,
        pin_id: str = "",
        prepared: PreparedPrompt | None = None,
        account: Account | None = None,
        tenant: str = "",
    ) -> pb.PinPrefixResponse:
        if self.refusal is not None:
            raise self.refusal
        self.lookups.append((list(token_ids), identity))
        self.pins_of.append(tenant)
        return pb.PinPrefixResponse(pin_id=pin_id or f"pin-{lease_s}", pinned_tokens=8)

    async def list_tenants(self) -> operator_pb.ListTenantsResponse:
        return operator_pb.ListTenantsResponse(tenants=[operator_pb.TenantInfo(name="a", weight=2, max_waiting=0)])

    async def block_tables(self, request_id: str) -> operator_pb.GetBlockTableResponse | None:
        if request_id not in self.live:
            return None
        table = operator_pb.SequenceBlocks(
            state=RUNNING,
            num_tokens=9,
            computed_tokens=8,
            block_ids=[7, 3, 1],
            block_hashes=["01" * 32, "02" * 32],
        )
        return operator_pb.GetBlockTableResponse(sequences=[table])

    async def list_requests_in_slices(self, page_size: int, token: str = "") -> operator_pb.ListRequestsResponse:
        return self.list_requests(page_size, token)

    def list_requests(self, page_size: int, token: str = "") -> operator_pb.ListRequestsResponse:
        infos = [
            operator_pb.RequestInfo(
                request_id=name, state=RUNNING, priority=-1, num_sequences=1, prompt_tokens=9, cached_tokens=4,
                computed_tokens=8, generated_tokens=2, max_total_tokens=20, num_blocks=3, preemptions=1,
            )
            for name in self.live
        ]  # fmt: skip  # several entries a line: one each would fill a screen
        start = read_page_token(b"requests", token, 99)
        return operator_pb.ListRequestsResponse(
            requests=infos[start : start + page_size],
            total=len(infos),
            next_page_token=page_token(b"requests", start + page_size) if len(infos) > start + page_size else "",
        )

    def list_blocks(
        self, page_size: int, token: str, state: operator_pb.BlockState.ValueType
    ) -> operator_pb.ListBlocksResponse:
        kinds = [
            operator_pb.BlockInfo(state=operator_pb.BLOCK_STATE_FREE),
            operator_pb.BlockInfo(state=operator_pb.BLOCK_STATE_CACHED, block_hash="cc"),
            operator_pb.BlockInfo(state=operator_pb.BLOCK_STATE_ACTIVE, ref_count=2, block_hash="aa", pins=1),
            operator_pb.BlockInfo(state=operator_pb.BLOCK_STATE_PINNED, ref_count=1, block_hash="ee", pins=1),
        ]
        blocks = []
        for block_id in range(read_page_token(b"blocks", token, 10), 10):
            block = operator_pb.BlockInfo(block_id=block_id)
            block.MergeFrom(kinds[block_id % 4])
            if state in (operator_pb.BLOCK_STATE_UNSPECIFIED, block.state):
                blocks.append(block)
        after = page_token(b"blocks", blocks[page_size].block_id) if len(blocks) > page_size else ""
        return operator_pb.ListBlocksResponse(blocks=blocks[:page_size], next_page_token=after)

    def reset_prefix_cache(self, force: bool) -> operator_pb.ResetPrefixCacheResponse | None:
        if force:
            return operator_pb.ResetPrefixCacheResponse(removed_blocks=5, preempted_sequences=2, ended_pins=1)
        return None if self.held_blocks else operator_pb.ResetPrefixCacheResponse(removed_blocks=5)

    @property
    def instance_id(self) -> str:
        return "run-1"

    def watch_events(self, start_revision: int = 0) -> TableWatch:
        if self.refusal is not None:
            raise self.refusal
        table = iter(()) if start_revision else iter(self.table)
        self.watch = TableWatch(table, self.ended_watches.append, start_revision or 7, max_unread=5000)
        return self.watch
