"""Both clients against a scripted server: requests as sent, results as typed, errors as domain exceptions."""

from __future__ import annotations

import asyncio
import time
from dataclasses import fields
from typing import Any, get_args

import grpc
import pytest
from support.clients.scripted_server import LOST, Fails, Hangs, ScriptedServer, chunk, complete, free_port

from pagekv.client import (
    AlreadyExists,
    AsyncPageKVClient,
    BlockExplanation,
    CacheControls,
    CacheReset,
    ChatMessage,
    ComputationFailed,
    ConnectionLost,
    DeadlineExceeded,
    FailedPrecondition,
    FellBehind,
    InvalidRequest,
    LimitExceeded,
    MediaHash,
    ModelInfo,
    NotFound,
    NotImplementedYet,
    Overloaded,
    PageKVClient,
    PageKVError,
    Pin,
    ServerError,
    Stats,
    Unavailable,
    Unreachable,
)
from pagekv.client.types import BlockOutcome, PrefixLookup, RequestInfo, RequestList, SequenceBlocks
from pagekv.common import errors
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2


def test_generate_sends_every_option_and_types_the_answer(server: ScriptedServer, client: PageKVClient) -> None:
    def check(request: pb.GenerateRequest) -> None:
        sampling = request.sampling_params
        assert request.text == "hello"
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 4)
        assert (sampling.min_p, sampling.max_tokens, sampling.min_tokens) == (0.25, 9, 2)
        assert (sampling.seed, sampling.n) == (11, 1)
        assert list(sampling.stop) == ["end"]
        assert list(sampling.stop_token_ids) == [5, 6]
        assert sampling.ignore_eos
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (2, 0.5, -0.5)
        assert sampling.logprobs == 1
        assert dict(sampling.logit_bias) == {3: 1.5}
        assert (request.priority, request.request_id) == (-4, "mine")
        assert (request.cache.namespace, request.cache.adapter_id) == ("n", "a")
        assert (request.cache.no_read, request.cache.no_write) == (True, False)
        (media,) = request.cache.media_hashes
        assert (media.position, media.length, media.hash) == (1, 2, "h")

    chosen = types_pb2.TokenLogprob(token_id=7, logprob=-0.5)
    logprobs = [types_pb2.PositionLogprobs(chosen=chosen, top=[chosen])]
    server.expect(
        "Generate",
        chunk(7),
        complete(
            7,
            text="seven",
            cached=2,
            reason=types_pb2.FINISH_REASON_STOP,
            stop_string="end",
            preemptions=3,
            logprobs=logprobs,
        ),
        check=check,
    )
    result = client.generate(
        "hello",
        temperature=0.5,
        top_p=0.75,
        top_k=4,
        min_p=0.25,
        max_tokens=9,
        min_tokens=2,
        seed=11,
        stop="end",
        stop_token_ids=[5, 6],
        ignore_eos=True,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logprobs=1,
        logit_bias={3: 1.5},
        priority=-4,
        request_id="mine",
        cache=CacheControls("n", "a", (MediaHash(1, 2, "h"),), read=False),
    )
    assert (result.text, result.token_ids, result.finish_reason) == ("seven", (7,), "stop")
    assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (3, 1, 2)
    assert (result.stop_string, result.stop_token_id, result.preemptions, result.resumes) == ("end", None, 3, 0)
    assert result.logprobs[0].chosen.token_id == 7
    assert result.logprobs[0].top[0].logprob == -0.5


def test_what_is_not_given_is_not_sent_but_the_seed_and_request_id(
    server: ScriptedServer, client: PageKVClient
) -> None:
    sent: list[pb.GenerateRequest] = []
    for _ in range(2):
        server.expect("Generate", complete(7), check=sent.append)
        client.generate([1, 2, 3])
    assert [list(request.tokenized.input_ids) for request in sent] == [[1, 2, 3], [1, 2, 3]]
    present = [field.name for field, _ in sent[0].sampling_params.ListFields()]
    assert present == ["n", "seed"]
    assert sent[0].sampling_params.seed != sent[1].sampling_params.seed
    assert sent[0].request_id != sent[1].request_id


