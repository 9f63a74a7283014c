"""The line that sums a streamed answer up, and its rate."""

from __future__ import annotations

import pytest
from support.clients.scripted_server import ScriptedServer, answer, chunk, complete

from pagekv.client.cli.main import main
from pagekv.client.cli.streamed_answer import Stopwatch
from pagekv.client.generation_types import Chunk
from pagekv.v1 import types_pb2


def test_how_often_it_was_preempted_is_told(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Generate", chunk(4), complete(4, preemptions=2))
    assert main(["generate", "x"]) == 0
    assert capsys.readouterr().err.endswith(" · preempted 2 times · length]\n")
    server.expect("Generate", complete(5, index=1, preemptions=3), complete(4, index=0))
    assert main(["generate", "x", "--n", "2"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "--- 0: 1 token · length",
        "--- 1: 1 token · length · preempted 3 times",
    ]
    server.expect("Generate", chunk(4), complete(4, preemptions=1))
    assert main(["generate", "x"]) == 0
    assert " · preempted once · " in capsys.readouterr().err


def test_finish_reasons_are_shown(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.expect("Generate", *answer(4, reason=types_pb2.FINISH_REASON_ABORT))
    assert main(["generate", "x"]) == 0
    assert capsys.readouterr().err.endswith("abort]\n")


def made(token_ids: tuple[int, ...], done: int) -> Chunk:
    return Chunk(
        request_id="r",
        index=0,
        token_ids=token_ids,
        text="",
        prompt_tokens=3,
        completion_tokens=done,
        cached_tokens=0,
    )


def test_rates_leave_the_first_message_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.5, 12.5])
    monkeypatch.setattr("pagekv.client.cli.streamed_answer.time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    assert (watch.ttft_s, watch.tokens_per_s(5)) == (None, None)
    watch.see(made((1, 2), 2))
    watch.see(made((3, 4, 5, 6), 6))
    # The end alone, at which the clock is not even read.
    watch.see(made((), 6))
    assert (watch.ttft_s, watch.tokens_per_s(6)) == (0.5, 2.0)


def test_tokens_that_come_at_once_have_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be thousands of tokens per second, of a model that is slow."""
    now = iter([10.0, 15.0, 15.001])
    monkeypatch.setattr("pagekv.client.cli.streamed_answer.time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    watch.see(made((1,), 1))
    watch.see(made(tuple(range(99)), 100))
    assert (watch.ttft_s, watch.tokens_per_s(100)) == (5.0, None)
