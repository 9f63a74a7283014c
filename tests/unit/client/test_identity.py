"""How client and manager know each other: over a real connection with TLS, and refused before there is one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clients.certificates import Authority
from support.clients.scripted_server import ScriptedServer

from pagekv.client import AsyncPageKVClient, InvalidRequest, PageKVClient, PageKVError, Unreachable
from pagekv.client.cli import private_authority as pki
from pagekv.client.identity import FILE_VARIABLES, TENANT
from pagekv.client.settings import CallSettings
from pagekv.v1 import operator_service_pb2 as operator_pb

STATS = operator_pb.GetStatsResponse()
KEY = "pkv_a-key-of-nobody"
REMOTE = "gpu-7:50051"


def files_of(directory: Path) -> dict[str, Any]:
    return {name: directory / name.replace("_cert", ".pem").replace("_key", ".key") for name in FILE_VARIABLES} | {
        "ca": directory / "ca.pem"
    }


def served_with(directory: Path, name: str) -> Iterator[ScriptedServer]:
    """A manager with this certificate, for every caller."""
    pair = (directory / f"{name}.key").read_bytes(), (directory / f"{name}.pem").read_bytes()
    server = ScriptedServer(credentials=grpc.ssl_server_credentials([pair]))
    server.start()
    yield server
    server.finish()


def test_files_make_the_connection_and_the_key_goes_with_every_call(
    secure_server: ScriptedServer, certificates: Path, make_client: Any
) -> None:
    client = make_client(secure_server.target, api_key=KEY, **files_of(certificates))
    for _ in range(2):
        secure_server.expect("GetStats", STATS)
        client.stats()
    assert secure_server.metadata == [{"authorization": f"Bearer {KEY}"}] * 2


def test_the_name_of_a_manager_behind_a_unix_socket_is_localhost(certificates: Path, make_client: Any) -> None:
    pair = (certificates / "manager.key").read_bytes(), (certificates / "manager.pem").read_bytes()
    server = grpc.server(ThreadPoolExecutor(1))
    with tempfile.TemporaryDirectory() as short:
        target = f"unix:{short}/manager"
        server.add_secure_port(target, grpc.ssl_server_credentials([pair]))
        server.start()
        # It is reached, and serves nothing.
        with pytest.raises(PageKVError, match="does not know this call: is it a PageKV manager"):
            make_client(target, ca=certificates / "ca.pem").stats()
        server.stop(None).wait()


def test_the_environment_names_files_and_key(
    secure_server: ScriptedServer, certificates: Path, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in files_of(certificates).items():
        monkeypatch.setenv(FILE_VARIABLES[name], str(path))
    monkeypatch.setenv("PAGEKV_API_KEY", KEY)
    secure_server.expect("GetStats", STATS)
    make_client(secure_server.target).stats()
    assert secure_server.metadata == [{"authorization": f"Bearer {KEY}"}]


def test_empty_variables_are_none(server: ScriptedServer, make_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEKV_API_KEY", *FILE_VARIABLES.values()):
        monkeypatch.setenv(name, "")
    server.expect("GetStats", STATS)
    make_client(server.target).stats()
    assert server.metadata == [{}]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "does it want TLS"),
        (("ca",), "or a client certificate"),
        (("client_cert", "client_key"), "not signed by an authority trusted here"),
    ],
)
def test_a_refused_handshake_is_told_in_words(
    secure_server: ScriptedServer, certificates: Path, make_client: Any, given: tuple[str, ...], words: str
) -> None:
    files = {name: path for name, path in files_of(certificates).items() if name in given}
    with pytest.raises(Unreachable, match=words):
        make_client(secure_server.target, **files).stats()


def test_a_client_certificate_of_another_authority_is_refused(
    secure_server: ScriptedServer, certificates: Path, make_client: Any, tmp_path: Path
) -> None:
    stranger, _ = pki.authority_in(tmp_path)
    pki.issue(tmp_path, pki.ROLES[-1], stranger, 1, ())
    files = files_of(tmp_path) | {"ca": certificates / "ca.pem"}
    with pytest.raises(Unreachable, match="of an authority that it trusts"):
        make_client(secure_server.target, **files).stats()


def test_an_authority_of_the_same_name_is_told_apart(make_client: Any, tmp_path: Path) -> None:
    """As one that was made anew. Without identifiers, only the signature tells."""
    Authority(tmp_path, identifies=False).pair("manager")
    (tmp_path / "anew").mkdir()
    anew = Authority(tmp_path / "anew", identifies=False).ca
    for server in served_with(tmp_path, "manager"):
        with pytest.raises(Unreachable, match="signed by another authority than the one given here"):
            make_client(server.target, ca=anew).stats()


def test_a_manager_without_tls_is_told_apart(server: ScriptedServer, certificates: Path, make_client: Any) -> None:
    with pytest.raises(Unreachable, match="it answers without TLS"):
        make_client(server.target, ca=certificates / "ca.pem").stats()


def test_a_certificate_of_another_name_is_told_apart(make_client: Any, tmp_path: Path) -> None:
    authority, _ = pki.authority_in(tmp_path)
    pki.issue(tmp_path, pki.CertificateRole("nameless", pki.ROLES[0].uses), authority, 1, ())
    for server in served_with(tmp_path, "nameless"):
        with pytest.raises(Unreachable, match="its certificate is not for this name"):
            make_client(server.target, ca=tmp_path / "ca.pem").stats()


@pytest.mark.parametrize(
    ("since", "until", "words"),
    [
        (-2, -1, "has expired by this machine's clock: renew it, or set the clock"),
        (1, 2, "is not valid yet by this machine's clock: set the clocks of both"),
    ],
)
def test_a_clock_that_is_a_day_off_is_told_apart(
    make_client: Any, tmp_path: Path, since: int, until: int, words: str
) -> None:
    authority = Authority(tmp_path)
    authority.pair("manager", since=timedelta(days=since), until=timedelta(days=until))
    for server in served_with(tmp_path, "manager"):
        with pytest.raises(Unreachable, match=words):
            make_client(server.target, ca=authority.ca).stats()


def test_a_client_certificate_that_has_expired_is_refused(make_client: Any, tmp_path: Path) -> None:
    """The manager gives no reason, so that the words name several."""
    authority = Authority(tmp_path)
    pair, signed = authority.pair("manager"), authority.ca.read_bytes()
    ended = authority.pair("client", since=timedelta(days=-2), until=timedelta(days=-1))
    server = ScriptedServer(credentials=grpc.ssl_server_credentials([(pair.key_pem, pair.pem)], signed, True))
    server.start()
    with pytest.raises(Unreachable, match="which has not expired by its clock"):
        make_client(server.target, ca=authority.ca, client_cert=ended.cert, client_key=ended.key).stats()
    server.finish()


def test_a_client_certificate_does_not_serve(certificates: Path, make_client: Any) -> None:
    for server in served_with(certificates, "client"):
        with pytest.raises(Unreachable, match="certificate was refused"):
            make_client(server.target, ca=certificates / "ca.pem").stats()


def test_a_key_is_for_this_machine_or_tls(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/s"):
        PageKVClient(target, api_key=KEY).close()
    for given in (
        {"ca": certificates / "ca.pem"},
        {"credentials": grpc.ssl_channel_credentials()},
        {"channel": grpc.insecure_channel(REMOTE)},
    ):
        PageKVClient(REMOTE, api_key=KEY, **given).close()
    with pytest.raises(InvalidRequest, match=r"^api_key: would cross the network in plain text: give credentials"):
        PageKVClient(REMOTE, api_key=KEY)
    monkeypatch.setenv("PAGEKV_API_KEY", KEY)
    with pytest.raises(InvalidRequest, match=r"plain text \(from PAGEKV_API_KEY\)"):
        PageKVClient(REMOTE)


def test_one_authorization_goes_with_a_call(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [("authorization", "Bearer own")]
    with pytest.raises(InvalidRequest, match=r"^api_key: must be left out beside metadata with authorization$"):
        PageKVClient(server.target, api_key=KEY, metadata=own)
    monkeypatch.setenv("PAGEKV_API_KEY", KEY)
    with PageKVClient(server.target, metadata=own) as client, PageKVClient(server.target, api_key="given") as other:
        for each in (client, other, other.with_options(metadata=own), other.with_options(metadata=[("a", "b")])):
            server.expect("GetStats", STATS)
            each.stats()
    assert [each["authorization"] for each in server.metadata] == [
        "Bearer own", "Bearer given", "Bearer own", "Bearer given"
    ]  # fmt: skip  # one line for the values


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("", "has 0"),
        ("x" * 8001, "has 8,001"),
        ("two words", "has others"),
        ("clé", "has others"),
        ("a\n", "has others"),
    ],
)
def test_what_is_no_key(key: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "must be 1 to 8,000 printable ASCII characters without spaces"
    with pytest.raises(InvalidRequest, match=f"^api_key: {words}, {given}$"):
        PageKVClient(api_key=key)
    PageKVClient(api_key="x" * 8000).close()
    if key:
        monkeypatch.setenv("PAGEKV_API_KEY", key)
        with pytest.raises(InvalidRequest, match=rf"{given} \(from PAGEKV_API_KEY\)$"):
            PageKVClient()


def test_a_gateway_names_the_tenant_of_its_calls(server: ScriptedServer, make_client: Any) -> None:
    client = make_client(server.target, act_for="team-a")
    for each in (client, client.with_options(metadata=[("a", "b")]), client.with_options(metadata=[(TENANT, "b")])):
        server.expect("GetStats", STATS)
        each.stats()
    assert [each["pagekv-tenant"] for each in server.metadata] == ["team-a", "team-a", "b"]
    assert "a" in server.metadata[1]


@pytest.mark.parametrize("act_for", ["", "a b", "a\n", "ä", "*", "jwt:alice", "x" * 65, 5])
def test_what_is_no_tenant(act_for: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^act_for: must be 1 to 64 of the characters A-Z, a-z, 0-9, ., _ and -, is"
    ):
        PageKVClient(act_for=act_for)


def test_one_tenant_goes_with_a_call() -> None:
    with pytest.raises(InvalidRequest, match=r"^act_for: must be left out beside metadata with pagekv-tenant$"):
        PageKVClient(act_for="a", metadata=[(TENANT, "a")])


def test_no_key_is_shown() -> None:
    with PageKVClient("127.0.0.1:1", api_key=KEY) as client:
        assert KEY not in f"{client!r} {vars(client)!r}"
        assert KEY not in repr(CallSettings(metadata=(("authorization", KEY),)))
    for wrong in (KEY + " ", KEY + "\n"):
        with pytest.raises(InvalidRequest) as caught:
            PageKVClient(api_key=wrong)
        assert KEY not in repr(caught.value)


def test_certificate_and_key_come_together(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, other in (("client_cert", "client_key"), ("client_key", "client_cert")):
        files: Any = {name: certificates / "client.pem"}
        with pytest.raises(InvalidRequest, match=f"^{name}: needs {other}, too"):
            PageKVClient(**files)
    monkeypatch.setenv("PAGEKV_CLIENT_KEY", str(certificates / "client.key"))
    PageKVClient(client_cert=str(certificates / "client.pem")).close()


def test_files_are_left_out_beside_credentials_and_channel(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = certificates / "ca.pem"
    with pytest.raises(InvalidRequest, match=r"^ca: must be left out beside credentials"):
        PageKVClient(ca=ca, credentials=grpc.ssl_channel_credentials())
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(InvalidRequest, match=r"^client_key: must be left out beside channel"):
            PageKVClient(client_key=ca, channel=channel)
        # The environment is for those who give neither.
        monkeypatch.setenv("PAGEKV_CA", "/nowhere")
        PageKVClient(channel=channel)
    PageKVClient(credentials=grpc.ssl_channel_credentials()).close()


@pytest.mark.parametrize("cls", [PageKVClient, AsyncPageKVClient])
def test_a_file_that_is_none_is_named(
    cls: Any, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = files_of(certificates)
    broken, locked = tmp_path / "broken", tmp_path / "locked"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for name, path, words in (
        ("ca", tmp_path / "missing", "cannot be read: No such file or directory"),
        ("ca", "a\0b", "cannot be read: embedded null byte"),
        ("ca", tmp_path, "cannot be read: Is a directory"),
        ("ca", good["client_key"], "must have a certificate in PEM"),
        ("ca", broken, "is no certificate"),
        ("client_cert", good["client_key"], "must have a certificate in PEM"),
        ("client_cert", broken, "is no certificate with the key"),
        ("client_key", good["ca"], "must have a private key in PEM"),
        ("client_key", certificates / "manager.key", "is not the key of the certificate"),
        ("client_key", locked, "must have no passphrase"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            cls(**{**good, name: path})
        assert caught.value.field == name
        assert str(caught.value).startswith(f"{name}: {path}: {words}"), caught.value
    monkeypatch.setenv("PAGEKV_CA", "/nowhere")
    with pytest.raises(InvalidRequest, match=r"^ca: /nowhere \(from PAGEKV_CA\): cannot be read"):
        cls()
