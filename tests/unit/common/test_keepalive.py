"""Which pings a channel sends. tests/unit/client/test_channel.py stops a process that is pinged."""

from __future__ import annotations

import pytest

from pagekv.common.keepalive import keepalive_options


@pytest.mark.parametrize("idle", [False, True])
def test_pings_have_an_interval_and_answers_a_limit(idle: bool) -> None:
    options = dict(keepalive_options(7_000, idle=idle))
    assert options["grpc.keepalive_time_ms"] == 7_000
    assert (options["grpc.keepalive_timeout_ms"], options["grpc.http2.ping_timeout_ms"]) == (10_000, 20_000)
    assert ("grpc.keepalive_permit_without_calls" in options) is idle
    assert ("grpc.http2.max_pings_without_data" in options) is idle
