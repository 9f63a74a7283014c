"""TLS from files: connections, and what a rotation changes for new ones alone. test_tls_refusals.py: refused files."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clients.certificates import Authority, Pair, client_credentials, config_of
from support.clients.stack import environment
from support.event_loop import in_event_loop, until, until_true

from pagekv.common import health
from pagekv.common.server import GrpcServer
from pagekv.common.tls import PairFiles, Tls, TlsError
from pagekv.common.tls_flags import TlsConfig

CHECK = f"/{health.SERVICE_NAME}/Check"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def client(ca: Path, pair: Pair | None = None) -> grpc.ChannelCredentials:
    return client_credentials(ca, pair)


async def health_of(channel: grpc.aio.Channel) -> None:
    # Any: without a serializer the stubs know no type of request.
    call: Any = channel.unary_unary(CHECK)
    await call(b"", timeout=120)


async def ask(port: int, credentials: grpc.ChannelCredentials | None) -> str:
    """The status code of a call of health."""
    target, options = f"127.0.0.1:{port}", [("grpc.enable_retries", 0)]
    channel = (
        grpc.aio.insecure_channel(target, options)
        if credentials is None
        else grpc.aio.secure_channel(target, credentials, options)
    )
    async with channel:
        try:
            await health_of(channel)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def ask_ok(port: int, credentials: grpc.ChannelCredentials) -> bool:
    return await ask(port, credentials) == "OK"


async def serve(tls: Tls) -> GrpcServer:
    server = GrpcServer("127.0.0.1:0", [], reflection=False, credentials=tls.server_credentials())
    await server.start()
    return server


@in_event_loop
async def test_only_clients_that_trust_the_authority_and_speak_tls_are_answered(
    authority: Authority, tmp_path: Path
) -> None:
    server = await serve(Tls(config_of(authority.pair("server"))))
    stranger = Authority(tmp_path, "stranger")
    try:
        assert await ask(server.port, client(authority.ca)) == "OK"
        assert await ask(server.port, client(stranger.ca)) == "UNAVAILABLE"
        assert await ask(server.port, None) == "UNAVAILABLE"
    finally:
        await server.stop(0)


@in_event_loop
async def test_with_a_client_authority_only_its_certificates_are_let_in(authority: Authority, tmp_path: Path) -> None:
    server = await serve(Tls(config_of(authority.pair("server"), authority.ca)))
    stranger = Authority(tmp_path, "stranger").pair("client", file="rival")
    expired = authority.pair("late", since=timedelta(days=-3), until=timedelta(days=-2))
    try:
        assert await ask(server.port, client(authority.ca, authority.pair("client"))) == "OK"
        for pair in (None, stranger, expired):
            assert await ask(server.port, client(authority.ca, pair)) == "UNAVAILABLE"
    finally:
        await server.stop(0)


@in_event_loop
async def test_a_rotation_holds_for_new_connections_and_breaks_none(authority: Authority, tmp_path: Path) -> None:
    old = authority.pair("server")
    tls = Tls(config_of(old))
    server = await serve(tls)
    watching = asyncio.create_task(tls.files.watch(0.02))
    newer = Authority(tmp_path, "newer")
    try:
        async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", client(authority.ca)) as channel:
            await health_of(channel)
            newer.pair("server")
            await until_true(lambda: ask_ok(server.port, client(newer.ca)))
            assert await ask(server.port, client(authority.ca)) == "UNAVAILABLE"
            await health_of(channel)  # as before, over the connection that was open
        assert not tls.files.are_refused
    finally:
        watching.cancel()
        await server.stop(0)


@in_event_loop
async def test_authorities_that_are_not_valid_are_left_out_of_their_file(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = authority.pair("old", since=timedelta(days=-3), until=timedelta(days=-2))
    future = authority.pair("future", since=timedelta(days=1))
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(old.pem + authority.ca.read_bytes() + future.pem)
    server = await serve(Tls(config_of(authority.pair("server"), bundle)))
    try:
        assert await ask(server.port, client(authority.ca, authority.pair("client"))) == "OK"
    finally:
        await server.stop(0)
    logged = [vars(each)["fields"] for each in caplog.records]
    assert [each["name"] for each in logged] == ["CN=old", "CN=future"]
    assert "expired at" in str(logged[0]["reason"])
    assert "not valid before" in str(logged[1]["reason"])


@in_event_loop
async def test_the_log_warns_of_the_end_of_a_certificate(
    authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor has no metric that would, and the reason why a handshake failed is known to the other side alone."""
    now = datetime.now(UTC)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return now

    def logged() -> list[str]:
        return [each.levelname for each in caplog.records]

    monkeypatch.setattr("pagekv.common.tls.datetime", Clock)
    pair = authority.pair("server", until=timedelta(days=20))
    tls = Tls(config_of(pair))
    watching = asyncio.create_task(tls.files.watch(0.01))
    await asyncio.sleep(0.2)
    assert logged() == []
    now += timedelta(days=16)
    await until(lambda: logged() == ["WARNING"])
    now += timedelta(days=5)
    await until(lambda: logged() == ["WARNING", "ERROR"])
    assert [vars(each)["fields"]["file"] for each in caplog.records] == [str(pair.cert)] * 2
    assert "ends soon" in caplog.records[0].message
    assert "has ended, new connections fail" in caplog.records[1].message
    authority.pair("server", until=timedelta(days=30))
    await until(lambda: tls.validity is not None and tls.validity[1] > now)
    caplog.clear()
    await asyncio.sleep(0.1)
    assert logged() == []
    now += timedelta(days=2)
    await until(lambda: logged() == ["WARNING"])
    watching.cancel()


