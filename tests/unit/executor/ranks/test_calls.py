"""Calls end when all ranks have answered; one that fails while others do not come is named, and ends the group."""

from __future__ import annotations

import threading

import pytest
from support.waiting import wait_until

from pagekv.common.errors import InvalidRequest
from pagekv.executor.ranks import calls
from pagekv.executor.ranks.calls import Call, CallBroken, failure


def test_answers_of_the_others_by_rank() -> None:
    call = Call("describe", [1, 2], pytest.fail)
    call.answer(2, {"two": 2})
    call.answer(0, {})
    call.answer(1, {})
    assert list(call.wait().items()) == [(1, {}), (2, {"two": 2})]


def test_a_failure_that_all_come_to_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[str] = []
    call = Call("describe", [1, 2], broken.append)
    for rank in (1, 2, 0):
        call.answer(rank, failure(RuntimeError("no memory")))
    assert call.wait() == {rank: {"error": "RuntimeError: no memory"} for rank in (1, 2)}
    # As a timer does when its time is over.
    call._break("rank 1 failed")
    assert not broken
    monkeypatch.setattr(calls, "OTHERS_S", 0.01)
    never = Call("describe", [1], broken.append)
    never.answer(1, failure(RuntimeError("no memory")))
    wait_until(lambda: broken)
    assert broken == ["rank 1 failed to describe: RuntimeError: no memory; left waiting for it: rank 0"]
    with pytest.raises(CallBroken, match=r"left waiting for it: rank 0$"):
        never.wait()


def test_the_caller_hears_of_it_when_the_group_has_been_ended() -> None:
    """The caller would end the process as one whose device is lost, and torchrun would start the ranks anew."""
    done = threading.Event()

    def broken(reason: str) -> None:
        # Long enough for a thread that has been woken.
        assert not done.wait(0.1)

    def caller() -> None:
        with pytest.raises(CallBroken):
            call.wait()
        done.set()

    call = Call("describe", [1], broken)
    thread = threading.Thread(target=caller)
    thread.start()
    # As a timer does.
    call._break("rank 0 failed")
    thread.join()
    assert done.is_set()


def test_the_caller_hears_of_it_though_the_group_cannot_be_ended() -> None:
    def broken(reason: str) -> None:
        # Too late: the group is about to end.
        call.answer(1, {})
        raise OSError("no link")

    call = Call("describe", [1], broken)
    call.answer(0, failure(RuntimeError("no memory")))
    with pytest.raises(OSError, match="no link"):
        call._break("rank 0 failed")
    with pytest.raises(CallBroken, match="rank 0 failed; left waiting for it: rank 1"):
        call.wait()


GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_a_failure_can_pass_where_all_of_it_can() -> None:
    call = Call("describe", [1, 2], pytest.fail)
    assert not call.can_pass
    call.answer(0, {})
    assert not call.can_pass
    call.answer(1, failure(GLOO))
    assert call.can_pass
    call.answer(2, failure(MemoryError("too little")))
    assert not call.can_pass


def test_a_refusal_keeps_its_field() -> None:
    assert failure(InvalidRequest("block_size", "too large")) == {"error": "too large", "field": "block_size"}
