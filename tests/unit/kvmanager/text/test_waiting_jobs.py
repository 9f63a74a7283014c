"""Jobs that wait for a worker process, and who is refused when there are too many."""

from __future__ import annotations

import pytest

from pagekv.common.errors import Overloaded
from pagekv.kvmanager.text.waiting_jobs import WaitingJobs


def test_where_nobody_is_asked_for_an_identity_the_bounds_are_all() -> None:
    waiting = WaitingJobs("tokenizer", 2, 100)
    waiting.enter("", 60)
    with pytest.raises(
        Overloaded, match="60 bytes wait to be read by the tokenizer; with the 41 of this text the limit"
    ):
        waiting.enter("", 41)
    waiting.enter("", 40)
    with pytest.raises(Overloaded, match="2 texts wait to be read by the tokenizer; the limit for all is 2") as refused:
        waiting.enter("", 0)
    assert (refused.value.limit, refused.value.retry_delay_s) == (2, 1.0)
    waiting.leave("", 60)
    waiting.enter("", 60)


def test_a_tenant_below_its_share_of_the_jobs_gets_in() -> None:
    waiting = WaitingJobs("tokenizer", 4, 100)
    for _ in range(4):
        waiting.enter("flood", 1)
    with pytest.raises(Overloaded, match="4 texts of your tenant wait to be read"):
        waiting.enter("flood", 1)
    waiting.enter("quiet", 1)
    waiting.enter("quiet", 1)
    # And is told of its own.
    with pytest.raises(Overloaded, match="2 texts of your tenant wait to be read"):
        waiting.enter("quiet", 1)
    # With more tenants than there may be jobs each has one.
    for name in "abc":
        waiting.enter(name, 1)
        with pytest.raises(Overloaded):
            waiting.enter(name, 1)


def test_a_tenant_below_its_share_of_the_bytes_gets_in() -> None:
    waiting = WaitingJobs("template", 10, 100)
    waiting.enter("flood", 90)
    with pytest.raises(Overloaded, match="90 bytes of your tenant wait to be read by the template; with the 20 of"):
        waiting.enter("flood", 20)
    waiting.enter("quiet", 50)
    with pytest.raises(Overloaded, match="50 bytes of your tenant wait to be read by the template; with the 1 of"):
        waiting.enter("quiet", 1)


def test_nothing_is_kept_of_tenants_without_jobs() -> None:
    waiting = WaitingJobs("template", 10, 100)
    for number in range(1000):
        waiting.enter(f"t{number}", 1)
        waiting.leave(f"t{number}", 1)
    assert len(waiting._jobs) == len(waiting._bytes) == 0
