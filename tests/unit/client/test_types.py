"""The clients' types beside the messages of the contract."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from pagekv.client import (
    BlockExplanation,
    CacheReset,
    ModelInfo,
    Pin,
    Stats,
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
