"""A step without protobuf."""

from __future__ import annotations

from dataclasses import fields

from pagekv.executor.session.step import Step
from pagekv.steps.v1 import executor_service_pb2 as pb


def test_fields_are_those_of_the_contract() -> None:
    *names, encoded = [field.name for field in fields(Step)]
    assert names == [field.name for field in pb.StepRequest.DESCRIPTOR.fields]
    assert encoded == "encoded"
