"""vllm.grpc.engine.VllmEngine on a real socket, with the published stubs and an engine that does what the test says."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import sys
import zipfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc
from support.engine.fake_engine import MODEL, FakeEngine
from support.engine.inference_harness import TOKENIZER, refusal, tokens_of
from support.event_loop import counted_turns, run_by, until

from pagekv.common.errors import Overloaded, Unavailable
from pagekv.common.server import GrpcServer
from pagekv.kvmanager.access.calls import GATEWAY_SERVICE
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.gateway import generate, service
from pagekv.kvmanager.gateway.service import VllmEngine
from pagekv.kvmanager.kvcache.block_hash import block_digest, root_digest, token_bytes
from pagekv.kvmanager.kvcache.events.batch import Stored, Tier
from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.request.logprobs import LOGPROBS_AT_ONCE, TokenLogprobs
from pagekv.kvmanager.request.stream import SequenceDelta
from pagekv.kvmanager.tenants.limits import TenantLimits
from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.v1 import types_pb2


@dataclass
class Harness:
    engine: FakeEngine
    state: ServedModel
    stub: Any  # published without types
    serving: list[bool] = field(default_factory=lambda: [True])

    async def start(self, request: vllm.GenerateRequest) -> Any:
        """A call whose request has reached the engine."""
        call = self.stub.Generate(request)
        await until(lambda: request.request_id in self.engine.live)
        return call


@asynccontextmanager
async def running(tokenizer: Tokenizer | None = TOKENIZER) -> AsyncIterator[Harness]:
    engine = FakeEngine()
    state = ServedModel(engine)
    state.open(MODEL.model_fingerprint, tokenizer)
    harness = Harness(engine, state, None)
    server = GrpcServer("127.0.0.1:0", [GATEWAY_SERVICE])
    VllmEngine(engine, state, lambda: harness.serving[0]).add_to(server.server)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        harness.stub = vllm_grpc.VllmEngineStub(channel)
        try:
            yield harness
        finally:
            await server.stop(0)


def run(body: Callable[[Harness], Awaitable[None]], **how: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), running(**how) as harness:
            await body(harness)

    asyncio.run(main())


def request(stream: bool = True, **params: Any) -> vllm.GenerateRequest:
    prompt = vllm.TokenizedInput(input_ids=tokens_of("In the"), original_text="In the")
    return vllm.GenerateRequest(
        request_id="r", tokenized=prompt, sampling_params=vllm.SamplingParams(**params), stream=stream
    )


async def rest(call: Any) -> list[vllm.GenerateResponse]:
    messages = []
    while isinstance(message := await call.read(), vllm.GenerateResponse):
        messages.append(message)
    return messages


# -- Generate


@run_by(run)
async def test_a_stream_is_deltas_with_the_count_of_each_and_a_complete_with_everything(harness: Harness) -> None:
    call = await harness.start(request(max_tokens=4))
    harness.engine.push("r", 10, 11)
    first = await call.read()
    harness.engine.push("r", 12, finish=FinishReason.LENGTH)
    second, complete = await rest(call)
    assert (list(first.chunk.token_ids), first.chunk.completion_tokens) == ([10, 11], 2)
    assert (list(second.chunk.token_ids), second.chunk.completion_tokens) == ([12], 1)
    assert first.chunk.prompt_tokens == len(tokens_of("In the"))
    assert first.chunk.cached_tokens == 1
    assert (list(complete.complete.output_ids), complete.complete.completion_tokens) == ([10, 11, 12], 3)
    assert complete.complete.finish_reason == "length"
    assert complete.complete.WhichOneof("matched_stop") is None


@run_by(run)
async def test_a_call_under_way_does_not_keep_its_request(harness: Harness, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 MB of what no check has seen, such as the first of two request ids."""
    seen: list[vllm.GenerateRequest] = []

    async def read(message: vllm.GenerateRequest, *others: Any) -> Any:
        seen.append(message)
        return await generate.read_generate(message, *others)

    monkeypatch.setattr(service, "read_generate", read)
    await harness.start(request())
    # That of the list, and the argument.
    await until(lambda: sys.getrefcount(seen[0]) == 2)


