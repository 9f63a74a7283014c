"""Errors that cross the wire, without anything of gRPC."""

from __future__ import annotations

import copy
import pickle

import pytest

from pagekv.common import errors


def test_a_refused_field_is_named_with_its_bounds() -> None:
    error = errors.InvalidRequest("sampling.top_p", "must be above 0 and at most 1, got 2")
    assert str(error) == "sampling.top_p: must be above 0 and at most 1, got 2"
    assert (error.field, error.description) == ("sampling.top_p", "must be above 0 and at most 1, got 2")
    assert isinstance(errors.AlreadyExists("request_id", "is taken"), errors.InvalidRequest)


def test_errors_that_pass_say_when_to_come_back() -> None:
    assert errors.Overloaded("the queue is full", 0.5).retry_delay_s == 0.5
    assert errors.Unavailable("draining").retry_delay_s == 1.0


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("top_p", "must be above 0", "R4"),
        errors.AlreadyExists("request_id", "is taken", "request", "mine"),
        errors.NotFound("no such adapter", "adapter", "it"),
        errors.Overloaded("the queue is full", 0.5, 8, "--max-queue"),
        errors.LimitExceeded("too many blocks", needed_blocks=9, limit=8, flag="--num-blocks"),
        errors.Draining("it stops", 2.0, "1.2"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_copied_and_goes_to_another_process_whole(error: errors.PageKVError) -> None:
    error.add_note("seen by a worker")
    pickled = pickle.loads(pickle.dumps(error))  # noqa: S301  # its own
    for other in (pickled, copy.copy(error), copy.deepcopy(error)):
        assert (type(other), other.args, vars(other)) == (type(error), error.args, vars(error))
        assert str(other) == str(error)
