"""Settings of calls: bounds, and what changes for one call."""

from __future__ import annotations

from typing import Any

import pytest

from pagekv.client import InvalidRequest
from pagekv.client.settings import CallSettings, as_metadata


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"timeout": -1}, "timeout", "0 to 1,000,000 seconds, is -1"),
        ({"timeout": float("nan")}, "timeout", "is nan"),
        ({"timeout": "2"}, "timeout", "is '2'"),
        ({"resume_timeout": None}, "resume_timeout", "is None"),
        ({"resume_timeout": 1e7}, "resume_timeout", "is 10000000.0"),
        ({"max_retries": 101}, "max_retries", "0 to 100, is 101"),
        ({"max_retries": 0.5}, "max_retries", "is 0.5"),
        ({"metadata": (("Upper", "x"),)}, "metadata[0]", "is 'Upper'"),
        ({"metadata": (("a", "x"), ("grpc-timeout", "x"))}, "metadata[1]", "is 'grpc-timeout'"),
        ({"metadata": (("", "x"),)}, "metadata[0]", "is ''"),
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


@pytest.mark.parametrize("entries", [3, ["ab", "c"], [("a", "b", "c")]])
def test_metadata_is_made_of_pairs(entries: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        as_metadata(entries)
    assert caught.value.field == "metadata"


def test_no_message_shows_a_credential() -> None:
    with pytest.raises(InvalidRequest) as caught:
        CallSettings(metadata=(("authorization", "Bearer s3cret\n"),))
    assert "s3cret" not in str(caught.value)


def test_values_at_their_bounds_are_taken() -> None:
    CallSettings(timeout=0, resume_timeout=1e6, max_retries=100, metadata=(("a", "x" * 8159),))
    CallSettings(timeout=None, metadata=(("a.b_c-9", ""), ("d-bin", b"\x00\xff")))


def test_a_change_adds_metadata_and_replaces_the_rest() -> None:
    settings = CallSettings(timeout=3, metadata=(("authorization", "a"), ("traceparent", "1")))
    changed = settings.changed({"timeout": None, "metadata": [("traceparent", "2")]})
    assert changed == CallSettings(timeout=None, metadata=(("authorization", "a"), ("traceparent", "2")))
    with pytest.raises(TypeError, match="timeouts"):
        settings.changed({"timeouts": 1})  # type: ignore[typeddict-unknown-key]  # the mistake under test
