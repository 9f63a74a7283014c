"""A server that takes pings for an attack is noticed."""

from __future__ import annotations

import pytest
from support.executor.judged import toy

from pagekv.conformance.keepalive import IdleConnection
from pagekv.conformance.verdict import BrokenRule

# gRPC's own default, by name, since no option at all stands for those of the toy.
STRICT = [("grpc.keepalive_permit_without_calls", 0)]


@pytest.mark.long
def test_pings_are_welcome() -> None:
    told: list[float] = []
    with toy() as address:
        idle = IdleConnection(address, 1000)
        idle.check(told.append)
        idle.close()
    assert len(told) == 1
    assert 0 < told[0] <= idle.idle_s == 4.5


@pytest.mark.long
def test_a_strict_server_is_noticed() -> None:
    with toy(options=STRICT) as address:
        idle = IdleConnection(address, 1000)
        idle.idle_s = 60.0  # ends when the server ends it
        with pytest.raises(BrokenRule, match="ended an idle connection"):
            idle.check(lambda _: None)
        idle.close()


def test_no_server_at_all() -> None:
    idle = IdleConnection("127.0.0.1:1", 100)
    with pytest.raises(BrokenRule, match="not accepted"):
        idle.check(lambda _: None)
    idle.close()