@in_event_loop
async def test_connections_from_many_threads_do_not_end_a_process_that_rotates(
    authority: Authority, tmp_path: Path
) -> None:
    config = config_of(authority.pair("server"))
    with running_server(config) as (process, port):
        over, made = threading.Event(), [0] * 8
        callers = [asyncio.create_task(asyncio.to_thread(connect_until, over, port, made, at)) for at in range(8)]
        begun = time.monotonic()
        try:
            # Twenty rotations, and longer on a busy machine.
            while time.monotonic() < begun + 6 or (sum(made) < 1000 and time.monotonic() < begun + 240):
                authority.pair("server")
                await asyncio.sleep(0.3)
        finally:
            over.set()
        await asyncio.gather(*callers)
        # Nothing but an end of the process refuses connections here.
        assert process.poll() is None
        assert sum(made) >= 1000
        assert await ask(port, client(authority.ca)) == "OK"


def connect_until(over: threading.Event, port: int, made: list[int], at: int) -> None:
    """Counts the connections that were made until then."""
    while not over.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            made[at] += 1


@contextmanager
def running_server(config: TlsConfig) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that serves health with these files, which it watches; and its port."""
    code = (
        "import asyncio, sys\n"
        "from pagekv.common.server import GrpcServer\n"
        "from pagekv.common.tls import Tls\n"
        "from pagekv.common.tls_flags import TlsConfig\n"
        "async def main():\n"
        "    tls = Tls(TlsConfig(*sys.argv[1:]))\n"
        "    server = GrpcServer('127.0.0.1:0', [], reflection=False, credentials=tls.server_credentials())\n"
        "    await server.start()\n"
        "    print(server.port, flush=True)\n"
        "    await tls.files.watch(0.02)\n"
        "asyncio.run(main())\n"
    )
    words = [sys.executable, "-c", code, config.tls_cert, config.tls_key, config.tls_client_ca]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@in_event_loop
async def test_files_that_cannot_be_used_leave_what_was_read_before(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.pair("server")
    tls = Tls(config_of(pair))
    server = await serve(tls)
    watching = asyncio.create_task(tls.files.watch(0.02))
    try:
        pair.cert.write_text("no certificate\n")
        await until(lambda: tls.files.are_refused)
        assert await ask(server.port, client(authority.ca)) == "OK"
        fields = [getattr(record, "fields", {}) for record in caplog.records]
        reasons = [str(each["error"]) for each in fields if "error" in each]
        assert reasons == [f"--tls-cert {pair.cert}: must be certificates in PEM"]
    finally:
        watching.cancel()
        await server.stop(0)


async def handshake(port: int, ca: Path, pair: Pair | None = None) -> bool:
    """Whether an HTTPS client of these files gets an answer."""
    context = ssl.create_default_context(cafile=ca)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        answer = await reader.read(2)
        writer.close()
    except (ssl.SSLError, ConnectionError):
        return False
    return answer == b"ok"


async def serve_http(tls: Tls) -> tuple[asyncio.Server, int]:
    """Says "ok" to every connection, at the port that is returned."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"ok")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls.http_context())
    return server, server.sockets[0].getsockname()[1]


