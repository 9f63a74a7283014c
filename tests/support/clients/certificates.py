"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pagekv.common.tls_flags import TlsConfig

_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key in PEM, and where they lie."""

    cert: Path
    key: Path

    @property
    def pem(self) -> bytes:
        return self.cert.read_bytes()

    @property
    def key_pem(self) -> bytes:
        return self.key.read_bytes()


class Authority:
    """Signs certificates, which lie in one folder."""

    def __init__(self, folder: Path, name: str = "ca", *, identifies: bool = True) -> None:
        """`identifies`: whether certificates say which of several authorities of one name signed them."""
        self._folder, self._identifies = folder, identifies
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test {name}")])
        signed = self._sign(self._name, self._key, timedelta(days=-1), timedelta(days=30), authority=True)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(signed)

    def pair(
        self,
        name: str,
        *,
        file: str = "",
        since: timedelta = timedelta(days=-1),
        until: timedelta = timedelta(days=30),
    ) -> Pair:
        """A certificate for `name`, localhost and 127.0.0.1, in files of the name `file`, which are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = Pair(self._folder / f"{file or name}.pem", self._folder / f"{file or name}.key")
        made.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        made.key.chmod(0o600)
        made.cert.write_bytes(self._sign(subject, key, since, until, authority=False))
        return made

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        since: timedelta,
        until: timedelta,
        *,
        authority: bool,
    ) -> bytes:
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + since)
            .not_valid_after(now + until)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        # Python 3.13 and later verify what RFC 5280 says of identifiers and of the use of an authority's key.
        if self._identifies:
            signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
            certificate = certificate.add_extension(signer, critical=False)
        if authority:
            identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
            certificate = certificate.add_extension(identifier, critical=False).add_extension(_SIGNS, critical=True)
        else:
            common = subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
            addresses = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            names = [x509.DNSName("localhost"), x509.DNSName(str(common)), addresses]
            certificate = certificate.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def config_of(pair: Pair, client_ca: Path | None = None) -> TlsConfig:
    """Of a process that serves with `pair`, and asks for certificates of the authorities in `client_ca`."""
    return TlsConfig(str(pair.cert), str(pair.key), str(client_ca or ""))


def client_credentials(ca: Path, pair: Pair | None = None) -> grpc.ChannelCredentials:
    """Of a client that trusts the authority in `ca`, and shows `pair`."""
    if pair is None:
        return grpc.ssl_channel_credentials(ca.read_bytes())
    return grpc.ssl_channel_credentials(ca.read_bytes(), pair.key_pem, pair.pem)
