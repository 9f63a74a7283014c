"""Options of the clients' channels: repeated calls, proxies."""

from __future__ import annotations

import inspect
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.held_port import held_port
from support.clients.scripted_server import LOST, Fails, ScriptedServer
from support.clients.stack import environment
from support.clients.stand_ins import FAKE

from pagekv.client import ConnectionLost, PageKVClient, calls, channel
from pagekv.client.channel import channel_options
from pagekv.client.outage import LONGEST_PAUSE_UNANSWERED_S
from pagekv.common import errors
from pagekv.v1 import cache_service_pb2, inference_service_pb2, inference_service_pb2_grpc, operator_service_pb2
from pagekv.v1 import operator_service_pb2 as operator_pb


def test_calls_that_change_nothing_are_repeated(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("GetStats", Fails(LOST))
    server.expect("GetStats", Fails(errors.Unavailable("starting")))
    server.expect("GetStats", operator_pb.GetStatsResponse(num_device_blocks=9))
    assert client.stats().num_device_blocks == 9


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("Abort", lambda client: client.abort("r")),
        ("UnpinPrefix", lambda client: client.unpin_prefix("p")),
        ("ResetPrefixCache", lambda client: client.reset_prefix_cache()),
    ],
)
def test_calls_that_say_what_they_changed_are_not_repeated(
    server: ScriptedServer, client: PageKVClient, method: str, call: Callable[[PageKVClient], object]
) -> None:
    server.expect(method, Fails(LOST))
    with pytest.raises(ConnectionLost):
        call(client)


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
    assert (("grpc.enable_http_proxy", 0) in channel_options(target)) is local


def test_a_stream_waits_for_a_server_that_is_back_by_known_bounds() -> None:
    """One attempt that hangs, the pause behind it and one of the library's own, in seconds (docs/robustness.md)."""
    options = dict(channel_options("127.0.0.1:1"))
    assert options["grpc.min_reconnect_backoff_ms"] == 2_000
    assert options["grpc.initial_reconnect_backoff_ms"] < options["grpc.max_reconnect_backoff_ms"] == 500
    # gRPC lengthens its pauses by up to a fifth.
    bound = 2.0 + 1.2 * 0.5 + LONGEST_PAUSE_UNANSWERED_S
    assert bound == pytest.approx(3.1)


@pytest.mark.long
def test_an_attempt_that_nobody_answers_has_an_end() -> None:
    """The kernel takes the connection, as it does for a process that listens and hangs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        with grpc.insecure_channel(target, options=channel_options(target)) as raw:
            stub = inference_service_pb2_grpc.InferenceServiceStub(raw)
            begin = time.monotonic()
            with pytest.raises(grpc.RpcError) as failed:
                list(stub.Generate(inference_service_pb2.GenerateRequest(), timeout=120))
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        print(f"given up after {time.monotonic() - begin:.2f} s")


@pytest.mark.long
def test_a_stream_of_a_process_that_hangs_has_an_end(tmp_path: Path) -> None:
    """Its kernel confirms what is sent, as a proxy does for a host that is gone. gRPC itself would wait a minute."""
    with held_port() as port:
        target = f"127.0.0.1:{port}"
        command = [sys.executable, str(FAKE), "serve", str(tmp_path / "journal"), "--listen", target]
        command += ["--port-file", str(tmp_path / "port")]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as process:
            # Pings sooner than for users; a gRPC server takes more of them for an attack.
            options = {**dict(channel_options(target)), "grpc.keepalive_time_ms": 5_000}
            try:
                with grpc.insecure_channel(target, options=[*options.items()]) as raw:
                    stub = health_pb2_grpc.HealthStub(raw)
                    watch = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=240)
                    next(watch)
                    process.send_signal(signal.SIGSTOP)
                    begin = time.monotonic()
                    with pytest.raises(grpc.RpcError) as failed:
                        list(watch)
                    waited = time.monotonic() - begin
            finally:
                process.kill()
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert waited < 5 + 20 + 20


# Calls that the library does not make: none so far.
NOT_MADE: set[str] = set()
# Calls that gRPC must not repeat by itself: the stream of tokens, which the library resumes; a reset, which would
# preempt again; and calls whose second answer would say that nothing was there to end.
NOT_REPEATED = {"Generate", "ResetPrefixCache", "Abort", "UnpinPrefix"}


def test_every_method_of_every_service_is_made_by_the_library_and_repeated_or_listed_as_not() -> None:
    source = inspect.getsource(calls)
    for file in (inference_service_pb2, cache_service_pb2, operator_service_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            repeated = channel._REPEATED[service.name]
            for method in service.methods:
                assert (f".{method.name}" in source) == (method.name not in NOT_MADE), method.full_name
                assert (method.name in repeated) == (method.name not in NOT_REPEATED), method.full_name
