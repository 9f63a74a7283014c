"""The container health check: exit status and reason for a serving, a starting and an absent server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagekv.common import probe


@pytest.fixture
def server() -> Iterator[tuple[health.HealthServicer, str]]:
    """A blocking server with only the health service, and its address."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_serving_is_zero(server: tuple[health.HealthServicer, str], capsys: pytest.CaptureFixture[str]) -> None:
    servicer, target = server
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert probe.main([target]) == 0
    assert capsys.readouterr().err == ""


def test_a_proxy_in_the_environment_is_no_detour(
    server: tuple[health.HealthServicer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, target = server
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert probe.main([target]) == 0


def test_not_serving_is_one_and_says_so(
    server: tuple[health.HealthServicer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, target = server
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert probe.main([target]) == 1
    assert capsys.readouterr().err == f"{target}: NOT_SERVING\n"


def test_unknown_service_is_one(server: tuple[health.HealthServicer, str], capsys: pytest.CaptureFixture[str]) -> None:
    _, target = server
    assert probe.main([target, "--service", "nobody.Knows"]) == 1
    assert "NOT_FOUND" in capsys.readouterr().err


def test_absent_server_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    # A unix socket that is not there: unlike a port, nobody else can open it meanwhile.
    assert probe.main(["unix:/nonexistent/pagekv.sock", "--timeout-s", "1"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_bad_address_is_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        probe.main(["nonsense"])
    assert exit_info.value.code == 2
    assert "host:port" in capsys.readouterr().err


def test_credentials_are_for_a_server_with_tls() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", grpc.local_server_credentials())
    server.start()
    try:
        assert probe.check(f"127.0.0.1:{port}", credentials=grpc.local_channel_credentials()) == "SERVING"
        with pytest.raises(grpc.RpcError):
            probe.check(f"127.0.0.1:{port}", credentials=grpc.ssl_channel_credentials())
    finally:
        server.stop(None).wait()
