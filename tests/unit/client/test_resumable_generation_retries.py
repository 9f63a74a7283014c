"""When a generation is asked for again, how long it waits, when it gives up, and the limits that it is given."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from support.clients.scripted_server import Fails, Hangs, ScriptedServer, answer, chunk

from pagekv.client import (
    ConnectionLost,
    DeadlineExceeded,
    PageKVClient,
    Unreachable,
)
from pagekv.client.errors import Overloaded
from pagekv.client.generation_types import GenerateOptions
from pagekv.client.resumable_generation import ResumableGeneration
from pagekv.client.settings import CallSettings
from pagekv.common import errors
from pagekv.v1 import inference_service_pb2 as pb

LOST_ERROR = ConnectionLost("gone")


@pytest.mark.parametrize(
    "refusal", [errors.Unavailable("no executor is attached yet", 0.01), errors.Overloaded("queue full", 0.01)]
)
def test_a_refusal_before_the_first_token_is_retried(
    server: ScriptedServer, client: PageKVClient, refusal: errors.PageKVError
) -> None:
    sent: list[pb.GenerateRequest] = []
    for replies in ([Fails(refusal)], [Fails(refusal)], answer(4)):
        server.expect("Generate", *replies, check=sent.append)
    end = client.generate("x")
    assert (end.token_ids, end.resumes) == ((4,), 0)
    assert sent[0] == sent[1] == sent[2]
    # No more often than that.
    for _ in range(3):
        server.expect("Generate", Fails(refusal))
    with pytest.raises(type(refusal)):
        client.generate("x")
    server.expect("Generate", Fails(refusal))
    with pytest.raises(type(refusal)):
        client.with_options(max_retries=0).generate("x")


def test_a_retry_waits_as_long_as_the_server_asks() -> None:
    settings = CallSettings(max_retries=2)
    generation = ResumableGeneration("x", 1, {"timeout": 100.0}, settings, clock=lambda: 0.0)
    assert 3.0 <= generation.failed(Overloaded("full", 3.0)) <= 3.75
    assert 0.1 <= generation.failed(errors.Unavailable("starting", 0.0)) <= 0.125
    with pytest.raises(Overloaded):
        generation.failed(Overloaded("full", 3.0))
    # Nor does it wait for what would come too late, or longer than anybody would.
    for timeout, delay_s in ((2.5, 3.0), (None, 61.0)):
        short = ResumableGeneration("x", 1, {"timeout": timeout}, settings, clock=lambda: 0.0)
        with pytest.raises(Overloaded):
            short.failed(Overloaded("full", delay_s))


def test_a_retry_that_the_random_part_makes_too_late_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.9)
    generation = ResumableGeneration("x", 1, {"timeout": 3.5}, CallSettings(max_retries=2), clock=lambda: 0.0)
    with pytest.raises(Overloaded):
        generation.failed(Overloaded("full", 3.0))
    assert generation.failed(Overloaded("full", 2.0)) == pytest.approx(2.45)


@pytest.mark.parametrize(
    "error", [ConnectionLost("gone"), errors.AlreadyExists("request_id", "is taken"), errors.LimitExceeded("no")]
)
def test_no_other_refusal_is_retried(error: errors.PageKVError) -> None:
    generation = ResumableGeneration("x", 1, {"resume_timeout": 0.0}, CallSettings(max_retries=2))
    with pytest.raises(type(error)):
        generation.failed(error)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timeout": -1.0}, "timeout"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"resume_timeout": 2e6}, "resume_timeout"),
    ],
)
def test_time_limits_out_of_bounds_are_refused(options: GenerateOptions, field: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        ResumableGeneration("x", 1, options, CallSettings())
    assert caught.value.field == field


def test_it_gives_up_after_resume_timeout(make_client: Any) -> None:
    server = ScriptedServer()
    server.start()
    server.expect("Generate", chunk(4), lambda: threading.Thread(target=server.stop).start(), Hangs())
    start = time.monotonic()
    words = "lost after 1 token, and did not come back within 0.5 s: (cannot reach PageKV|the connection) "
    with pytest.raises((Unreachable, ConnectionLost), match=words):
        list(make_client(server.target).stream([1, 2, 3], resume_timeout=0.5))
    assert time.monotonic() - start >= 0.5
    server.finish()


def test_an_outage_is_one_warning_for_those_who_listen(caplog: pytest.LogCaptureFixture) -> None:
    generation = ResumableGeneration([1], 1, {}, CallSettings(resume_timeout=10), clock=lambda: 0.0)
    for begun in (1, 2):
        generation.take(chunk(4, done=begun - 1))
        for _ in range(3):
            generation.failed(LOST_ERROR)
        assert [(each.levelname, each.name, each.getMessage()) for each in caplog.records] == [
            ("WARNING", "pagekv.client.resumable_generation", "connection lost, trying again for up to 10 s")
        ] * begun


@pytest.mark.parametrize(
    ("error", "after_s", "words"),
    [
        (errors.Unavailable("starting", 7.0, "1.2"), 11.0, "did not come back within 10 s: starting"),
        (Overloaded("full", 3.0), 11.0, "the stream could not go on: full"),
        # As of a manager with a shorter context than the one before.
        (errors.InvalidRequest("max_tokens", "is 9"), 1.0, "the stream could not go on: max_tokens: is 9"),
    ],
)
def test_an_error_that_ends_an_outage_tells_of_it(error: errors.PageKVError, after_s: float, words: str) -> None:
    now, facts = [0.0], vars(error).copy()
    generation = ResumableGeneration([1], 1, {}, CallSettings(resume_timeout=10), clock=lambda: now[0])
    generation.take(chunk(4))
    generation.failed(ConnectionLost("gone"))
    now[0] = after_s
    with pytest.raises(errors.PageKVError) as caught:
        generation.failed(error)
    assert caught.value is error
    assert str(error) == f"the connection was lost after 1 token, and {words}"
    assert vars(error) == facts


def test_a_time_limit_that_passes_in_an_outage_tells_of_it() -> None:
    now = [0.0]
    generation = ResumableGeneration([1], 1, {"timeout": 5.0}, CallSettings(resume_timeout=10), clock=lambda: now[0])
    generation.take(chunk(4))
    assert generation.remaining_s() == 5.0
    generation.failed(ConnectionLost("gone"))
    now[0] = 5.0
    words = (
        "^the generation did not finish in time: the connection was lost after 1 token, and was not back; allow more"
    )
    with pytest.raises(DeadlineExceeded, match=words):
        generation.remaining_s()
    # The end of the outage is the end of that.
    generation.take(chunk(5, done=1))
    with pytest.raises(DeadlineExceeded, match=r"^the generation did not finish in time; allow more"):
        generation.remaining_s()


def test_an_error_without_an_outage_before_it_stays_as_it_is() -> None:
    generation = ResumableGeneration([1], 1, {}, CallSettings(resume_timeout=10))
    generation.take(chunk(4))
    with pytest.raises(errors.LimitExceeded, match=r"^no$"):
        generation.failed(errors.LimitExceeded("no"))


def test_a_server_that_refuses_is_asked_less_often_than_one_that_is_not_there() -> None:
    """However long it was not there, the first pause of one that is back and has no executor yet is a short one."""
    generation = ResumableGeneration([1], 1, {}, CallSettings(resume_timeout=100))
    generation.take(chunk(4))
    for _ in range(10):
        generation.failed(Unreachable("nothing listens"))
    refused = errors.Unavailable("no executor is attached yet")
    for whole in (0.5, 1.0, 1.0, 1.0):
        assert whole / 2 <= generation.failed(refused) <= whole
    assert generation.failed(LOST_ERROR) <= 1.0
    assert generation.failed(LOST_ERROR) <= 0.5


def test_an_overloaded_server_sets_the_pause() -> None:
    generation = ResumableGeneration([1], 1, {}, CallSettings(resume_timeout=10))
    generation.take(chunk(4))
    generation.failed(LOST_ERROR)
    assert generation.failed(Overloaded("full", 3.0)) == pytest.approx(3.0)


def test_the_timeout_covers_the_outage() -> None:
    now = [0.0]
    generation = ResumableGeneration([1], 1, {"timeout": 2.0}, CallSettings(resume_timeout=10), clock=lambda: now[0])
    assert generation.remaining_s() == 2.0
    generation.take(chunk(4))

    def wait_out() -> None:
        while True:
            now[0] += generation.failed(LOST_ERROR)

    with pytest.raises(DeadlineExceeded):
        wait_out()
    assert now[0] == pytest.approx(2.0)


@pytest.mark.parametrize("n", [0, -1, 65, 10**9, "2", None])
def test_a_number_of_sequences_out_of_bounds_is_refused_before_anything_is_made(n: object) -> None:
    with pytest.raises(errors.InvalidRequest, match="n: must be a whole number from 1 to 64, is"):
        ResumableGeneration("x", n, {}, CallSettings())  # type: ignore[arg-type]  # callers pass anything
