"""Answers of the engine that services write by field name: the names are those of the contract."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from pagekv.kvmanager.engine import views
from pagekv.v1 import cache_service_pb2 as pb


@pytest.mark.parametrize(
    ("view", "message", "others"),
    [
        (views.EngineStats, pb.GetStatsResponse, set()),
        (views.PrefixMatch, pb.LookupPrefixResponse, {"prompt_tokens"}),
        (views.PinResult, pb.PinPrefixResponse, set()),
        (views.ResetCounts, pb.ResetPrefixCacheResponse, set()),
        (views.RequestView, pb.RequestInfo, set()),
        (views.SequenceView, pb.SequenceBlocks, set()),
    ],
)
def test_a_view_has_the_fields_of_its_message(view: Any, message: Any, others: set[str]) -> None:
    named = {field.name for field in fields(view)}
    assert {field.name for field in message.DESCRIPTOR.fields} == named | others


def test_by_name_copies_no_lists() -> None:
    blocks = [1, 2]
    found = views.by_name(views.PrefixMatch(8, 4, blocks))
    assert found == {"device_tokens": 8, "host_tokens": 4, "block_ids": [1, 2], "partial_tokens": 0}
    assert found["block_ids"] is blocks


def test_every_outcome_of_a_lookup_has_its_number() -> None:
    names = {f"BLOCK_OUTCOME_{outcome.name}" for outcome in views.BlockOutcome}
    assert names == set(pb.BlockOutcome.keys()) - {"BLOCK_OUTCOME_UNSPECIFIED"}
