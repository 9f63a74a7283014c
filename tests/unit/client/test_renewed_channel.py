"""Clients whose certificate and authority are replaced while they live, over real connections with mutual TLS."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.clients.certificates import Authority
from support.clients.scripted_server import Hangs, ScriptedServer, answer, chunk

from pagekv.client import Cancelled, FailedPrecondition, renewed_channel
from pagekv.client.identity import TlsFiles
from pagekv.v1 import operator_service_pb2 as operator_pb

STATS = operator_pb.GetStatsResponse()
# Every way to wait, by the method called, with a first answer that does not end the wait.
WAITS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "GetModelInfo": (lambda client: client.model_info(), ()),
    "Generate": (lambda client: list(client.stream("x", max_tokens=2)), (chunk(4),)),
    "WatchEvents": (lambda client: list(client.watch_events()), ()),
}


class Site:
    """A manager for callers with a certificate of its authority, and the files of one caller."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.server = folder, ScriptedServer()
        self.files = {
            "ca": folder / "ca.pem",
            "client_cert": folder / "client.pem",
            "client_key": folder / "client.key",
        }
        self.found_authority()

    def found_authority(self) -> None:
        """A new authority in the place of the one before; it has signed the certificates of both."""
        self.server.stop()
        self.authority = Authority(self.folder)
        self.authority.pair("client")
        pair, signed = self.authority.pair("manager"), self.authority.ca.read_bytes()
        self.server.credentials = grpc.ssl_server_credentials([(pair.key_pem, pair.pem)], signed, True)
        self.server.start()

    def answers(self, client: Any) -> None:
        self.server.expect("GetStats", STATS)
        client.stats()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    try:
        yield made
        made.server.finish()
    finally:
        made.server.stop()


def test_a_client_outlives_its_certificate_and_its_authority(site: Site, make_client: Any) -> None:
    """It read them once, and said of the next connection that nothing is signed by an authority trusted here."""
    client = make_client(site.server.target, **site.files)
    site.answers(client)
    for _ in range(2):
        site.found_authority()
        site.answers(client.with_options(timeout=20))


def test_a_stream_is_resumed_with_the_files_of_then(site: Site, make_client: Any) -> None:
    client = make_client(site.server.target, **site.files)
    site.server.expect("Generate", chunk(4), Hangs())
    stream = client.stream("x", max_tokens=2)
    assert next(stream).token_ids == (4,)
    site.found_authority()
    site.server.expect("Generate", *answer(5, resumed=1))
    assert [token for each in stream for token in each.token_ids] == [5]


@pytest.mark.parametrize("method", WAITS)
def test_calls_under_way_stay_until_the_client_is_closed(site: Site, make_client: Any, method: str) -> None:
    client = make_client(site.server.target, **site.files)
    call, first = WAITS[method]
    called = threading.Event()
    site.server.expect(method, called.set, *first, Hangs())
    with ThreadPoolExecutor(1) as other:
        result = other.submit(call, client)
        assert called.wait(60)
        for _ in range(2):
            site.authority.pair("client")
            site.answers(client)
            gc.collect()
        assert not result.done()
        assert site.server.cancelled == []
        client.close()
        with pytest.raises(Cancelled):
            result.result(60)
    site.server.wait_cancelled(method)


def test_a_certificate_without_its_key_changes_nothing_yet(
    site: Site, make_client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewed_channel, "RETRY_S", 0.0)
    client = make_client(site.server.target, **site.files)
    before = site.files["client_cert"].read_bytes(), site.files["client_key"].read_bytes()
    site.authority.pair("client")
    after = site.files["client_key"].read_bytes()
    site.files["client_key"].write_bytes(before[1])
    for _ in range(2):
        site.answers(client)
    words = "files of TLS have changed and cannot be used; the earlier content is used: client_key: "
    assert [record.getMessage().startswith(words) for record in caplog.records] == [True]
    site.files["client_key"].write_bytes(after)
    site.answers(client)
    site.files["ca"].unlink()
    site.answers(client)
    assert "No such file" in caplog.records[-1].getMessage()


def test_files_that_cannot_be_used_are_read_again_after_a_pause(
    site: Site, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, read = 100.0, 0
    credentials = TlsFiles.credentials

    def counted(files: TlsFiles) -> grpc.ChannelCredentials:
        nonlocal read
        read += 1
        return credentials(files)

    monkeypatch.setattr(renewed_channel, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(TlsFiles, "credentials", counted)
    client = make_client(site.server.target, **site.files)
    site.files["ca"].unlink()
    before = read
    for later, count in ((0.0, 1), (0.9, 1), (0.2, 2)):
        now += later * renewed_channel.RETRY_S
        site.answers(client)
        assert read - before == count
    site.found_authority()
    now += 1.1 * renewed_channel.RETRY_S
    site.answers(client)
    assert read - before == 3


def test_a_closed_client_opens_no_connection(site: Site, make_client: Any) -> None:
    client = make_client(site.server.target, **site.files)
    client.close()
    site.authority.pair("client")
    with pytest.raises(FailedPrecondition, match="was closed here"):
        client.stats()
