"""TLS and gate as the flags say, and nothing that no flag asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.clients.certificates import Authority
from support.clients.protected_stack import write_identities

from pagekv.common.tls_flags import TlsConfig
from pagekv.kvmanager.access.flags import AccessConfig
from pagekv.kvmanager.access.opening import Access, CannotProtect, open_access


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    write_identities(tmp_path / "identities.toml")
    return tmp_path / "identities.toml"


def tls_of(folder: Path) -> tuple[TlsConfig, Authority]:
    authority = Authority(folder)
    pair = authority.pair("pagekv-manager")
    return TlsConfig(str(pair.cert), str(pair.key), str(authority.ca)), authority


def test_without_flags_there_is_nothing() -> None:
    access = open_access(AccessConfig())
    assert access == Access()
    assert access.files == []
    assert access.gate is None
    assert (access.server_credentials(), access.http_context(), access.executor_credentials()) == (None, None, None)
    access.close()


def test_without_flags_no_package_of_theirs_is_imported() -> None:
    """Such packages may not be installed, and take 100 ms."""
    code = (
        "import sys; from pagekv.kvmanager.access.opening import *; open_access(AccessConfig())\n"
        "assert not sys.modules.keys() & {'cryptography', 'jwt', 'aiohttp'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_with_all_flags(tmp_path: Path, identities: Path) -> None:
    tls, authority = tls_of(tmp_path)
    access = open_access(
        AccessConfig(tls, str(authority.ca), identities=str(identities), audit_log=str(tmp_path / "audit"))
    )
    assert [files.what for files in access.files] == ["TLS", "identities"]
    assert access.gate is not None
    assert access.gate.audit_log is not None
    assert access.server_credentials() is not None
    assert access.http_context() is not None
    assert access.executor_credentials() is not None
    assert access.gate.audit_log.lost_lines == 0
    access.close()
    access.close()
    access.gate.audit_log.called("olga", "", "late")
    assert access.gate.audit_log.lost_lines == 1


def test_an_authority_of_the_executor_alone_serves_without_tls(tmp_path: Path) -> None:
    access = open_access(AccessConfig(executor_ca=str(Authority(tmp_path).ca)))
    assert access.executor_credentials() is not None
    assert (access.server_credentials(), access.http_context()) == (None, None)


def test_tls_alone_leaves_the_link_to_the_executor_as_it_is(tmp_path: Path) -> None:
    access = open_access(AccessConfig(tls_of(tmp_path)[0]))
    assert access.executor_credentials() is None
    assert access.server_credentials() is not None


def test_a_file_that_cannot_be_used_is_named_in_one_line(tmp_path: Path, identities: Path) -> None:
    (tmp_path / "bad.toml").write_text("[keys]\n")
    (tmp_path / "bad.toml").chmod(0o600)
    for config, words in (
        (AccessConfig(identities=str(tmp_path / "none.toml")), "none.toml: cannot be read"),
        (AccessConfig(identities=str(tmp_path / "bad.toml")), "bad.toml: must have one identity at least"),
        (AccessConfig(identities=str(identities), audit_log=str(tmp_path / "no" / "x")), "no/x"),
        (AccessConfig(executor_ca=str(tmp_path / "ca")), "--executor-ca"),
    ):
        with pytest.raises(CannotProtect, match=words) as caught:
            open_access(config)
        assert "\n" not in str(caught.value)


def test_an_address_for_a_gateway_needs_its_identity(tmp_path: Path, identities: Path) -> None:
    config = AccessConfig(identities=str(identities), gateway_listen="127.0.0.1:0")
    words = f"^--identities {identities}: gateway: must be a table, for --gateway-listen; is not"
    with pytest.raises(CannotProtect, match=words):
        open_access(config)
    identities.write_text(identities.read_text() + '[gateway]\nroles = ["generate"]\n')
    access = open_access(config)
    assert access.gate is not None
    assert access.gate.authenticator.gateway is not None


def test_a_package_that_is_missing_is_named(identities: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pagekv.kvmanager.access.gate", None)
    with pytest.raises(CannotProtect, match=r"pip install 'pagekv\[manager\]'"):
        open_access(AccessConfig(identities=str(identities)))


def test_the_cluster_secret(tmp_path: Path, identities: Path) -> None:
    """Drawn anew for each start, unless a file has it; nobody is asked for one where nobody is asked who they are."""
    assert open_access(AccessConfig()).secret == b""
    drawn = [open_access(AccessConfig(identities=str(identities))).secret for _ in range(2)]
    assert len(set(drawn)) == 2
    assert {len(secret) for secret in drawn} == {32}
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(bytes(range(40)))
    config = AccessConfig(identities=str(identities), cluster_secret=str(secret))
    assert open_access(config).secret == bytes(range(40))
    for content, mode, words in (
        (bytes(31), 0o600, "must have from 32 to 1024 bytes, has 31"),
        (bytes(1025), 0o600, "must have from 32 to 1024 bytes, has 1025"),
        (bytes(32), 0o604, "others can read or change it"),
    ):
        secret.write_bytes(content)
        secret.chmod(mode)
        with pytest.raises(CannotProtect, match=words):
            open_access(config)


@pytest.mark.parametrize("name", ["audit_log", "cluster_secret"])
def test_a_file_that_is_not_there_is_named_with_its_flag(name: str, tmp_path: Path, identities: Path) -> None:
    missing = str(tmp_path / "nowhere" / "file")
    flag, known = name.replace("_", "-"), str(identities)
    config = {
        "audit_log": AccessConfig(identities=known, audit_log=missing),
        "cluster_secret": AccessConfig(identities=known, cluster_secret=missing),
    }[name]
    with pytest.raises(CannotProtect, match=f"^--{flag} {missing}: No such file or directory$"):
        open_access(config)