@in_event_loop
async def test_http_takes_the_latest_files_and_authorities_at_each_handshake(
    authority: Authority, tmp_path: Path
) -> None:
    clients = tmp_path / "clients.pem"
    clients.write_bytes(authority.ca.read_bytes())
    tls = Tls(config_of(authority.pair("server"), clients))

    server, port = await serve_http(tls)
    watching = asyncio.create_task(tls.files.watch(0.02))
    former, newer = authority.pair("client"), Authority(tmp_path, "newer")
    successor = newer.pair("client", file="successor")
    try:
        assert await handshake(port, authority.ca, former)
        assert not await handshake(port, authority.ca)
        assert not await handshake(port, authority.ca, successor)
        clients.write_bytes(newer.ca.read_bytes())
        await until_true(lambda: handshake(port, authority.ca, successor))
        assert not await handshake(port, authority.ca, former)
    finally:
        watching.cancel()
        server.close()


def session_of(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """The session of a connection that offers to go on with this one; None where it was refused."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
        ):
            return connection.session if connection.recv(2) == b"ok" else None
    except (ssl.SSLError, ConnectionError):
        return None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@in_event_loop
async def test_no_session_outlives_the_authority_of_its_certificate(
    authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """One that is resumed is not verified anew; with TLS 1.2, where sessions cannot be turned off, none begins."""
    clients = tmp_path / "clients.pem"
    clients.write_bytes(authority.ca.read_bytes())
    tls = Tls(config_of(authority.pair("server"), clients))

    server, port = await serve_http(tls)
    pair = authority.pair("client")
    context = ssl.create_default_context(cafile=authority.ca)
    context.maximum_version = version
    context.load_cert_chain(pair.cert, pair.key)
    begun = await asyncio.to_thread(session_of, port, context, None)
    assert (begun is not None) == (version is ssl.TLSVersion.TLSv1_3)
    clients.write_bytes(Authority(tmp_path, "newer").ca.read_bytes())
    tls._load()
    assert await asyncio.to_thread(session_of, port, context, begun) is None
    server.close()


@pytest.mark.parametrize("text", ["# Główny urząd\n", "\ufeff", "\ufeff# Staat der Nederlanden\r\n"])
@in_event_loop
async def test_text_between_the_certificates_of_authorities_is_left_out(text: str, authority: Authority) -> None:
    """Bundles name their authorities in comments, and some editors begin a file with a byte order mark."""
    authority.ca.write_bytes(text.encode() + authority.ca.read_bytes() + text.encode())
    tls = Tls(config_of(authority.pair("server"), authority.ca), ("executor-ca", str(authority.ca)))
    server = await serve(tls)
    try:
        assert tls.http_context().verify_mode is ssl.CERT_REQUIRED
        own = tls.channel_credentials()
        assert own is not None
        # With its own authorities as those of the peer, and with the certificate that it serves with.
        assert await ask(server.port, own) == "OK"
    finally:
        await server.stop(0)


def test_without_an_authority_of_the_peer_a_connection_is_not_encrypted(authority: Authority) -> None:
    tls = Tls(config_of(authority.pair("server")))
    assert tls.channel_credentials() is None
    assert tls.validity is not None
    alone = Tls(TlsConfig(), ("executor-ca", str(authority.ca)))
    assert alone.channel_credentials() is not None
    assert not alone.serves
    assert os.path.exists(authority.ca)


def test_a_certificate_of_its_own_is_for_the_peer(authority: Authority, tmp_path: Path) -> None:
    """Beside the one to serve with, or where nothing is served with TLS; the end told is that of the first to end."""
    short = authority.pair("link", until=timedelta(days=2))
    peer = PairFiles("executor-cert", str(short.cert), "executor-key", str(short.key))
    for config in (TlsConfig(), config_of(authority.pair("server"))):
        tls = Tls(config, ("executor-ca", str(authority.ca)), peer)
        assert tls.serves == bool(config.tls_cert)
        assert tls.channel_credentials() is not None
        assert tls.validity is not None
        assert (tls.validity[1] - datetime.now(UTC)).days <= 2
    stranger = PairFiles("executor-cert", str(short.cert), "executor-key", str(tmp_path / "gone"))
    with pytest.raises(TlsError, match=f"^--executor-key {tmp_path}/gone: No such file"):
        Tls(TlsConfig(), ("executor-ca", str(authority.ca)), stranger)
