"""Settings of calls: bounds, and what changes for one call."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from pagekv.client import InvalidRequest
from pagekv.client.settings import CallSettings, as_metadata, check_whole


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"timeout": -1}, "timeout", "above 0 and up to 1,000,000 seconds, or None for no limit, is -1"),
        ({"timeout": 0}, "timeout", "above 0 and up to 1,000,000 seconds, or None for no limit, is 0"),
        ({"timeout": 10**400}, "timeout", "is 1000"),
        ({"timeout": True}, "timeout", "is True"),
        ({"timeout": float("nan")}, "timeout", "is nan"),
        ({"timeout": "2"}, "timeout", "is '2'"),
        ({"resume_timeout": None}, "resume_timeout", "is None"),
        ({"resume_timeout": 1e7}, "resume_timeout", "0 to 1,000,000 seconds, is 10000000.0"),
        ({"resume_timeout": -0.1}, "resume_timeout", "0 to 1,000,000 seconds, is -0.1"),
        ({"max_retries": 101}, "max_retries", "a whole number from 0 to 100, is 101"),
        ({"max_retries": 0.5}, "max_retries", "is 0.5"),
        ({"metadata": (("Upper", "x"),)}, "metadata[0]", "is 'Upper'"),
        ({"metadata": (("a", "x"), ("grpc-timeout", "x"))}, "metadata[1]", "is 'grpc-timeout'"),
        ({"metadata": (("", "x"),)}, "metadata[0]", "is ''"),
        ({"metadata": (("content-type", "x"),)}, "metadata[0]", "gRPC's own keys connection, content-length, "),
        ({"metadata": (("a", "x"), ("te", "trailers"))}, "metadata[1]", "is 'te'"),
        ({"metadata": (("host", "x"),)}, "metadata[0]", "is 'host'"),
        ({"metadata": (("connection", "x"),)}, "metadata[0]", "is 'connection'"),
        ({"metadata": (("user-agent", "x"),)}, "metadata[0]", "is 'user-agent'"),
        ({"metadata": (([], "x"),)}, "metadata[0]", "is []"),
        ({"metadata": (("a", b"x"),)}, "metadata[0]", "a: the value must be text"),
        ({"metadata": (("a", "line\n"),)}, "metadata[0]", "printable"),
        ({"metadata": (("a-bin", "x"),)}, "metadata[0]", "must be bytes, is a str"),
        ({"metadata": (("a", "x" * 8160),)}, "metadata", "8192 bytes at most with 32 for each entry, is 8193"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(values: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CallSettings(**values)
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "entries", [3, None, "s3", ["s3"], [("a", "s3", "c")], {"authorization": "s3"}, {"s3": "x"}, [3]]
)
def test_metadata_is_made_of_pairs(entries: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a list of pairs of key and value, is or has a ") as caught:
        as_metadata(entries)
    assert caught.value.field == "metadata"
    assert "s3" not in str(caught.value)


def test_no_message_shows_a_credential() -> None:
    with pytest.raises(InvalidRequest) as caught:
        CallSettings(metadata=(("authorization", "Bearer s3cret\n"),))
    assert "s3cret" not in str(caught.value)


def test_values_at_their_bounds_are_taken() -> None:
    CallSettings(timeout=5e-324, resume_timeout=0, max_retries=0)
    CallSettings(timeout=1e6, resume_timeout=1e6, max_retries=100, metadata=(("a", "x" * 8159),))
    CallSettings(timeout=None, metadata=(("a.b_c-9", ""), ("d-bin", b"\x00\xff")))


def test_a_whole_number_of_numpy_is_one() -> None:
    check_whole("n", numpy.uint8(64), 1, 64)
    for wrong in (numpy.int64(65), numpy.float64(2), numpy.True_):
        with pytest.raises(InvalidRequest, match=r"^n: must be a whole number from 1 to 64, is "):
            check_whole("n", wrong, 1, 64)


def test_a_change_adds_metadata_and_replaces_the_rest() -> None:
    settings = CallSettings(timeout=3, metadata=(("authorization", "a"), ("traceparent", "1")))
    changed = settings.changed("with_options", {"timeout": None, "metadata": [("traceparent", "2")]})
    assert changed == CallSettings(timeout=None, metadata=(("authorization", "a"), ("traceparent", "2")))


def test_an_unknown_option_is_refused_beside_those_known() -> None:
    known = "max_retries, metadata, resume_timeout, timeout"
    with pytest.raises(TypeError, match=f"^with_options: unknown option 'timeouts'; known are {known}$"):
        CallSettings().changed("with_options", {"timeouts": 1})  # type: ignore[typeddict-unknown-key]  # the mistake under test
