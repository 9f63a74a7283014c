"""Plain data that the engine shows beside the messages of the contract."""

from __future__ import annotations

from support.engine.fake_engine import MODEL

from pagekv.v1 import inference_service_pb2 as pb


def test_what_is_served_has_the_names_that_clients_see() -> None:
    named = set(MODEL.shown())
    shown = {field.name for field in pb.GetModelInfoResponse.DESCRIPTOR.fields}
    assert shown == named | {"has_tokenizer", "has_chat_template", "max_sequence_tokens", "server_version"}
