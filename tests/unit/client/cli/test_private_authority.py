"""The authority and its certificates, as a verifier sees them."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from pagekv.client.cli import private_authority as pki
from pagekv.client.errors import PageKVError

ROOT = Path(__file__).resolve().parents[4]
MANAGER, EXECUTOR, PROBE, CLIENT = pki.ROLES


@pytest.fixture
def authority(tmp_path: Path) -> pki.PrivateAuthority:
    return pki.authority_in(tmp_path)[0]


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names_of(path: Path) -> list[str]:
    found = load(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def days_of(certificate: x509.Certificate) -> int:
    return round((certificate.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1))


def test_the_authority_signs_and_no_other_below_it(authority: pki.PrivateAuthority, tmp_path: Path) -> None:
    found = authority.certificate.extensions
    basic = found.get_extension_for_class(x509.BasicConstraints)
    usage = found.get_extension_for_class(x509.KeyUsage)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)
    assert (usage.critical, usage.value.key_cert_sign, usage.value.digital_signature) == (True, True, False)
    assert days_of(authority.certificate) == 3650
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("ca.pem", "ca.key")] == [0o644, 0o600]
    again, written = pki.authority_in(tmp_path)
    assert (again.certificate, written) == (authority.certificate, [])


@pytest.mark.parametrize("role", pki.ROLES, ids=[role.name for role in pki.ROLES])
def test_a_certificate_is_for_its_role(
    role: pki.CertificateRole, authority: pki.PrivateAuthority, tmp_path: Path
) -> None:
    end, _ = pki.issue(tmp_path, role, authority, 30, ["gpu-7.example.org", "10.0.0.7"])
    found = load(tmp_path / f"{role.name}.pem")
    found.verify_directly_issued_by(authority.certificate)
    assert found.subject.rfc4514_string() == f"CN=pagekv-{role.name}"
    assert found.not_valid_after_utc == end
    assert days_of(found) == 30
    uses = {"manager": {"SERVER_AUTH", "CLIENT_AUTH"}, "executor": {"SERVER_AUTH"}}.get(role.name, {"CLIENT_AUTH"})
    extensions = found.extensions
    assert {*extensions.get_extension_for_class(x509.ExtendedKeyUsage).value} == {
        getattr(ExtendedKeyUsageOID, use) for use in uses
    }
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature
    identifier = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    assert (
        extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
        == identifier.key_identifier
    )
    key = serialization.load_pem_private_key((tmp_path / f"{role.name}.key").read_bytes(), password=None)
    assert key.public_key() == found.public_key()
    assert (tmp_path / f"{role.name}.key").stat().st_mode & 0o777 == 0o600
    if role in (PROBE, CLIENT):
        with pytest.raises(x509.ExtensionNotFound):
            names_of(tmp_path / f"{role.name}.pem")
    else:
        here = {f"pagekv-{role.name}", role.name, "localhost", "127.0.0.1", "::1", "gpu-7.example.org", "10.0.0.7"}
        assert here <= {*names_of(tmp_path / f"{role.name}.pem")}


def test_compose_calls_its_services_by_names_that_are_certified() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for role, begin in ((MANAGER, "kvmanager"), (EXECUTOR, "executor")):
        assert {name for name in services if name.startswith(begin)} <= {*role.services}


def test_a_renewed_certificate_has_another_key_and_keeps_its_names(
    authority: pki.PrivateAuthority, tmp_path: Path
) -> None:
    path = tmp_path / "executor.pem"
    pki.issue(tmp_path, EXECUTOR, authority, 30, ["gpu-7"])
    before = load(path)
    pki.issue(tmp_path, EXECUTOR, authority, 60, ["gpu-8"])
    assert load(path).public_key() != before.public_key()
    assert {"gpu-7", "gpu-8"} <= {*names_of(path)}
    assert len(names_of(path)) == len({*names_of(path)})
    # A file that is no certificate, and a certificate without names, have none to keep.
    for content in (b"x", (tmp_path / "ca.pem").read_bytes()):
        path.write_bytes(content)
        pki.issue(tmp_path, EXECUTOR, authority, 60, [])
        assert "gpu-7" not in names_of(path)


def test_no_certificate_outlives_its_authority(
    authority: pki.PrivateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3600)
    monkeypatch.setattr(pki, "_now", lambda: late)
    end, _ = pki.issue(tmp_path, CLIENT, authority, 365, ())
    assert end == authority.certificate.not_valid_after_utc
    monkeypatch.setattr(pki, "_now", lambda: late + timedelta(days=100))
    with pytest.raises(PageKVError, match=r"ca\.pem: expired on .* remove it and ca\.key to get a new authority"):
        pki.authority_in(tmp_path)


def test_the_key_is_there_before_its_certificate(
    authority: pki.PrivateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    monkeypatch.setattr(pki, "replace_file", lambda path, *_: order.append(path.name))
    pki.issue(tmp_path, CLIENT, authority, 1, ())
    assert order == ["client.key", "client.pem"]


def test_an_authority_that_must_not_sign(authority: pki.PrivateAuthority, tmp_path: Path) -> None:
    certificate, key = tmp_path / "ca.pem", tmp_path / "ca.key"
    pki.issue(tmp_path, CLIENT, authority, 1, ())
    good = {path: path.read_bytes() for path in (certificate, key)}
    stranger = (tmp_path / "client.key").read_bytes()

    def refused(words: str, changed: dict[Path, bytes | None], mode: int = 0o600) -> None:
        for path, content in (good | changed).items():
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
        if key.exists():
            key.chmod(mode)
        with pytest.raises(PageKVError, match=words):
            pki.authority_in(tmp_path)

    for mode in (0o640, 0o604):
        refused(f"ca.key: others than its owner may open this key of the authority: chmod 600 {key}", {}, mode)
    refused(r"ca\.key: is not the key of", {key: stranger})
    refused(r"ca\.key: must be a private key in PEM", {key: b"x"})
    refused(r"ca\.pem: must be the certificate of an authority in PEM", {certificate: b"x"})
    refused(
        r"ca\.pem: must be the certificate of an authority \(CA:TRUE",
        {certificate: (tmp_path / "client.pem").read_bytes()},
    )
    refused(r"ca\.key: is missing, so nothing", {key: None})
    refused(r"ca\.pem: is missing, but not", {certificate: None})


@pytest.mark.parametrize("mode", [0o500, 0])
def test_a_directory_that_cannot_be_written_or_looked_into(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    user = os.geteuid()
    if user == 0:
        # Root writes everywhere.
        os.seteuid(65534)
    try:
        with pytest.raises(PageKVError, match="cannot be written: Permission denied"):
            pki.authority_in(tmp_path)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PageKVError, match="cannot be created"):
            pki.make_directory(path)
    pki.make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    with pytest.raises(PageKVError, match="cannot be written: No such file"):
        pki.authority_in(tmp_path / "missing")