@pytest.mark.parametrize(
    "messages",
    [
        [ChatMessage("user", "hi"), ChatMessage("assistant", "")],
        [{"role": "user", "content": "hi"}, {"content": "", "role": "assistant"}],
    ],
)
def test_a_conversation_is_sent_as_chat(server: ScriptedServer, client: PageKVClient, messages: Any) -> None:
    def check(request: pb.GenerateRequest) -> None:
        assert [(m.role, m.content) for m in request.chat.messages] == [("user", "hi"), ("assistant", "")]

    server.expect("Generate", complete(7), check=check)
    client.generate(messages)


def test_several_sequences_come_back_by_index(server: ScriptedServer, client: PageKVClient) -> None:
    def check(request: pb.GenerateRequest) -> None:
        assert request.sampling_params.n == 3
        assert request.only_complete

    server.expect("Generate", complete(9, index=2), complete(7, index=0), complete(8, index=1), check=check)
    assert [c.token_ids for c in client.generate_n("x", 3)] == [(7,), (8,), (9,)]


def test_beam_search_comes_back_best_first(server: ScriptedServer, client: PageKVClient) -> None:
    def check(request: pb.GenerateRequest) -> None:
        sampling = request.sampling_params
        assert (sampling.n, sampling.beam_width, sampling.length_penalty, sampling.early_stopping) == (2, 4, 0.5, True)
        assert not sampling.HasField("seed"), "beam search draws nothing"

    best = complete(7, 9, reason=types_pb2.FINISH_REASON_STOP, stop_token_id=9, cumulative_logprob=-1.25)
    replies = [best, complete(8, 8, index=1, cumulative_logprob=-2.5)]
    server.expect("Generate", *replies, check=check)
    results = client.generate_n("x", 2, beam_width=4, length_penalty=0.5, early_stopping=True)
    assert [(result.token_ids, result.cumulative_logprob) for result in results] == [((7, 9), -1.25), ((8, 8), -2.5)]
    server.expect("Generate", *replies, check=check)
    stream = client.stream("x", n=2, beam_width=4, length_penalty=0.5, early_stopping=True)
    assert list(stream) == []
    assert [stream.completions[index].cumulative_logprob for index in range(2)] == [-1.25, -2.5]


def test_sampling_has_no_cumulative_logprob(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", complete(7))
    assert client.generate("x").cumulative_logprob is None


def test_a_stream_yields_chunks_then_has_the_completion(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4, 5, cached=2), chunk(6, done=2, cached=2), complete(4, 5, 6, cached=2))
    stream = client.stream("x", request_id="abc")
    assert stream.request_id == "abc"
    with pytest.raises(RuntimeError, match="not ended"):
        _ = stream.completion
    chunks = list(stream)
    assert [(c.token_ids, c.text, c.completion_tokens) for c in chunks] == [((4, 5), "t4 t5 ", 2), ((6,), "t6 ", 3)]
    assert stream.completion.text == "t4 t5 t6 "
    assert stream.completions == {0: stream.completion}


@pytest.mark.parametrize("way", ["close", "with"])
def test_closing_a_stream_aborts_the_request(server: ScriptedServer, client: PageKVClient, way: str) -> None:
    server.expect("Generate", chunk(4), Hangs())
    stream = client.stream("x")
    if way == "with":
        with stream:
            assert next(stream).token_ids == (4,)
    else:
        assert next(stream).token_ids == (4,)
        stream.close()
    deadline = time.monotonic() + 5
    while not server.cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.cancelled == ["Generate"]
    assert list(stream) == []


