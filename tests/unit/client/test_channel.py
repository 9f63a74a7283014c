"""Options of the clients' channels: repeated calls, proxies."""

from __future__ import annotations

import pytest
from support.clients.scripted_server import LOST, Fails, ScriptedServer

from pagekv.client import (
    ConnectionLost,
    PageKVClient,
)
from pagekv.client.channel import channel_options, is_local
from pagekv.common import errors
from pagekv.v1 import operator_service_pb2 as operator_pb


def test_calls_that_change_nothing_are_repeated(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("GetStats", Fails(LOST))
    server.expect("GetStats", Fails(errors.Unavailable("starting")))
    server.expect("GetStats", operator_pb.GetStatsResponse(num_device_blocks=9))
    assert client.stats().num_device_blocks == 9
    # Nothing else is.
    server.expect("ResetPrefixCache", Fails(LOST))
    with pytest.raises(ConnectionLost):
        client.reset_prefix_cache()


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/tmp/socket", True),
        ("10.0.0.7:1", False),
        ("gpu-7:1", False),
    ],
)
def test_a_proxy_is_for_other_machines_alone(target: str, local: bool) -> None:
    assert is_local(target) is local
    assert (("grpc.enable_http_proxy", 0) in channel_options(target)) is local
