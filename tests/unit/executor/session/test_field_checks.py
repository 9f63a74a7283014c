"""The bounds of sampling fields: what is refused, and by which field."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pagekv.common.errors import InvalidRequest
from pagekv.executor.backend.interface import Sampling
from pagekv.executor.session.field_checks import check_ids, check_sampling

NAN, INF = math.nan, math.inf

# R19 is of lists, but a bias out of its bounds breaks R18, as every number does.
LISTS = ("banned_until_min", "bias_token_ids", "biases")
# (id, fields, the field refused, a part of the description)
REFUSALS: list[tuple[str, dict[str, Any], str, str]] = [
    ("temperature-nan", {"temperature": NAN}, "temperature", "from 0 to 100, got nan"),
    ("temperature-inf", {"temperature": INF}, "temperature", "from 0 to 100, got inf"),
    ("top-p-zero", {"top_p": 0.0}, "top_p", "above 0"),
    ("top-p-high", {"top_p": 1.1}, "top_p", "from 0 to 1"),
    ("top-p-nan", {"top_p": NAN}, "top_p", "got nan"),
    ("top-k", {"top_k": 513}, "top_k", "from 0 to 512, got 513"),
    ("min-p", {"min_p": -INF}, "min_p", "from 0 to 1, got -inf"),
    ("repetition-zero", {"repetition_penalty": 0.0}, "repetition_penalty", "above 0"),
    ("repetition", {"repetition_penalty": NAN}, "repetition_penalty", "got nan"),
    ("presence", {"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2, got 2.5"),
    ("frequency", {"frequency_penalty": -INF}, "frequency_penalty", "from -2 to 2"),
    ("min-tokens", {"min_tokens": 65}, "min_tokens", "from 0 to 64, got 65"),
    ("logprobs", {"logprobs": 6}, "logprobs", "from 0 to 5, got 6"),
    ("banned", {"banned_until_min": [0, 512]}, "banned_until_min[1]", "below 512, got 512"),
    ("banned-many", {"banned_until_min": [0] * 1025}, "banned_until_min", "at most 1024"),
    (
        "bias-id",
        {"bias_token_ids": [999], "biases": [1.0]},
        "bias_token_ids[0]",
        "below 512, got 999",
    ),
    (
        "bias-twice",
        {"bias_token_ids": [3, 3], "biases": [1.0, 1.0]},
        "bias_token_ids",
        "at most once",
    ),
    (
        "bias-columns",
        {"bias_token_ids": [3, 4], "biases": [1.0]},
        "biases",
        "2 entries",
    ),
    (
        "bias-nan",
        {"bias_token_ids": [3, 4], "biases": [1.0, NAN]},
        "biases[1]",
        "from -100 to 100, got nan",
    ),
]


@pytest.mark.parametrize(
    ("fields", "field", "part"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_refused_by_field(fields: dict[str, Any], field: str, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling("path", Sampling(**fields), vocab_size=512, max_model_len=64, max_logprobs=5)
    assert caught.value.field == f"path.{field}"
    assert part in str(caught.value)
    assert caught.value.rule == ("R19" if field.partition("[")[0] in LISTS and field != "biases[1]" else "R18")


def test_bounds_themselves_are_let_through() -> None:
    most = Sampling(100, 1, 512, 1, 10, 2, 2, 2**64 - 1, 63, 64, (511,), (511,), (100.0,), 128)
    least = Sampling(0, 1e-9, 0, 0, 1e-9, -2, -2, 0, 0, 0, (), (0,), (-100.0,), 0)
    for sampling in (Sampling(), most, least):
        check_sampling("path", sampling, vocab_size=512, max_model_len=64, max_logprobs=128)


@pytest.mark.parametrize("number", [300, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("as_array", [False, True])
def test_an_id_that_is_too_large_is_named_in_a_list_and_in_an_array(number: int, as_array: bool) -> None:
    """An array of a message's uint32 may be one of int32, so that a token can be unknown later."""
    ids: Sequence[int] = [5, 299, number, number]
    check_ids("ids", ids[:2], "token", 300, "R12")
    check_ids("ids", [], "token", 300, "R12")
    check_ids("ids", array("i"), "token", 300, "R12")
    if as_array:
        ids = array("i", np.array(ids, np.uint32).tobytes())
        check_ids("ids", ids[:2], "token", 300, "R12")
    with pytest.raises(InvalidRequest, match=rf"ids\[2\]: must be a token id below 300, got {number}"):
        check_ids("ids", ids, "token", 300, "R12")