async def _cancel(target: str) -> None:
    async with AsyncPageKVClient(target) as client:
        task = asyncio.create_task(client.generate("x"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_cancelling_the_task_aborts_the_request(server: ScriptedServer) -> None:
    server.expect("Generate", chunk(4), Hangs())
    asyncio.run(_cancel(server.target))
    deadline = time.monotonic() + 5
    while not server.cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.cancelled == ["Generate"]


def test_the_other_calls(server: ScriptedServer, client: PageKVClient) -> None:
    def is_equal(wanted: Any) -> Any:
        def check(request: Any) -> None:
            assert request == wanted

        return check

    server.expect("Abort", pb.AbortResponse(aborted=["a"]), check=is_equal(pb.AbortRequest(request_ids=["a", "b"])))
    assert client.abort("a", "b") == ["a"]
    server.expect("Tokenize", pb.TokenizeResponse(token_ids=[1, 2]), check=is_equal(pb.TokenizeRequest(text="hi")))
    assert client.tokenize("hi") == [1, 2]
    detokenize = pb.DetokenizeRequest(token_ids=[1, 2])
    server.expect("Detokenize", pb.DetokenizeResponse(text="hi"), check=is_equal(detokenize))
    assert client.detokenize([1, 2]) == "hi"
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="m", eos_token_ids=[0], has_tokenizer=True))
    info = client.model_info()
    assert (info.model_id, info.eos_token_ids, info.has_tokenizer, info.block_size) == ("m", (0,), True, 0)
    server.expect("GetStats", cache_pb.GetStatsResponse(num_blocks=9, kv_usage=0.5, executor_attached=True))
    stats = client.stats()
    assert (stats.num_blocks, stats.kv_usage, stats.executor_attached) == (9, 0.5, True)
    lookup = cache_pb.LookupPrefixRequest(tokenized=types_pb2.TokenizedInput(input_ids=[1, 2]))
    lookup.cache.namespace = "n"
    server.expect("LookupPrefix", cache_pb.LookupPrefixResponse(prompt_tokens=2, block_ids=[4]), check=is_equal(lookup))
    assert client.lookup_prefix([1, 2], cache=CacheControls("n")) == PrefixLookup(2, 0, 0, (4,), 0)
    sequence = cache_pb.SequenceBlocks(state="running", num_tokens=4, block_ids=[1], block_hashes=["ff"])
    table = cache_pb.GetBlockTableRequest(request_id="r")
    server.expect("GetBlockTable", cache_pb.GetBlockTableResponse(sequences=[sequence]), check=is_equal(table))
    assert client.block_table("r") == [SequenceBlocks(0, "running", 4, 0, (1,), ("ff",))]
    live = cache_pb.RequestInfo(request_id="r", state="waiting", priority=-1, prompt_tokens=7)
    some = cache_pb.ListRequestsRequest(limit=5)
    server.expect("ListRequests", cache_pb.ListRequestsResponse(requests=[live], total=9), check=is_equal(some))
    assert client.list_requests(5) == RequestList([RequestInfo("r", "waiting", -1, 0, 7, 0, 0, 0, 0, 0, 0)], 9)
    block = cache_pb.BlockInfo(block_id=3, ref_count=1, state=cache_pb.BLOCK_STATE_ACTIVE)
    listing = cache_pb.ListBlocksRequest(start=3, limit=1, state=cache_pb.BLOCK_STATE_ACTIVE)
    server.expect("ListBlocks", cache_pb.ListBlocksResponse(blocks=[block], next_start=4), check=is_equal(listing))
    blocks = client.list_blocks(3, 1, "active")
    assert (blocks.blocks[0].state, blocks.blocks[0].ref_count, blocks.next_start) == ("active", 1, 4)
    server.expect("ListBlocks", cache_pb.ListBlocksResponse())
    assert client.list_blocks().next_start is None
    reset = cache_pb.ResetPrefixCacheRequest(force=True)
    server.expect("ResetPrefixCache", cache_pb.ResetPrefixCacheResponse(removed_blocks=5), check=is_equal(reset))
    assert client.reset_prefix_cache(force=True) == CacheReset(5, 0, 0)
    explain = cache_pb.ExplainPrefixRequest(text="hi", start=2, limit=3)
    explain.cache.adapter_id = "a"
    reply = cache_pb.ExplainPrefixResponse(
        blocks=[
            cache_pb.BlockExplanation(end=4, outcome=cache_pb.BLOCK_OUTCOME_HIT, block_id=0, block_hash="ff"),
            cache_pb.BlockExplanation(start=4, end=8, outcome=cache_pb.BLOCK_OUTCOME_EVICTED, steps_ago=0),
        ],
        next_start=5,
        prompt_tokens=90,
    )
    server.expect("ExplainPrefix", reply, check=is_equal(explain))
    found = client.explain_prefix("hi", cache=CacheControls(adapter_id="a"), start=2, limit=3)
    assert (found.next_start, found.prompt_tokens, found.cached_tokens) == (5, 90, 0)
    assert found.blocks == (
        BlockExplanation(0, 4, "hit", "ff", 0, "", 0, None, None),
        BlockExplanation(4, 8, "evicted", "", None, "", 0, 0, None),
    )
    pin = cache_pb.PinPrefixRequest(tokenized=types_pb2.TokenizedInput(input_ids=[1, 2]), lease_seconds=60)
    server.expect("PinPrefix", cache_pb.PinPrefixResponse(pin_id="p", pinned_tokens=16), check=is_equal(pin))
    assert client.pin_prefix([1, 2], 60) == Pin("p", 16)
    unpin = cache_pb.UnpinPrefixRequest(pin_id="p")
    server.expect("UnpinPrefix", cache_pb.UnpinPrefixResponse(unpinned_tokens=16), check=is_equal(unpin))
    assert client.unpin_prefix("p") == 16


