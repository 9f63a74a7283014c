"""Files of TLS that are refused at the start, each in a line that names its flag."""

from __future__ import annotations

import os
import ssl
from datetime import timedelta
from pathlib import Path

import pytest
from support.clients.certificates import Authority, Pair, config_of

from pagekv.common.tls import Tls, TlsError
from pagekv.common.tls_flags import TlsConfig


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refusal(config: TlsConfig, peer_ca: tuple[str, str] = ("", "")) -> str:
    with pytest.raises(TlsError) as refused:
        Tls(config, peer_ca)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_each_file_that_cannot_be_used_is_named_with_its_flag(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.pair("server"), authority.pair("other")
    late = authority.pair("late", since=timedelta(days=-3), until=timedelta(days=-2))
    early = authority.pair("early", since=timedelta(days=1), until=timedelta(days=2))
    gone, text = tmp_path / "gone.pem", tmp_path / "text.pem"
    text.write_text("no PEM\n")
    assert refusal(config_of(Pair(gone, good.key))) == f"--tls-cert {gone}: No such file or directory"
    assert refusal(config_of(Pair(text, good.key))) == f"--tls-cert {text}: must be certificates in PEM"
    assert refusal(config_of(Pair(good.cert, other.key))).endswith(f"is not the key of the certificate in {good.cert}")
    for pair, problem, remedy in (
        (late, "the certificate expired at 20", "UTC: renew it, or set this machine's clock"),
        (early, "the certificate is not valid before 20", "UTC: wait, or set this machine's clock"),
    ):
        words = refusal(config_of(pair))
        assert words.startswith(f"--tls-cert {pair.cert}: {problem}")
        assert words.endswith(remedy)
    assert refusal(config_of(good, text)) == f"--tls-client-ca {text}: must be certificates in PEM"
    assert refusal(config_of(good), ("executor-ca", str(gone))).startswith(f"--executor-ca {gone}: ")
    text.chmod(0o600)
    assert refusal(config_of(Pair(good.cert, text))) == f"--tls-key {text}: must be a private key in PEM"
    assert refusal(config_of(Pair(tmp_path, good.key))) == f"--tls-cert {tmp_path}: Is a directory"
    text.write_bytes(b" " * (2**20 + 1))
    assert refusal(config_of(Pair(text, good.key))) == f"--tls-cert {text}: must be at most 1048576 bytes"


def test_authorities_of_which_none_is_valid_are_refused(authority: Authority, tmp_path: Path) -> None:
    old = authority.pair("old", since=timedelta(days=-3), until=timedelta(days=-2))
    future = authority.pair("future", since=timedelta(days=1))
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(old.pem + future.pem)
    words = f"--tls-client-ca {bundle}: the certificate expired at 20"
    assert words in refusal(config_of(authority.pair("server"), bundle))


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o604])
def test_a_key_that_others_can_read_or_change_is_refused(authority: Authority, mode: int) -> None:
    pair = authority.pair("server")
    pair.key.chmod(mode)
    assert f"others can read or change this private key (mode {mode:o}): chmod 600" in refusal(config_of(pair))
    pair.key.chmod(0o640)  # of a group: as containers get their secrets
    assert Tls(config_of(pair)).serves


def damaged(authority: Authority, pair: Pair, found: bytes, other: bytes) -> Pair:
    """The pair with other bytes of the same length in its certificate."""
    der = ssl.PEM_cert_to_DER_cert(pair.pem.decode())
    assert found in der
    pair.cert.write_text(ssl.DER_cert_to_PEM_cert(der.replace(found, other, 1)))
    return pair


def test_certificates_of_kinds_that_are_not_known_are_refused_in_words(authority: Authority) -> None:
    """Their errors are cryptography's own, which are no ValueError."""
    version = damaged(authority, authority.pair("a"), b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x08")
    assert refusal(config_of(version)) == f"--tls-cert {version.cert}: must be certificates in PEM"
    # The key's curve is one that there is not.
    curve = b"\x2a\x86\x48\xce\x3d\x03\x01"
    kind = damaged(authority, authority.pair("b"), curve + b"\x07", curve + b"\x63")
    assert refusal(config_of(kind)) == f"--tls-cert {kind.cert}: has a key of an unknown kind"


@pytest.mark.timeout(20)
def test_a_pipe_that_nobody_writes_to_is_refused_at_once(authority: Authority, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    pair = authority.pair("server")
    for config in (config_of(Pair(tmp_path / "pipe", pair.key)), config_of(Pair(pair.cert, tmp_path / "pipe"))):
        assert refusal(config).endswith("pipe: must be a regular file")


def test_a_key_with_a_passphrase_is_refused(authority: Authority) -> None:
    from cryptography.hazmat.primitives import serialization

    pair = authority.pair("server")
    key = serialization.load_pem_private_key(pair.key_pem, None)
    form = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    assert refusal(config_of(pair)) == f"--tls-key {pair.key}: must have no passphrase"
