"""The container health check: exit status and reason for a serving, a starting and an absent server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from support.clients.certificates import Authority, Pair, config_of

from pagekv.common import probe
from pagekv.common.tls import Tls


@pytest.fixture(autouse=True)
def _no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEKV_CA", "PAGEKV_CLIENT_CERT", "PAGEKV_CLIENT_KEY"):
        monkeypatch.delenv(name, raising=False)


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


@pytest.mark.parametrize(("state", "status", "words"), [("SERVING", 0, ""), ("NOT_SERVING", 1, "{}: NOT_SERVING\n")])
def test_serving_is_zero_and_not_serving_is_one_and_says_so(
    server: tuple[health.HealthServicer, str], capsys: pytest.CaptureFixture[str], state: str, status: int, words: str
) -> None:
    servicer, target = server
    servicer.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(state))
    assert probe.main([target]) == status
    assert capsys.readouterr().err == words.format(target)


def test_a_proxy_in_the_environment_is_no_detour(
    server: tuple[health.HealthServicer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, target = server
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert probe.main([target]) == 0


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


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(params=[False, True], ids=["tls", "mutual"])
def tls_server(request: pytest.FixtureRequest, authority: Authority) -> Iterator[tuple[bool, str]]:
    """A serving server as manager and executor serve TLS: whether it asks for certificates, and its address."""
    pair = authority.pair("pagekv-executor")
    config = config_of(pair, authority.ca if request.param else None)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", Tls(config).server_credentials())
    server.start()
    yield request.param, f"127.0.0.1:{port}"
    server.stop(None).wait()


def files(authority: Authority, pair: Pair | None = None) -> list[str]:
    own = [f"--client-cert={pair.cert}", f"--client-key={pair.key}"] if pair is not None else []
    return [f"--ca={authority.ca}", *own]


def test_a_certificate_is_shown_where_the_server_asks_for_one(
    tls_server: tuple[bool, str], authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    mutual, target = tls_server
    assert probe.main([target, *files(authority)]) == int(mutual)
    assert probe.main([target, *files(authority, authority.pair("nobody"))]) == 0
    assert probe.main([target]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_a_server_of_another_authority_or_another_name_is_not_serving(
    tls_server: tuple[bool, str], authority: Authority, tmp_path: Path
) -> None:
    _, target = tls_server
    own = authority.pair("nobody")
    assert probe.main([target, *files(Authority(tmp_path, "other"), own)]) == 1
    assert probe.main([target, *files(authority, own), "--server-name=pagekv-manager"]) == 1
    assert probe.main([target, *files(authority, own), "--server-name=pagekv-executor"]) == 0


def test_the_name_of_a_server_behind_a_unix_socket_is_localhost(authority: Authority) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    with tempfile.TemporaryDirectory() as short:
        target = f"unix:{short}/server"
        server.add_secure_port(target, Tls(config_of(authority.pair("server"), None)).server_credentials())
        server.start()
        assert probe.main([target, *files(authority)]) == 0
        server.stop(None).wait()


def test_files_come_from_the_environment_too(
    tls_server: tuple[bool, str], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target = tls_server
    pair = authority.pair("nobody")
    monkeypatch.setenv("PAGEKV_CA", str(authority.ca))
    monkeypatch.setenv("PAGEKV_CLIENT_CERT", str(pair.cert))
    monkeypatch.setenv("PAGEKV_CLIENT_KEY", str(pair.key))
    assert probe.main([target]) == 0
    for name in ("PAGEKV_CA", "PAGEKV_CLIENT_CERT", "PAGEKV_CLIENT_KEY"):
        monkeypatch.setenv(name, "")
    assert probe.main([target]) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ca=/nonexistent/ca.pem"], "argument --ca: /nonexistent/ca.pem: No such file or directory"),
        (["--client-cert=CERT"], "argument --client-cert: needs --client-key, too"),
        (["--client-key=CERT"], "argument --client-key: needs --client-cert, too"),
    ],
)
def test_files_that_cannot_be_used_are_two(
    flags: list[str], words: str, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        probe.main(["127.0.0.1:1", *(flag.replace("CERT", str(authority.ca)) for flag in flags)])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