def test_every_outcome_has_its_name() -> None:
    outcomes = cache_pb.DESCRIPTOR.enum_types_by_name["BlockOutcome"].values_by_name
    assert {name.removeprefix("BLOCK_OUTCOME_").lower() for name in outcomes} - {"unspecified"} == set(
        get_args(BlockOutcome)
    )


def test_health(server: ScriptedServer, client: PageKVClient) -> None:
    from grpc_health.v1 import health_pb2

    server.expect("Check", health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING))
    assert client.health() == "SERVING"
    server.expect("Check", health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING))
    assert client.health() == "NOT_SERVING"
    server.expect("Check", Fails(grpc.StatusCode.NOT_FOUND))
    assert client.health("no.such.Service") == "SERVICE_UNKNOWN"


@pytest.mark.parametrize(
    ("sent", "raised", "attributes"),
    [
        (
            errors.InvalidRequest("sampling_params.top_p", "must be above 0, got 0"),
            InvalidRequest,
            {"field": "sampling_params.top_p", "description": "must be above 0, got 0"},
        ),
        (errors.AlreadyExists("request_id", "r is running"), AlreadyExists, {"field": "request_id"}),
        (errors.NotFound("no request r"), NotFound, {}),
        (errors.Overloaded("1024 wait", 2.5), Overloaded, {"retry_delay_s": 2.5}),
        (errors.OutOfMemory("pools"), errors.OutOfMemory, {}),
        (errors.LimitExceeded("pins"), LimitExceeded, {}),
        (errors.Unavailable("draining", 3.0), Unavailable, {"retry_delay_s": 3.0}),
        (errors.FailedPrecondition("blocks are held"), FailedPrecondition, {}),
        (errors.StaleEpoch("old"), errors.StaleEpoch, {}),
        (errors.FellBehind("start again"), FellBehind, {}),
        (errors.ComputationFailed("no"), ComputationFailed, {}),
        (errors.NotImplementedYet("later"), NotImplementedYet, {}),
        (grpc.StatusCode.INTERNAL, ServerError, {"code": "INTERNAL"}),
        (grpc.StatusCode.UNIMPLEMENTED, ServerError, {"code": "UNIMPLEMENTED"}),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ServerError, {"code": "RESOURCE_EXHAUSTED"}),
    ],
)
def test_statuses_become_domain_exceptions(
    server: ScriptedServer, client: PageKVClient, sent: Any, raised: type[PageKVError], attributes: dict[str, Any]
) -> None:
    server.expect("ResetPrefixCache", Fails(sent))
    server.expect("Generate", Fails(sent))
    for call in (client.reset_prefix_cache, lambda: client.generate("x")):
        with pytest.raises(PageKVError) as caught:
            call()
        assert type(caught.value) is raised
        assert {name: getattr(caught.value, name) for name in attributes} == attributes
        if isinstance(sent, PageKVError):
            assert str(sent) in str(caught.value)


