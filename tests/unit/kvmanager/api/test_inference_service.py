"""InferenceService: refusals with their details, and the calls besides Generate."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from support.engine.fake_engine import MODEL
from support.engine.inference_harness import Harness, detail, refusal, request, run, tokens_of
from support.event_loop import run_by, until
from support.prompts import as_chat, as_prompt

from pagekv.common.errors import InvalidRequest, Overloaded, Unavailable
from pagekv.common.version import pagekv_version
from pagekv.kvmanager.api import inference_service
from pagekv.kvmanager.api.validation import read_generate
from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.tenants.limits import TenantLimits
from pagekv.v1 import inference_service_pb2 as pb


@run_by(run)
async def test_a_bad_field_is_named_in_the_details_and_the_server_goes_on(h: Harness) -> None:
    code, message, status = await refusal(h.stub.Generate(request(params={"n": 0})))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message == "sampling_params.n: must be from 1 to 64, got 0"
    violation = detail(status, error_details_pb2.BadRequest()).field_violations[0]
    assert (violation.field, violation.description) == ("sampling_params.n", "must be from 1 to 64, got 0")
    assert detail(status, error_details_pb2.ErrorInfo()).reason == "INVALID_FIELD"
    assert h.engine.commands == []
    await h.start(request())


@run_by(run)
async def test_a_call_under_way_does_not_keep_its_request(h: Harness, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 MB of what no check has seen, such as the first of two request ids."""
    seen: list[pb.GenerateRequest] = []

    async def read(message: pb.GenerateRequest, *others: Any) -> Any:
        seen.append(message)
        return await read_generate(message, *others)

    monkeypatch.setattr(inference_service, "read_generate", read)
    await h.start(request())
    # That of the list, and the argument.
    await until(lambda: sys.getrefcount(seen[0]) == 2)


