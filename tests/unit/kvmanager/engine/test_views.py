"""Plain data that the engine shows beside the messages of the contract."""

from __future__ import annotations

from dataclasses import fields

from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.v1 import inference_service_pb2 as pb


def test_what_is_served_has_the_names_that_clients_see() -> None:
    named = {field.name for field in fields(EngineInfo)} - {"bytes_per_block"}
    shown = {field.name for field in pb.GetModelInfoResponse.DESCRIPTOR.fields}
    assert shown == named | {"has_tokenizer", "has_chat_template"}
