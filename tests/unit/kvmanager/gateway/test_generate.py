"""Requests and answers of `vllm.grpc.engine` in PageKV's own messages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from support.engine.fake_engine import MODEL
from support.engine.inference_harness import TOKENIZER

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.api.served_model import Served
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.gateway.generate import read_generate, read_request, write_response
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2


def _plain(value: Any) -> Any:
    """Lists and dictionaries of repeated fields and maps."""
    if hasattr(value, "items"):
        return dict(value)
    return list(value) if hasattr(value, "append") else value


def request(**params: Any) -> vllm.GenerateRequest:
    prompt = vllm.TokenizedInput(input_ids=[5, 6], original_text="In the")
    return vllm.GenerateRequest(
        request_id="r", tokenized=prompt, sampling_params=vllm.SamplingParams(**params), stream=True
    )


def test_zero_means_the_default_where_the_protocol_cannot_say_absent() -> None:
    read = read_request(request(), MODEL)
    params = read.sampling_params
    for name in ("n", "top_p", "repetition_penalty", "top_k", "temperature", "logprobs", "max_tokens"):
        assert not params.HasField(name)
    assert (read.request_id, list(read.prompt.token_ids.ids), read.only_complete) == ("r", [5, 6], False)


@pytest.mark.parametrize("name", ["tokenized", "text"])
@pytest.mark.parametrize("model", [MODEL, replace(MODEL, max_model_len=30)])
def test_without_max_tokens_an_output_has_all_the_room(name: str, model: EngineInfo) -> None:
    """As in vLLM. The pool's is 41 = 10 blocks of 4, and the last token needs no slot."""
    prompt = TOKENIZER.encode("In the", special_tokens=True, limit=99)
    given = {"text": "In the"} if name == "text" else {"tokenized": vllm.TokenizedInput(input_ids=prompt)}
    command, _ = asyncio.run(read_generate(vllm.GenerateRequest(**given), Served(model, TOKENIZER), ""))
    assert list(command.prompt_ids) == prompt
    assert command.sampling.max_tokens == min(41, model.max_model_len) - len(prompt)


def test_parameters_arrive_as_they_were_given() -> None:
    given: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [7, 8],
        "ignore_eos": True,
        "logprobs": 2,
        "logit_bias": {5: 1.5},
    }

    params = read_request(request(seed=-1, n=3, **given), MODEL).sampling_params
    assert {name: _plain(getattr(params, name)) for name in given} == given
    assert (params.seed, params.n) == (2**64 - 1, 3)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (request(logprobs=-1), "sampling_params.logprobs"),
        (request(prompt_logprobs=1), "sampling_params.prompt_logprobs"),
        (request(json_schema="{}"), "sampling_params.json_schema"),
        (request(logit_bias={-1: 1.0}), "sampling_params.logit_bias"),
        (request(logit_bias=dict.fromkeys(range(-1025, 0), 1.0)), "sampling_params.logit_bias"),
        (request(stop=["x"] * 17), "sampling_params.stop"),
        (request(stop_token_ids=[1] * 65), "sampling_params.stop_token_ids"),
        (vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1] * 65)), "tokenized.input_ids"),
        (vllm.GenerateRequest(mm_inputs=vllm.MultimodalInputs()), "mm_inputs"),
        (vllm.GenerateRequest(data_parallel_rank=1), "data_parallel_rank"),
    ],
)
def test_what_pagekv_lacks_and_long_lists_are_refused_by_name(wrong: vllm.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(wrong, MODEL)
    assert caught.value.field == field


def test_logprobs_stand_beside_their_tokens() -> None:
    top = [types_pb2.TokenLogprob(token_id=11, logprob=-0.25), types_pb2.TokenLogprob(token_id=10, logprob=-0.5)]
    position = types_pb2.PositionLogprobs(chosen=top[1], top=top)
    complete = pb.GenerateComplete(token_ids=[10], finish_reason=types_pb2.FINISH_REASON_LENGTH, logprobs=[position])
    written = asyncio.run(write_response(pb.GenerateResponse(complete=complete), ())).complete.output_logprobs
    assert (list(written.token_ids), list(written.token_logprobs)) == ([10], [-0.5])
    assert list(written.top_logprobs[0].token_ids) == [11, 10]
    assert list(written.top_logprobs[0].values) == [-0.25, -0.5]


@pytest.mark.parametrize(("token", "matched"), [(7, "matched_token_id"), (1, None)])
def test_a_stop_token_of_the_request_is_named_and_one_of_the_model_is_not(token: int, matched: str | None) -> None:
    complete = pb.GenerateComplete(finish_reason=types_pb2.FINISH_REASON_STOP, stop_token_id=token)
    written = asyncio.run(write_response(pb.GenerateResponse(complete=complete), {7})).complete
    assert (written.finish_reason, written.WhichOneof("matched_stop")) == ("stop", matched)
