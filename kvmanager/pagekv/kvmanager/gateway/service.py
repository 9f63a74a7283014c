"""vllm.grpc.engine.VllmEngine, the protocol of the gateway `smg`, over the same engine as `pagekv.v1`.

The stubs come from the package `smg-grpc-proto` (extra `gateway-api`), so this module is imported only on demand. Calls
that a gateway makes for text models are served; the others are UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from pagekv.common.errors import FailedPrecondition, InvalidRequest, NotImplementedYet
from pagekv.common.version import pagekv_version
from pagekv.kvmanager.access.caller import tenant_in_reach
from pagekv.kvmanager.api.generate_call import GenerateCall
from pagekv.kvmanager.api.inference_service import trace_parent_of
from pagekv.kvmanager.api.served_model import Served, ServedModel
from pagekv.kvmanager.api.validation import read_abort_ids
from pagekv.kvmanager.api.watch_call import open_watch
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.gateway.generate import read_generate, write_response
from pagekv.kvmanager.gateway.kv_events import MAX_BLOCKS, KvEvents
from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.v1 import inference_service_pb2 as pb

# Bytes of a tokenizer's archive in one message.
TOKENIZER_CHUNK = 64 * 1024
# Files of a tokenizer's directory that a gateway needs; no weights.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
# Most seconds that FlushCache may wait, and seconds between two attempts.
MAX_FLUSH_S = 600.0
FLUSH_STEP_S = 0.02
# Seconds between two messages to a subscriber: a gateway's copy of the table may be so old while much changes. Making
# and writing a message takes most of a millisecond, however small it is.
EVENTS_PAUSE_S = 0.2
# Name of a deployment whose executor has no model directory (the oracle).
NAMELESS_MODEL = "pagekv"


class VllmEngine(vllm_grpc.VllmEngineServicer):  # type: ignore[misc]  # published without types
    """Errors are raised as `PageKVError`; the server's interceptor turns them into statuses."""

    def __init__(self, engine: EngineLoop, served_model: ServedModel, serving: Callable[[], bool]) -> None:
        """`serving`: whether the manager serves requests now, as its health service reports."""
        self._engine = engine
        self._served_model = served_model
        self._serving = serving
        self._started = time.monotonic()
        # Time of the latest GetLoads, and the tokens generated until then.
        self._looked = self._started, 0
        # The tokenizer that GetTokenizer sent last, its archive, and the archive's SHA-256; shared by all callers.
        self._archived: tuple[Tokenizer, bytes, str] | None = None
        self._archiving = asyncio.Lock()

    def add_to(self, server: grpc.aio.Server) -> None:
        vllm_grpc.add_VllmEngineServicer_to_server(self, server)

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Any) -> vllm.HealthCheckResponse:
        serving = self._serving()
        return vllm.HealthCheckResponse(
            healthy=serving,
            message="serving" if serving else "no executor is attached, or the manager is shutting down",
        )

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Any) -> vllm.GetModelInfoResponse:
        served = self._served_model.served()
        model = served.model
        directory = "" if served.tokenizer is None else str(served.tokenizer.directory or "")
        name = model.model_id or NAMELESS_MODEL
        return vllm.GetModelInfoResponse(
            model_path=name,
            # The name for clients: the last part of a directory, else the model id.
            served_model_name=Path(name).name if Path(name).is_absolute() else name,
            tokenizer_path=directory,
            is_generation=True,
            max_context_length=model.max_model_len,
            max_req_input_len=model.max_model_len - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Any) -> vllm.GetServerInfoResponse:
        served = self._served_model.served()
        model, asking = served.model, served.asking
        stats = self._engine.statistics.stats()
        everybodys = stats.running_sequences + stats.waiting_sequences
        return vllm.GetServerInfoResponse(
            # A tenant is told only the number of its own requests.
            active_requests=asking.account.live if asking.tenant.name else everybodys,
            uptime_seconds=time.monotonic() - self._started,
            server_type="pagekv",
            data_parallel_size=1,
            block_size=model.block_size,
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Any) -> vllm.GetLoadsResponse:
        stats, now = self._engine.statistics.stats(), time.monotonic()
        (before, tokens), self._looked = self._looked, (now, stats.generated_tokens_total)
        load = vllm.SchedulerLoad(
            num_running_reqs=stats.running_sequences,
            num_waiting_reqs=stats.waiting_sequences,
            num_total_reqs=stats.running_sequences + stats.waiting_sequences,
            num_used_tokens=stats.active_blocks * stats.block_size,
            max_total_num_tokens=stats.num_device_blocks * stats.block_size,
            token_usage=stats.kv_usage,
            gen_throughput=(stats.generated_tokens_total - tokens) / max(now - before, 1e-3),
            cache_hit_rate=stats.prefix_hit_rate,
            utilization=stats.utilization,
        )
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=pagekv_version(), dp_rank_count=1, loads=[load]
        )

    async def Generate(self, request: vllm.GenerateRequest, context: Any) -> None:
        served = self._served_model.served()
        command, stops = await read_generate(request, served, trace_parent_of(context))
        # A copy, because the field would keep the whole request alive.
        stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        # The gateway detokenizes by itself. A tokenizer is needed here only to look for stop strings.
        reading = served if stops else Served(served.model, None)
        call = GenerateCall(self._engine, reading, command, stops, only_complete=not request.stream)
        del request  # as in InferenceService

        async def write(response: pb.GenerateResponse) -> None:
            written = (await write_response(response, stop_token_ids)).SerializeToString()
            # The last message may be large and its reader slow, so its first form is freed.
            del response
            await context.write(written)

        # The callback runs even if the call is cancelled while a message is being written; a `finally` here would not.
        context.add_done_callback(lambda _: call.close())
        await call.run(write)

    async def Abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:
        ids, tenant = read_abort_ids(request.request_ids), tenant_in_reach()
        for request_id in ids:
            self._engine.abort(request_id, tenant)
        return vllm.AbortResponse()

    async def FlushCache(self, request: common.FlushCacheRequest, context: Any) -> common.FlushCacheResponse:
        if not 0 <= request.timeout_s <= MAX_FLUSH_S:
            raise InvalidRequest("timeout_s", f"must be from 0 to {MAX_FLUSH_S:g}, got {request.timeout_s}")
        deadline = time.monotonic() + request.timeout_s
        # Nothing signals the moment when the last block is free.
        while (reset := self._engine.queries.reset_prefix_cache(force=False)) is None:
            if time.monotonic() >= deadline:
                return common.FlushCacheResponse(message="blocks are in use by requests or pins; nothing was changed")
            await asyncio.sleep(FLUSH_STEP_S)
        return common.FlushCacheResponse(success=True, message=f"{reset.removed_blocks} blocks left the prefix cache")

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        tokenizer = self._served_model.served().tokenizer
        if tokenizer is None or tokenizer.directory is None:
            raise FailedPrecondition("this deployment has no tokenizer; name one with --tokenizer", "TOKENIZER")
        async with self._archiving:
            if self._archived is None or self._archived[0] is not tokenizer:
                archive = await asyncio.to_thread(_zip, tokenizer.directory)
                self._archived = tokenizer, archive, hashlib.sha256(archive).hexdigest()
            _, archive, digest = self._archived
        for start in range(0, len(archive), TOKENIZER_CHUNK):
            last = start + TOKENIZER_CHUNK >= len(archive)
            yield common.GetTokenizerChunk(data=archive[start : start + TOKENIZER_CHUNK], sha256=digest if last else "")

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Any) -> None:
        # Every subscription begins with the whole table, whatever its start, because no history is kept for gateways.
        asking = self._served_model.asking()
        watch = open_watch(self._engine.queries, asking.account, context)
        model = self._engine.model
        if model is None:
            raise self._engine.not_attached()
        identity = asking.cache_identity("")
        events = KvEvents(lambda: self._engine.queries.cache.root(identity), model.block_size)
        await context.write(events.begin())
        while blocks := watch.take_snapshot(MAX_BLOCKS):
            for batch in events.stored(blocks):
                await context.write(batch)
        while True:
            for batch in events.changed(await watch.take()):
                await context.write(batch)
            # Steps may take only a few milliseconds, so the changes of several steps go into one message.
            await asyncio.sleep(EVENTS_PAUSE_S)

    async def Embed(self, request: vllm.EmbedRequest, context: Any) -> vllm.EmbedResponse:
        raise NotImplementedYet("PageKV computes no embeddings")

    async def StartProfile(self, request: common.StartProfileRequest, context: Any) -> common.ProfileResponse:
        raise NotImplementedYet("PageKV has no profiler to start")

    async def StopProfile(self, request: common.StopProfileRequest, context: Any) -> common.ProfileResponse:
        raise NotImplementedYet("PageKV has no profiler to stop")


def _zip(directory: Path) -> bytes:
    archive = io.BytesIO()
    # An archive has no dates before 1980, and files of reproducible builds may have 1970: they get its first date.
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as files:
        for name in TOKENIZER_FILES:
            if (directory / name).is_file():
                files.write(directory / name, name)
    return archive.getvalue()
