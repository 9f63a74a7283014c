"""Errors that cross the wire, without anything of gRPC."""

from __future__ import annotations

from pagekv.common import errors


def test_a_refused_field_is_named_with_its_bounds() -> None:
    error = errors.InvalidRequest("sampling.top_p", "must be above 0 and at most 1, got 2")
    assert str(error) == "sampling.top_p: must be above 0 and at most 1, got 2"
    assert (error.field, error.description) == ("sampling.top_p", "must be above 0 and at most 1, got 2")
    assert isinstance(errors.AlreadyExists("request_id", "is taken"), errors.InvalidRequest)


def test_errors_that_pass_say_when_to_come_back() -> None:
    assert errors.Overloaded("the queue is full", 0.5).retry_delay_s == 0.5
    assert errors.Unavailable("draining").retry_delay_s == 1.0
