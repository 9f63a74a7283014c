"""Values into messages and back."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, get_args

import pytest

from pagekv.client import (
    CacheControls,
    GenerateOptions,
    InvalidRequest,
    PageKVClient,
    wire,
)
from pagekv.client.types import BlockExplanation, BlockInfo, BlockOutcome, PrefixLookup
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import operator_service_pb2 as operator_pb


def test_every_outcome_has_its_name() -> None:
    outcomes = cache_pb.DESCRIPTOR.enum_types_by_name["BlockOutcome"].values_by_name
    names = {name.removeprefix("BLOCK_OUTCOME_").lower() for name in outcomes}
    assert names - {"unspecified"} | {"unknown"} == {*get_args(BlockOutcome)}


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([], {}, "prompt"),
        (b"In the", {}, "prompt"),
        (bytearray(b"In the"), {}, "prompt"),
        (memoryview(b""), {}, "prompt"),
        ("x", {"stop": b"In the"}, "sampling_params.stop"),
        ("x", {"stop_token_ids": b"In the"}, "sampling_params.stop_token_ids"),
        ([1, -1], {}, "prompt.token_ids.ids"),
        ([1, 2**32], {}, "prompt.token_ids.ids"),
        ([1, "x"], {}, "prompt.token_ids.ids"),
        (["In the", "Once"], {}, "prompt"),
        ("\ud800", {}, "prompt.text"),
        ([{"role": "user"}], {}, "prompt.chat.messages[0]"),
        ([{"role": "user", "content": 1}], {}, "prompt.chat.messages[0].content"),
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


def test_options_that_are_none_are_left_out() -> None:
    sent = wire.generate_request("x", 1, dict.fromkeys(GenerateOptions.__annotations__), only_complete=False)  # type: ignore[arg-type]  # None for each
    assert sent == wire.generate_request("x", 1, {}, only_complete=False)


def test_fields_are_read_by_name_presence_and_kind() -> None:
    block = operator_pb.BlockInfo(block_id=3, state=operator_pb.BLOCK_STATE_PINNED, block_hash="ff")
    assert astuple(wire.flat(BlockInfo, block)) == (3, 0, "pinned", "ff", "", 0)
    told = cache_pb.BlockExplanation(outcome=cache_pb.BLOCK_OUTCOME_OTHER_IDENTITY, steps_ago=0)
    found = wire.flat(BlockExplanation, told)
    assert (found.outcome, found.block_id, found.steps_ago, found.seconds_ago) == ("other_identity", None, 0, None)
    assert wire.flat(PrefixLookup, cache_pb.LookupPrefixResponse(block_ids=[4, 2])).block_ids == (4, 2)
    assert wire.flat(PrefixLookup, cache_pb.LookupPrefixResponse()).block_ids == ()
