"""TLS of a process: its certificate, the authorities that it trusts, and their reload when files change.

New connections use the present content of the files. Open connections keep the certificates that they began with, so
that nothing breaks when certificates are rotated.
"""

from __future__ import annotations

import os
import ssl
import stat
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from pagekv.common.logs import Log
from pagekv.common.tls_flags import TlsConfig
from pagekv.common.watched_files import WatchedFiles

log = Log(__name__)

# Most bytes of a file.
MAX_FILE_BYTES = 2**20
# Seconds before gRPC gets a new certificate. A handshake takes the certificate microseconds after asking, or later if
# its thread has to wait for a core.
BEFORE_CHANGE_S = 0.1
# A certificate that ends within this time is warned of, and a short-lived one in the last quarter of its life.
SOON = timedelta(days=14)


class TlsError(ValueError):
    """A TLS file cannot be used; the message is one line that names the flag, the file and the reason."""


@dataclass(frozen=True, slots=True)
class _Material:
    """The content of the files, in PEM; empty for a file that is not given."""

    chain: bytes
    key: bytes
    client_ca: bytes
    peer_ca: bytes
    # Certificate and key that this process shows as a client.
    peer_chain: bytes
    peer_key: bytes
    # The first to end of the process's own certificates, and its file; None without one.
    ends_first: tuple[x509.Certificate, str] | None
    # Authorities that are not valid now: why, and their names.
    left_out: list[tuple[TlsError, str]]


@dataclass(frozen=True, slots=True)
class PairFiles:
    """The files of a certificate and its key, with the flags, without dashes, that name them."""

    cert_flag: str
    cert: str
    key_flag: str
    key: str