@run_by(run)
async def test_a_prompt_of_megabytes_is_refused_by_name(h: Harness) -> None:
    code, message, _ = await refusal(h.stub.Generate(pb.GenerateRequest(prompt=as_prompt("x" * 3_900_000))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("prompt.text: must be at most 2016 bytes")
    prompt = as_prompt("x" * 4_100_000)
    with pytest.raises(grpc.aio.AioRpcError, match="must be at most 4000000 bytes") as caught:
        await h.stub.Tokenize(pb.TokenizeRequest(prompt=prompt))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@run_by(run)
async def test_an_adapter_is_not_found_and_the_base_model_does_not_answer(h: Harness) -> None:
    message = request()
    message.adapter = "lora"
    code, words, status = await refusal(h.stub.Generate(message))
    assert code is grpc.StatusCode.NOT_FOUND
    assert words == "adapter: there is no 'lora', the model has no adapters"
    assert detail(status, error_details_pb2.ErrorInfo()).reason == "NOT_FOUND"
    info = detail(status, error_details_pb2.ResourceInfo())
    assert (info.resource_type, info.resource_name) == ("adapter", "lora")
    assert h.engine.commands == []


@run_by(run)
async def test_a_request_for_another_model_is_refused(h: Harness) -> None:
    """A resumed request names the model that its first answer named, and no other may go on with it."""
    message = request()
    message.model_fingerprint = MODEL.model_fingerprint
    call = await h.start(message)
    h.engine.push("r", 50)
    assert (await call.read()).model_fingerprint == MODEL.model_fingerprint
    h.engine.push("r", 51)
    assert not (await call.read()).model_fingerprint
    assert h.engine.commands[0].model_fingerprint == MODEL.model_fingerprint
    message.model_fingerprint = "beef"
    code, words, status = await refusal(h.stub.Generate(message))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert words == f"model_fingerprint: the model served is {MODEL.model_fingerprint}, not beef"
    assert detail(status, error_details_pb2.ErrorInfo()).reason == "FAILED_PRECONDITION"
    assert len(h.engine.commands) == 1


@run_by(run)
async def test_a_taken_request_id(h: Harness) -> None:
    await h.start(request())
    code, message, status = await refusal(h.stub.Generate(request()))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "request_id: 'r' is in use" in message
    assert detail(status, error_details_pb2.BadRequest()).field_violations[0].field == "request_id"
    # The refused call has no part in the running one.
    assert h.engine.aborted == []


@pytest.mark.parametrize(
    ("error", "code", "retry_ms"),
    [
        (Overloaded("the queue is full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED, 1500),
        (Unavailable("shutting down", 2), grpc.StatusCode.UNAVAILABLE, 2000),
        (InvalidRequest("sampling_params.max_tokens", "too many"), grpc.StatusCode.INVALID_ARGUMENT, None),
    ],
)
@run_by(run)
async def test_what_the_engine_refuses(
    h: Harness, *, error: Exception, code: grpc.StatusCode, retry_ms: int | None
) -> None:
    h.engine.refusal = error
    got, _, status = await refusal(h.stub.Generate(request()))
    assert got is code
    if retry_ms is not None:
        assert detail(status, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds() == retry_ms


@run_by(run)
async def test_a_stream_that_the_engine_fails(h: Harness) -> None:
    call = await h.start(request())
    h.engine.push("r", 50)
    h.engine.live["r"].fail(Unavailable("the executor restarted with another model"))
    assert list((await call.read()).chunk.token_ids) == [50]
    with pytest.raises(grpc.aio.AioRpcError, match="another model"):
        await call.read()
    assert await call.code() is grpc.StatusCode.UNAVAILABLE


@run_by(run)
async def test_tokenize_and_detokenize(h: Harness) -> None:
    ids = list((await h.stub.Tokenize(pb.TokenizeRequest(prompt=as_prompt("the earth")))).token_ids)
    assert ids == [0, *tokens_of("the earth")]
    assert (await h.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "the earth"
    assert (await h.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids * 1000))).text == "the earth" * 1000
    answer = await h.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids * 10_000))
    assert answer == pb.DetokenizeResponse(text="the earth" * 10_000)
    assert (await h.stub.Detokenize(pb.DetokenizeRequest())).text == ""
    chat = pb.TokenizeRequest(prompt=as_chat(("user", "hi")))
    assert list((await h.stub.Tokenize(chat)).token_ids) == [2, *tokens_of("hi")]
    known = await h.stub.Tokenize(pb.TokenizeRequest(prompt=as_prompt([399, 0, 5] * 100)))
    assert list(known.token_ids) == [399, 0, 5] * 100
    long = (await h.stub.Tokenize(pb.TokenizeRequest(prompt=as_prompt("the earth " * 2000)))).token_ids
    assert len(long) > MODEL.max_model_len


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("Tokenize", pb.TokenizeRequest(), "prompt"),
        ("Tokenize", pb.TokenizeRequest(prompt=as_prompt("")), "prompt.text"),
        ("Tokenize", pb.TokenizeRequest(prompt=as_prompt([0, 400])), "prompt.token_ids.ids[1]"),
        ("Tokenize", pb.TokenizeRequest(prompt=as_prompt([0] * (2**20 + 1))), "prompt.token_ids.ids"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[0, 400]), "token_ids[1]"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[0] * (2**20 + 1)), "token_ids"),
        ("Abort", pb.AbortRequest(), "request_ids"),
        ("Abort", pb.AbortRequest(request_ids=["ok", ""]), "request_ids[1]"),
        ("Abort", pb.AbortRequest(request_ids=[f"{i}" for i in range(1025)]), "request_ids"),
        ("Abort", pb.AbortRequest(request_ids=["the same"] * 1025), "request_ids"),
    ],
)
@run_by(run)
async def test_bad_fields_of_the_other_calls(h: Harness, *, method: str, message: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(h.stub, method)(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{field}: ")


@run_by(run)
async def test_ids_are_counted_before_they_are_read_and_the_event_loop_turns_meanwhile(h: Harness) -> None:
    turns = 0

    async def beside() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(beside())
    message = pb.AbortRequest(request_ids=["a"] * 1_000_000)
    turns = 0
    with pytest.raises(grpc.aio.AioRpcError, match="request_ids: a message must have at most 16384 fields") as caught:
        await h.stub.Abort(message)
    other.cancel()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert turns >= 16


@run_by(run)
async def test_tokenizes_answer_comes_in_parts_that_are_one_message(h: Harness) -> None:
    ids = [n % 400 for n in range(2**20)]
    assert (await h.stub.Tokenize(pb.TokenizeRequest(prompt=as_prompt(ids)))).token_ids == ids


@run_by(run, tokenizer=None)
async def test_without_a_tokenizer_token_ids_still_work(h: Harness) -> None:
    call = await h.start(request())
    h.engine.push("r", 50, finish=FinishReason.STOP)
    assert ((await call.read()).chunk.text, (await call.read()).complete.stop_token_id) == ("", 50)
    for method, message in [
        ("Tokenize", pb.TokenizeRequest(prompt=as_prompt("x"))),
        ("Detokenize", pb.DetokenizeRequest()),
    ]:
        with pytest.raises(grpc.aio.AioRpcError, match="no tokenizer"):
            await getattr(h.stub, method)(message)
    info = await h.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert not info.has_tokenizer
    assert not info.has_chat_template


@run_by(run, opened=False)
async def test_the_version_is_told_before_there_is_a_model(h: Harness) -> None:
    for model in (None, MODEL):
        h.engine.model = model
        code, words, status = await refusal(h.stub.GetModelInfo(pb.GetModelInfoRequest()))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert words == ("the tokenizer is being loaded" if model else "no executor is attached yet")
        info = detail(status, error_details_pb2.ErrorInfo())
        assert (info.reason, dict(info.metadata)) == ("NOT_SERVING", {"server_version": pagekv_version()})


@run_by(run)
async def test_model_info(h: Harness) -> None:
    assert await h.stub.GetModelInfo(pb.GetModelInfoRequest()) == pb.GetModelInfoResponse(
        model_id="small",
        model_fingerprint="f00d",
        max_model_len=64,
        vocab_size=400,
        eos_token_ids=[1],
        has_tokenizer=True,
        has_chat_template=True,
        block_size=4,
        num_device_blocks=16,
        max_sequence_tokens=64,
        server_version=pagekv_version(),
        backend="oracle",
    )


@run_by(run)
async def test_text_is_counted_for_its_tenant_and_token_ids_are_not(h: Harness) -> None:
    account = h.engine.accounts.of("")
    account.set_limits(TenantLimits(tokenized_bytes_per_second=1))
    await h.stub.Tokenize(pb.TokenizeRequest(prompt=as_prompt("more than two bytes")))
    text = as_prompt("a")
    calls = h.stub.Tokenize(pb.TokenizeRequest(prompt=text)), h.stub.Generate(pb.GenerateRequest(prompt=text))
    for call in calls:
        code, message, _ = await refusal(call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert message.startswith("tokenized_bytes_per_second: your tenant may use 1")
    await h.stub.Tokenize(pb.TokenizeRequest(prompt=as_prompt([5, 6])))
    assert account.usage.refusals == {"tokenized_bytes_per_second": 2}


@run_by(run)
async def test_an_adapter_that_the_tenant_may_not_use_is_refused_whether_it_is_there_or_not(h: Harness) -> None:
    h.engine.accounts.of("").set_limits(TenantLimits(adapters=frozenset({"mine"})))
    message = request()
    for adapter, wanted in (("lora", grpc.StatusCode.PERMISSION_DENIED), ("mine", grpc.StatusCode.NOT_FOUND)):
        message.adapter = adapter
        code, _, _ = await refusal(h.stub.Generate(message))
        assert code is wanted
