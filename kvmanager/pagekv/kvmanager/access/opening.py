"""Opens the TLS and the gate of a manager as its flags say. Modules that no flag needs are not imported."""

from __future__ import annotations

import os
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagekv.kvmanager.access.flags import AccessConfig
from pagekv.kvmanager.access.identity import GATEWAY

if TYPE_CHECKING:
    import grpc

    from pagekv.common.tls import Tls
    from pagekv.common.watched_files import WatchedFiles
    from pagekv.kvmanager.access.audit_log import AuditLog
    from pagekv.kvmanager.access.gate import Gate

# Bounds of the file of --cluster-secret.
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 32, 1024


class CannotProtect(Exception):
    """A file of TLS or of identities cannot be used; the message is one line that names file and field."""


@dataclass(frozen=True, slots=True)
class Access:
    """TLS and gate of a manager. Without `tls` nothing is encrypted, without `gate` everybody may call everything."""

    tls: Tls | None = None
    gate: Gate | None = None
    # The secret for the digests of tenants' blocks; empty on a manager without identities.
    secret: bytes = b""
    # The tenants file, if there is one.
    tenants: WatchedFiles | None = None

    @property
    def files(self) -> list[WatchedFiles]:
        """The files that have to be watched while the manager runs."""
        read_here = [each.files for each in (self.tls, self.gate) if each is not None]
        return read_here if self.tenants is None else [*read_here, self.tenants]

    def close(self) -> None:
        """Closes the audit log, after the last call. Idempotent."""
        if self.gate is not None:
            self.gate.close()

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials for gRPC ports; None: no TLS."""
        return self.tls.server_credentials() if self.tls is not None and self.tls.serves else None

    def http_context(self) -> ssl.SSLContext | None:
        """The context for the HTTP port; None: no TLS."""
        return self.tls.http_context() if self.tls is not None and self.tls.serves else None

    def executor_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for a connection to an executor, from the present content of the files; None: no TLS."""
        return self.tls.channel_credentials() if self.tls is not None else None


def open_access(config: AccessConfig) -> Access:
    """Reads the files that the flags name. Raises CannotProtect."""
    tls: Tls | None = None
    gate: Gate | None = None
    secret = b""
    try:
        if config.tls.tls_cert or config.executor_ca:
            from pagekv.common.tls import PairFiles, Tls

            own = PairFiles("executor-cert", config.executor_cert, "executor-key", config.executor_key)
            tls = Tls(config.tls, ("executor-ca", config.executor_ca), own if config.executor_cert else None)
        if config.identities:
            from pagekv.kvmanager.access.audit_log import AuditLog
            from pagekv.kvmanager.access.gate import Gate

            gate = Gate(Path(config.identities), _open_log(AuditLog, config.audit_log) if config.audit_log else None)
            if config.gateway_listen and gate.authenticator.gateway is None:
                words = "must be a table, for --gateway-listen; is not there"
                raise CannotProtect(f"--identities {config.identities}: {GATEWAY}: {words}")
            secret = _read_secret(Path(config.cluster_secret)) if config.cluster_secret else secrets.token_bytes(32)
    except ImportError as error:
        raise CannotProtect(f"TLS and --identities need {error.name}: pip install 'pagekv[manager]'") from error
    except (OSError, ValueError) as error:
        raise CannotProtect(str(error)) from error
    return Access(tls, gate, secret)


def _open_log(make: type[AuditLog], path: str) -> AuditLog:
    """Raises CannotProtect."""
    try:
        return make(Path(path))
    except OSError as error:
        raise CannotProtect(f"--audit-log {path}: {error.strerror}") from error


def _read_secret(path: Path) -> bytes:
    """Raises CannotProtect."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise CannotProtect(f"--cluster-secret {path}: {error.strerror}") from error
    with file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & 0o037:
            raise CannotProtect(f"--cluster-secret {path}: others can read or change it (mode {mode & 0o777:o})")
        secret = file.read(MAX_SECRET_BYTES + 1)
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        words = f"must have from {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, has {len(secret)}"
        raise CannotProtect(f"--cluster-secret {path}: {words}")
    return secret
