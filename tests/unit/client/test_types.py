"""The clients' types beside the messages of the contract."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from pagekv import client
from pagekv.client import (
    BlockExplanation,
    CacheReset,
    ModelInfo,
    Pin,
    Stats,
    types,
)
from pagekv.client.types import PrefixLookup, SequenceBlocks
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ModelInfo, pb.GetModelInfoResponse),
        (Stats, operator_pb.GetStatsResponse),
        (PrefixLookup, cache_pb.LookupPrefixResponse),
        (SequenceBlocks, operator_pb.SequenceBlocks),
        (BlockExplanation, cache_pb.BlockExplanation),
        (Pin, cache_pb.PinPrefixResponse),
        (CacheReset, operator_pb.ResetPrefixCacheResponse),
    ],
)
def test_types_have_the_fields_of_their_messages(cls: Any, message: Any) -> None:
    assert {field.name for field in fields(cls)} == {field.name for field in message.DESCRIPTOR.fields}


def test_states_are_types_of_the_library() -> None:
    exported: list[str] = vars(client)["__getattr__"]("__all__")
    assert {"BlockOutcome", "BlockState", "FinishReason", "HealthStatus", "SequenceState", "Tier"} <= {*exported}
    assert not {"ComputationFailed", "NotImplementedYet"} & {*exported}


def test_results_take_keywords_alone() -> None:
    """So that a later field may stand anywhere."""
    results = [cls for cls in vars(types).values() if is_dataclass(cls)]
    assert len(results) > 15
    assert [cls for cls in results if not all(field.kw_only for field in fields(cls))] == []
