"""How a peer that is gone or hangs is noticed: options of the channels of clients, managers and the conformance kit."""

from __future__ import annotations


def keepalive_options(interval_ms: int, *, idle: bool = False) -> list[tuple[str, int]]:
    """Options of a channel that pings its server after so long a silence; with `idle` also while no call is open."""
    options = [
        # For hosts that die without closing their connections; the second, for hosts whose kernel is silent, too.
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", 10_000),
        # For processes that hang, and for hosts behind a tunnel or a proxy, where a kernel confirms what is sent. The
        # limit of gRPC itself is a minute. Much less than 20 s would break slow lines, where the answer to a ping waits
        # behind data. A process that is busy still answers in time, even while one thread holds Python's lock.
        ("grpc.http2.ping_timeout_ms", 20_000),
    ]
    if idle:
        options += [("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0)]
    return options