class Tls:
    """The TLS files of one process."""

    def __init__(
        self, config: TlsConfig, peer_ca: tuple[str, str] = ("", ""), peer_pair: PairFiles | None = None
    ) -> None:
        """`peer_ca`: the flag, without dashes, and the file of the authorities that sign the certificate of a server
        that this process connects to. `peer_pair`: the certificate to show there, where it is not the one to serve
        with. Raises TlsError.
        """
        self._config = config
        self._peer_ca = peer_ca
        self._peer_pair = peer_pair
        paths = [config.tls_cert, config.tls_key, config.tls_client_ca, peer_ca[1]]
        if peer_pair is not None:
            paths += [peer_pair.cert, peer_pair.key]
        # 1 once it was logged that a certificate ends soon, 2 that it has ended.
        self._warned = 0
        self.files = WatchedFiles("TLS", [Path(path) for path in paths if path], self._load, self._warn_of_end)
        self._load()

    def _load(self) -> None:
        material = _read_all(self._config, self._peer_ca, self._peer_pair)
        grpc_latest = http_latest = None
        if material.chain:
            pairs, roots = [(material.key, material.chain)], material.client_ca or None
            grpc_latest = grpc.ssl_server_certificate_configuration(pairs, roots)
            http_latest = self._context(material)
        # All of it or nothing: each of the lines above may raise.
        self._material, self._grpc_latest, self._http_latest = material, grpc_latest, http_latest
        for reason, name in material.left_out:
            log.warning("an authority is left out", reason=reason, name=name)

    @property
    def serves(self) -> bool:
        """Whether this process has a certificate to serve with."""
        return bool(self._material.chain)

    @property
    def validity(self) -> tuple[datetime, datetime] | None:
        """Beginning and end of the certificate that ends first of the process's own; None without one."""
        if self._material.ends_first is None:
            return None
        certificate, _ = self._material.ends_first
        return certificate.not_valid_before_utc, certificate.not_valid_after_utc

    def _warn_of_end(self) -> None:
        """Logs once that a certificate in use ends soon, and once that it has ended, which nothing else would say:
        whoever refuses it is on the other side.
        """
        if self._material.ends_first is None:
            return
        certificate, path = self._material.ends_first
        end = certificate.not_valid_after_utc
        left = end - datetime.now(UTC)
        stage = (left < min(SOON, (end - certificate.not_valid_before_utc) / 4)) + (left < timedelta(0))
        if stage > self._warned:
            words = ("the certificate ends soon", "the certificate has ended, new connections fail")[stage - 1]
            write = (log.warning, log.error)[stage - 1]
            write(f"{words}: put a renewed one in its place", file=path, end=f"{end:%Y-%m-%d %H:%M} UTC")
        self._warned = stage

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC port, which asks at each handshake for a new certificate. Call if `serves`."""
        given = self._grpc_latest
        assert given is not None, "only a process with a certificate serves TLS"

        # The stubs do not know that None says "the same as before".
        def changed() -> Any:
            nonlocal given
            latest = self._grpc_latest
            if latest is given:
                return None
            # gRPC frees the old certificate when it gets a new one. A handshake on another thread that asked a moment
            # ago may be about to take the old one, which would crash the process. No other handshake asks during this
            # wait.
            time.sleep(BEFORE_CHANGE_S)
            given = latest
            return latest

        return grpc.dynamic_ssl_server_credentials(given, changed, bool(self._material.client_ca))

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for one connection to the server whose certificate `peer_ca` signs, with this process's
        certificate as the client's. None without `peer_ca`: the connection is not encrypted.
        """
        now = self._material
        if not now.peer_ca:
            return None
        return grpc.ssl_channel_credentials(now.peer_ca, now.peer_key or None, now.peer_chain or None)

    def http_context(self) -> ssl.SSLContext:
        """The context for an HTTP port. Each handshake replaces it by a context of the latest files, because
        authorities cannot be removed from a context once they were added. So no connection uses this context's own
        files.
        """
        front = self._context(self._material)

        def use_latest(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._http_latest

        # Called at every handshake, whether the client names a server or not.
        front.sni_callback = use_latest
        return front

    def _context(self, material: _Material) -> ssl.SSLContext:
        """A server context. Raises TlsError if OpenSSL cannot use the files, as when they have changed meanwhile."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if material.client_ca:
            # A resumed session is not verified again, so a client whose authority was removed could come back with one.
            # Sessions of TLS 1.2 cannot be turned off here.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        try:
            # By their paths, because Python's ssl module cannot load a key from memory.
            context.load_cert_chain(self._config.tls_cert, self._config.tls_key)
            if material.client_ca:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(cadata=material.client_ca.decode())
        except ssl.SSLError as error:
            raise TlsError(
                f"--tls-cert {self._config.tls_cert}: OpenSSL cannot use the files of TLS: {error}"
            ) from error
        return context


def _read_all(config: TlsConfig, peer_ca: tuple[str, str], peer_pair: PairFiles | None) -> _Material:
    chain = key = client_ca = b""
    own: list[tuple[x509.Certificate, str]] = []
    left_out: list[tuple[TlsError, str]] = []
    if config.tls_cert:
        chain, key, leaf = _read_pair(PairFiles("tls-cert", config.tls_cert, "tls-key", config.tls_key))
        own.append((leaf, config.tls_cert))
    if config.tls_client_ca:
        client_ca = _authorities("tls-client-ca", config.tls_client_ca, left_out)
    peer_chain, peer_key = chain, key
    if peer_pair is not None:
        peer_chain, peer_key, leaf = _read_pair(peer_pair)
        own.append((leaf, peer_pair.cert))
    authorities = _authorities(*peer_ca, left_out) if peer_ca[1] else b""
    ends_first = min(own, key=lambda pair: pair[0].not_valid_after_utc, default=None)
    return _Material(chain, key, client_ca, authorities, peer_chain, peer_key, ends_first, left_out)


def _read(flag: str, path: str, *, secret: bool = False) -> bytes:
    try:
        # Without O_NONBLOCK, opening a named pipe would block the process.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            # The mode of the open file: a moment later the path may name another file.
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise TlsError(f"--{flag} {path}: must be a regular file")
            if secret and mode & 0o037:
                # The group may read it, because secrets are mounted into containers with such a mode.
                words = f"others can read or change this private key (mode {mode & 0o777:o}): chmod 600 {path}"
                raise TlsError(f"--{flag} {path}: {words}")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TlsError(f"--{flag} {path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise TlsError(f"--{flag} {path}: must be at most {MAX_FILE_BYTES} bytes")
    return data


def _certificates(flag: str, path: str, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except (ValueError, x509.InvalidVersion) as error:
        raise TlsError(f"--{flag} {path}: must be certificates in PEM") from error


def _read_pair(files: PairFiles) -> tuple[bytes, bytes, x509.Certificate]:
    """Chain, key and the certificate itself. Raises TlsError unless the certificate is valid now and has this key."""
    chain = _read(files.cert_flag, files.cert)
    key = _read(files.key_flag, files.key, secret=True)
    certificate = _certificates(files.cert_flag, files.cert, chain)[0]
    try:
        found = load_pem_private_key(key, None)
    except TypeError as error:
        raise TlsError(f"--{files.key_flag} {files.key}: must have no passphrase") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsError(f"--{files.key_flag} {files.key}: must be a private key in PEM") from error
    try:
        same = found.public_key() == certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsError(f"--{files.cert_flag} {files.cert}: has a key of an unknown kind") from error
    if not same:
        raise TlsError(f"--{files.key_flag} {files.key}: is not the key of the certificate in {files.cert}")
    _check_time(files.cert_flag, files.cert, certificate)
    return chain, key, certificate


def _authorities(flag: str, path: str, left_out: list[tuple[TlsError, str]]) -> bytes:
    """The authorities that are valid now. Others in the same file go to `left_out`, each with its name, because an old
    authority often stays beside its successor. Raises TlsError if none is valid.
    """
    found, others = [], []
    for certificate in _certificates(flag, path, _read(flag, path)):
        try:
            _check_time(flag, path, certificate)
            found.append(certificate)
        except TlsError as error:
            others.append((error, certificate.subject.rfc4514_string()))
    if not found:
        raise others[0][0]
    left_out += others
    # Without the text between certificates: Python's ssl module takes ASCII alone, and OpenSSL overlooks a certificate
    # behind a byte order mark.
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in found)


def _check_time(flag: str, path: str, certificate: x509.Certificate) -> None:
    now = datetime.now(UTC)
    if certificate.not_valid_after_utc < now:
        end = certificate.not_valid_after_utc
        words = "renew it, or set this machine's clock"
        raise TlsError(f"--{flag} {path}: the certificate expired at {end:%Y-%m-%d %H:%M} UTC: {words}")
    if certificate.not_valid_before_utc > now:
        since = certificate.not_valid_before_utc
        words = "wait, or set this machine's clock"
        raise TlsError(f"--{flag} {path}: the certificate is not valid before {since:%Y-%m-%d %H:%M} UTC: {words}")
