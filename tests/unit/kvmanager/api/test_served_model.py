"""Services refuse requests until model and tokenizer are known."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
from support.engine.fake_engine import MODEL, FakeEngine
from support.engine.inference_harness import TOKENIZER, Harness, refusal, request, run
from support.event_loop import run_by

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.request.tenant import NO_TENANT
from pagekv.v1 import inference_service_pb2 as pb


@run_by(run, opened=False)
async def test_before_the_model_is_known_calls_are_unavailable(h: Harness) -> None:
    code, message, _ = await refusal(h.stub.Generate(request()))
    assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "the tokenizer is being loaded")
    h.engine.model = None
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await h.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "no executor is attached yet"


def test_a_request_is_read_with_the_tokenizer_of_its_model() -> None:
    engine = FakeEngine()
    state = ServedModel(engine)
    state.open("f00d", TOKENIZER)
    served = state.served()
    assert (served.model, served.tokenizer, served.asking.tenant) == (MODEL, TOKENIZER, NO_TENANT)
    engine.model = replace(MODEL, model_fingerprint="beef")
    with pytest.raises(Unavailable, match="the tokenizer is being loaded"):
        state.served()
    state.open("beef", None)
    assert state.served().tokenizer is None
