"""A deployment's private certificate authority, and the certificates of its processes and callers: PEM files in one
directory.

Needs the package cryptography, which the extras of manager and executor install.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pagekv.client.cli.atomic_file import replace_file
from pagekv.client.cli.config_file import OTHERS
from pagekv.client.errors import PageKVError
from pagekv.client.launcher.certificates import CLIENT, EXECUTOR, MANAGER, PROBE, server_name
from pagekv.common.loopback import ip_address

CA_DAYS = 3650
# Certificates are valid from this much earlier, because clocks of other machines may be slow.
_EARLIER = timedelta(minutes=5)
_KEY_MODE, _CERTIFICATE_MODE, _DIRECTORY_MODE = 0o600, 0o644, 0o700


class CertificateRole(NamedTuple):
    """A certificate to make: the name of its file without an ending, its key usages, and the names of its services."""

    name: str
    uses: tuple[x509.ObjectIdentifier, ...]
    # Names of the services in compose.yaml; empty for a role that nobody connects to.
    services: tuple[str, ...] = ()


_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
ROLES = (
    # A client of its executor, too.
    CertificateRole(
        MANAGER, (_SERVER, _CLIENT), ("manager", "kvmanager", "kvmanager-2", "kvmanager-3", "kvmanager-tp")
    ),
    CertificateRole(EXECUTOR, (_SERVER,), ("executor", "executor-2", "executor-3", "executor-tp")),
    # For health checks, if a process asks every connection for a certificate. It identifies no caller.
    CertificateRole(PROBE, (_CLIENT,)),
    CertificateRole(CLIENT, (_CLIENT,)),
)


class PrivateAuthority(NamedTuple):
    """A certificate that signs others, and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_directory(directory: Path) -> None:
    """Creates the directory if it does not exist, accessible only to its owner. Raises PageKVError."""
    try:
        directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise PageKVError(f"{directory}: cannot be created: {error.strerror}") from error


def authority_in(directory: Path) -> tuple[PrivateAuthority, list[Path]]:
    """The authority whose ca.pem and ca.key are in the directory, or else a new one that is written there; and the
    files written. Raises PageKVError for an authority that must not or cannot sign.
    """
    certificate, key = directory / "ca.pem", directory / "ca.key"
    # Not with Path.exists, which raises if the folder is not accessible: the write then fails with a message that names
    # the file.
    match os.path.exists(certificate), os.path.exists(key):
        case True, True:
            return _read_authority(certificate, key), []
        case True, False:
            raise PageKVError(f"{key}: is missing, so nothing can be signed; remove ca.pem to get a new authority")
        case False, True:
            raise PageKVError(f"{certificate}: is missing, but not ca.key; remove ca.key to get a new authority")
    made = _new_authority()
    return made, _write_pair(directory, "ca", made.certificate, made.key)


def issue(
    directory: Path, role: CertificateRole, authority: PrivateAuthority, days: int, names: Sequence[str]
) -> tuple[datetime, list[Path]]:
    """Writes a certificate of the role with a new key, replacing an existing one. Returns the end of its validity and
    the files. The certificate ends with its authority at the latest. Certificates of servers have the given names, and
    all names of the certificate before. Raises PageKVError.
    """
    signer = authority.certificate
    end = min(_now() + timedelta(days=days), signer.not_valid_after_utc)
    common_name = server_name(role.name)
    builder, key = _builder(common_name, signer.subject, end)
    if role.services:
        before = _names_of(directory / f"{role.name}.pem")
        wanted = [common_name, "localhost", "127.0.0.1", "::1", *role.services, *before, *names]
        alternatives = [_general_name(name) for name in dict.fromkeys(wanted)]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    signed = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(role.uses), critical=False)
        .add_extension(_identifier_of(authority.key), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return signed.not_valid_after_utc, _write_pair(directory, role.name, signed, key)


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _builder(
    common_name: str, issuer: x509.Name | None, end: datetime
) -> tuple[x509.CertificateBuilder, ec.EllipticCurvePrivateKey]:
    """The common part of all certificates, for a new key; self-signed if no issuer is given."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _EARLIER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return builder, key


def _new_authority() -> PrivateAuthority:
    builder, key = _builder("PageKV private CA", None, _now() + timedelta(days=CA_DAYS))
    return PrivateAuthority(
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .add_extension(_identifier_of(key), critical=False)
        .sign(key, hashes.SHA256()),
        key,
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    """The key usage of an authority, which only `signs` certificates, or of a process."""
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _identifier_of(signer: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())


def _read_authority(certificate_path: Path, key_path: Path) -> PrivateAuthority:
    try:
        mode, key_pem, pem = key_path.stat().st_mode, key_path.read_bytes(), certificate_path.read_bytes()
    except OSError as error:
        raise PageKVError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if mode & OTHERS:
        raise PageKVError(f"{key_path}: others than its owner may open this key of the authority: chmod 600 {key_path}")
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        # TypeError: there is a passphrase.
        raise PageKVError(f"{key_path}: must be a private key in PEM without a passphrase") from error
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        signs = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, x509.ExtensionNotFound) as error:
        raise PageKVError(f"{certificate_path}: must be the certificate of an authority in PEM") from error
    if not signs:
        raise PageKVError(f"{certificate_path}: must be the certificate of an authority (CA:TRUE)")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise PageKVError(f"{key_path}: must be a key of an elliptic curve, as pagekv certs makes")
    if key.public_key() != certificate.public_key():
        raise PageKVError(f"{key_path}: is not the key of {certificate_path}")
    if certificate.not_valid_after_utc <= _now():
        ended = certificate.not_valid_after_utc.date()
        raise PageKVError(
            f"{certificate_path}: expired on {ended}: remove it and {key_path.name} to get a new authority"
        )
    return PrivateAuthority(certificate, key)


def _names_of(path: Path) -> list[str]:
    """The names in a certificate; empty if the file does not exist or is not a certificate."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []
    kinds = (x509.DNSName, x509.IPAddress)
    return [str(name.value) for name in found if isinstance(name, kinds)]


def _general_name(name: str) -> x509.GeneralName:
    address = ip_address(name)
    return x509.DNSName(name) if address is None else x509.IPAddress(address)


def _write_pair(
    directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> list[Path]:
    """Writes a certificate and its key, and returns the files. The key is written first, so that the certificate never
    exists without its key.
    """
    pem, unencrypted = serialization.Encoding.PEM, serialization.NoEncryption()
    paths = [directory / f"{name}.pem", directory / f"{name}.key"]
    try:
        replace_file(paths[1], key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unencrypted), _KEY_MODE)
        replace_file(paths[0], certificate.public_bytes(pem), _CERTIFICATE_MODE)
    except OSError as error:
        raise PageKVError(f"{directory}: cannot be written: {error.strerror}") from error
    return paths