@pytest.mark.parametrize("stream", [False, True])
@run_by(run)
async def test_the_event_loop_turns_while_many_log_probabilities_are_translated(
    harness: Harness, *, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last message has those of all tokens: of 4,000 tokens with 20 each some 40 ms."""
    call = await harness.start(request(stream=stream, logprobs=1))
    seen, add = Counter[int](), generate._add_logprobs
    async with counted_turns() as turns:

        def noting(written: vllm.OutputLogProbs, positions: Sequence[types_pb2.PositionLogprobs]) -> None:
            seen[turns()] += len(positions)
            add(written, positions)

        monkeypatch.setattr(generate, "_add_logprobs", noting)
        logprobs = [TokenLogprobs(50, -0.5, ((50, -0.5),))] * 1000
        harness.engine.live["r"].push(SequenceDelta(0, [50] * 1000, logprobs, finish=FinishReason.LENGTH))
        *chunks, last = await rest(call)
    assert list(last.complete.output_logprobs.token_ids) == [50] * 1000
    assert len(last.complete.output_logprobs.top_logprobs) == 1000
    assert sum(len(message.chunk.output_logprobs.token_ids) for message in chunks) == (1000 if stream else 0)
    assert max(seen.values()) == LOGPROBS_AT_ONCE


@run_by(run)
async def test_without_stream_there_is_one_message_for_each_sequence(harness: Harness) -> None:
    call = await harness.start(request(stream=False, n=2, max_tokens=4))
    for index in (1, 0):
        harness.engine.push("r", 10 + index, index=index, finish=FinishReason.LENGTH)
    messages = await rest(call)
    assert {m.complete.index: list(m.complete.output_ids) for m in messages} == {0: [10], 1: [11]}
    assert len(messages) == 2


@run_by(run)
async def test_stop_strings_end_a_sequence_and_are_named(harness: Harness) -> None:
    tokens = tokens_of("one stop two")
    call = await harness.start(request(stop=["stop"], max_tokens=30))
    harness.engine.push("r", *tokens)
    complete = (await rest(call))[-1].complete
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "stop")
    assert list(complete.output_ids) == tokens[: len(complete.output_ids)]
    assert harness.engine.stopped == [("r", 0)]


@run_by(run)
async def test_a_cancelled_call_and_an_abort_end_the_request(harness: Harness) -> None:
    call = await harness.start(request())
    call.cancel()
    await until(lambda: bool(harness.engine.left))
    call = await harness.start(request())
    await harness.stub.Abort(vllm.AbortRequest(request_ids=["r", "other"]))
    assert (await rest(call))[-1].complete.finish_reason == "abort"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (request(top_p=2), "sampling_params.top_p"),
        (request(max_tokens=100), "sampling_params.max_tokens"),
        (request(logprobs=-1), "sampling_params.logprobs"),
        (request(logprobs=21), "sampling_params.logprobs"),
        (request(prompt_logprobs=1), "sampling_params.prompt_logprobs"),
        (request(truncate_prompt_tokens=4), "sampling_params.truncate_prompt_tokens"),
        (request(json_schema="{}"), "sampling_params.json_schema"),
        (request(choice=vllm.ChoiceConstraint(choices=["a"])), "sampling_params.choice"),
        (request(logit_bias={-1: 1.0}), "sampling_params.logit_bias"),
        (vllm.GenerateRequest(request_id="r"), "input"),
        (vllm.GenerateRequest(text=""), "text"),
        (vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[2**31])), "tokenized.input_ids[0]"),
        (vllm.GenerateRequest(tokenized=vllm.TokenizedInput()), "tokenized.input_ids"),
        (vllm.GenerateRequest(mm_inputs=vllm.MultimodalInputs()), "mm_inputs"),
        (vllm.GenerateRequest(kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (vllm.GenerateRequest(data_parallel_rank=1), "data_parallel_rank"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@run_by(run)
async def test_what_cannot_be_done_is_refused_by_name(
    harness: Harness, *, wrong: vllm.GenerateRequest, field: str
) -> None:
    code, message, _ = await refusal(harness.stub.Generate(wrong))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith(f"{field}: ")
    assert not harness.engine.commands


@run_by(run)
async def test_errors_have_the_statuses_that_a_gateway_retries_by(harness: Harness) -> None:
    for error, expected in (
        (Overloaded("full", 1.0), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("starting"), grpc.StatusCode.UNAVAILABLE),
    ):
        harness.engine.refusal = error
        code, _, _ = await refusal(harness.stub.Generate(request()))
        assert code is expected


# -- the rest


@run_by(run)
async def test_health_is_the_managers(harness: Harness) -> None:
    assert (await harness.stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    harness.serving[0] = False
    answer = await harness.stub.HealthCheck(vllm.HealthCheckRequest())
    assert not answer.healthy
    assert "no executor" in answer.message


@run_by(run)
async def test_model_server_and_load_are_told(harness: Harness) -> None:
    model = await harness.stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.max_context_length) == ("small", 400, 64)
    assert (model.is_generation, list(model.eos_token_ids)) == (True, [1])
    assert (await harness.stub.GetServerInfo(vllm.GetServerInfoRequest())).block_size == 4
    loads = await harness.stub.GetLoads(vllm.GetLoadsRequest())
    stats, load = harness.engine.statistics.stats(), loads.loads[0]
    assert loads.dp_rank_count == len(loads.loads) == 1
    assert (load.num_running_reqs, load.num_waiting_reqs) == (stats.running_sequences, stats.waiting_sequences)
    assert load.max_total_num_tokens == stats.num_device_blocks * stats.block_size
    assert load.token_usage == stats.kv_usage


@run_by(run)
async def test_a_model_directory_is_served_by_its_name(harness: Harness) -> None:
    for model_id, name in (("/models/Qwen3-0.6B", "Qwen3-0.6B"), ("org/name", "org/name"), ("", "pagekv")):
        harness.engine.model = type(MODEL)(**{**_fields(MODEL), "model_id": model_id})
        assert (await harness.stub.GetModelInfo(vllm.GetModelInfoRequest())).served_model_name == name


def _fields(model: Any) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}


@run_by(run)
async def test_flush_cache_says_whether_it_could(harness: Harness) -> None:
    assert (await harness.stub.FlushCache(common.FlushCacheRequest())).success
    harness.engine.held_blocks = True
    assert not (await harness.stub.FlushCache(common.FlushCacheRequest())).success
    waiting = asyncio.ensure_future(harness.stub.FlushCache(common.FlushCacheRequest(timeout_s=20)))
    await asyncio.sleep(0.05)
    harness.engine.held_blocks = False
    assert (await waiting).success
    with pytest.raises(grpc.aio.AioRpcError, match="timeout_s"):
        await harness.stub.FlushCache(common.FlushCacheRequest(timeout_s=float("nan")))


def test_the_tokenizer_travels_as_an_archive(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    # An archive has no dates before 1980.
    os.utime(tmp_path / "tokenizer_config.json", (0, 0))
    (tmp_path / "model.safetensors").write_text("weights")
    tokenizer = Tokenizer(TOKENIZER._backend, directory=tmp_path)

    async def body(harness: Harness) -> None:
        chunks = [chunk async for chunk in harness.stub.GetTokenizer(common.GetTokenizerRequest())]
        archive = b"".join(chunk.data for chunk in chunks)
        assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            assert sorted(files.namelist()) == ["tokenizer.json", "tokenizer_config.json"]

    run(body, tokenizer=tokenizer)


def test_the_archive_of_a_tokenizer_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that may generate may ask for it as often as they like: it takes seconds of a core and megabytes."""
    made: list[Path] = []

    def noting(directory: Path) -> bytes:
        made.append(directory)
        return bytes(100)

    monkeypatch.setattr(service, "_zip", noting)
    first, second = (Tokenizer(TOKENIZER._backend, directory=tmp_path / name) for name in ("first", "second"))

    async def body(harness: Harness) -> None:
        async def ask() -> bytes:
            return b"".join([chunk.data async for chunk in harness.stub.GetTokenizer(common.GetTokenizerRequest())])

        assert set(await asyncio.gather(*(ask() for _ in range(10)))) == {bytes(100)}
        assert made == [first.directory]
        # Another model has another one.
        harness.state.open(MODEL.model_fingerprint, second)
        assert await ask() == bytes(100)
        assert made == [first.directory, second.directory]

    run(body, tokenizer=first)


@run_by(run, tokenizer=None)
async def test_without_a_tokenizer_there_is_none_to_send(harness: Harness) -> None:
    code, _, _ = await refusal(harness.stub.GetTokenizer(common.GetTokenizerRequest()))
    assert code is grpc.StatusCode.FAILED_PRECONDITION


@run_by(run)
async def test_the_rest_is_unimplemented(harness: Harness) -> None:
    for call in (
        harness.stub.Embed(vllm.EmbedRequest()),
        harness.stub.StartProfile(common.StartProfileRequest()),
        harness.stub.StopProfile(common.StopProfileRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@run_by(run)
async def test_a_subscription_begins_with_the_table_wherever_it_wants_to_go_on(harness: Harness) -> None:
    root = root_digest(MODEL.model_fingerprint, "", "")
    tokens = token_bytes([1, 2, 3, 4])
    digest = block_digest(root, tokens)
    harness.engine.table = [Stored(Tier.DEVICE, [digest], [root], tokens, first=True)]
    call = harness.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=99))
    begin, table = await call.read(), await call.read()
    assert (begin.sequence_number, begin.snapshot.count) == (1, 1)
    assert begin.events[0].HasField("cleared")
    assert table.sequence_number == 2
    assert list(table.events[0].stored.blocks[0].token_ids) == [1, 2, 3, 4]
    call.cancel()
    await until(lambda: bool(harness.engine.ended_watches))


@run_by(run)
async def test_a_subscription_is_one_of_its_tenants_watches(harness: Harness) -> None:
    account = harness.engine.accounts.of("")
    account.set_limits(TenantLimits(max_watchers=1))
    call = harness.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError, match="max_watchers: your tenant has 1 of at most 1"):
        await harness.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()).read()
    call.cancel()
    await until(lambda: not account.watchers)