def test_every_status_of_the_servers_table_has_its_exception() -> None:
    from pagekv.client.errors import EXCEPTIONS, RequestFailure
    from pagekv.common.statuses import STATUS_TABLE

    for cls, row in STATUS_TABLE.items():
        made = EXCEPTIONS[row.code, row.reason](RequestFailure(row.code, "m", "t", row.reason, "f", "d"))
        assert type(made) is cls


def test_nobody_listens(make_client: Any) -> None:
    target = f"127.0.0.1:{free_port()}"
    client = make_client(target)
    for call in (client.stats, lambda: client.generate("x"), lambda: next(client.stream("x"))):
        start = time.monotonic()
        with pytest.raises(Unreachable, match=rf"cannot reach PageKV at {target}.*pagekv up"):
            call()
        assert time.monotonic() - start < 5


def test_calls_that_change_nothing_are_repeated(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("GetStats", Fails(LOST))
    server.expect("GetStats", Fails(errors.Unavailable("starting")))
    server.expect("GetStats", cache_pb.GetStatsResponse(num_blocks=9))
    assert client.stats().num_blocks == 9
    # Nothing else is.
    server.expect("ResetPrefixCache", Fails(LOST))
    with pytest.raises(ConnectionLost):
        client.reset_prefix_cache()


def test_deadlines(server: ScriptedServer, make_client: Any) -> None:
    client = make_client(server.target, timeout=0.5)
    server.expect("GetStats", Hangs())
    with pytest.raises(DeadlineExceeded, match="timeout="):
        client.stats()
    server.expect("Generate", chunk(4), Hangs())
    with pytest.raises(DeadlineExceeded):
        client.generate("x", timeout=0.7)
    server.expect("Generate", complete(4))
    client.generate("x")
    unary, limited, unlimited = server.deadlines
    assert unary is not None
    assert limited is not None
    assert unary < 0.51
    assert 0.5 < limited < 0.71
    # Without a timeout gRPC reports one of centuries.
    assert unlimited is None or unlimited > 1e6


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([], {}, "input"),
        ([1, -1], {}, "tokenized.input_ids"),
        ([1, 2**32], {}, "tokenized.input_ids"),
        ([1, "x"], {}, "tokenized.input_ids"),
        ("\ud800", {}, "text"),
        ([{"role": "user"}], {}, "chat.messages[0]"),
        ([{"role": "user", "content": 1}], {}, "chat.messages[0].content"),
        ("x", {"max_tokens": -1}, "sampling_params.max_tokens"),
        ("x", {"temperature": "hot"}, "sampling_params.temperature"),
        ("x", {"seed": -1}, "sampling_params.seed"),
        ("x", {"stop": [1]}, "sampling_params.stop"),
        ("x", {"logit_bias": {-1: 1.0}}, "sampling_params.logit_bias"),
        ("x", {"priority": 2**40}, "priority"),
        ("x", {"cache": CacheControls(namespace="\ud800")}, "cache.namespace"),
    ],
)
def test_values_that_no_message_can_hold_are_refused_by_name(
    client: PageKVClient, prompt: Any, options: Any, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(prompt, **options)
    assert caught.value.field == field


def test_an_unknown_option_is_refused(client: PageKVClient) -> None:
    with pytest.raises(TypeError, match=r"unknown option 'max_token'; known are .*max_tokens"):
        client.generate("x", max_token=4)  # type: ignore[call-arg]  # the mistake under test


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ModelInfo, pb.GetModelInfoResponse),
        (Stats, cache_pb.GetStatsResponse),
        (PrefixLookup, cache_pb.LookupPrefixResponse),
        (SequenceBlocks, cache_pb.SequenceBlocks),
        (BlockExplanation, cache_pb.BlockExplanation),
        (Pin, cache_pb.PinPrefixResponse),
        (CacheReset, cache_pb.ResetPrefixCacheResponse),
    ],
)
def test_types_have_the_fields_of_their_messages(cls: Any, message: Any) -> None:
    assert {field.name for field in fields(cls)} == {field.name for field in message.DESCRIPTOR.fields}


def test_both_clients_have_the_same_methods() -> None:
    def public(cls: type) -> set[str]:
        return {name for name in vars(cls) if not name.startswith("_")}

    assert public(PageKVClient) == public(AsyncPageKVClient)
