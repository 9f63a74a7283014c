"""The certificates of a stack that this process starts: the files of `pagekv certs`, as flags and credentials."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from pagekv.client.identity import tls_files

# Names of the files in a directory of certificates, by role.
MANAGER, EXECUTOR, PROBE, CLIENT = "manager", "executor", "probe", "client"


def server_name(role: str) -> str:
    """The common name in the certificate of a role. It identifies a process, whatever its address."""
    return f"pagekv-{role}"


@dataclass(frozen=True, slots=True)
class StackCertificates:
    directory: Path
    # Whether callers of the manager have to present a certificate, too.
    mutual: bool = True

    def executor_args(self) -> list[str]:
        """Flags with which an executor serves only its manager."""
        return [*self._own(EXECUTOR), f"--tls-client-ca={self._ca}"]

    def manager_args(self) -> list[str]:
        """Flags with which a manager uses TLS on its ports and towards its executor."""
        mutual = [f"--tls-client-ca={self._ca}"] if self.mutual else []
        return [*self._own(MANAGER), *mutual, f"--executor-ca={self._ca}"]

    def client_files(self) -> dict[str, Path]:
        """The files that a caller needs, by the arguments of the client library."""
        cert, key = self._pair(CLIENT)
        return {"ca": self._ca, **({"client_cert": cert, "client_key": key} if self.mutual else {})}

    def credentials(self, role: str) -> grpc.ChannelCredentials:
        """Credentials of a client with the certificate of this role. Raises InvalidRequest, whose message names the
        file.
        """
        cert, key = self._pair(role)
        files = tls_files(ca=self._ca, client_cert=cert, client_key=key)
        assert files is not None, "they are given"
        return files.credentials()

    def check(self) -> None:
        """Raises InvalidRequest, whose message names the file, if a file cannot be used."""
        for role in (MANAGER, EXECUTOR, PROBE, *([CLIENT] if self.mutual else [])):
            self.credentials(role)

    @property
    def _ca(self) -> Path:
        return self.directory / "ca.pem"

    def _pair(self, role: str) -> tuple[Path, Path]:
        return self.directory / f"{role}.pem", self.directory / f"{role}.key"

    def _own(self, role: str) -> list[str]:
        cert, key = self._pair(role)
        return [f"--tls-cert={cert}", f"--tls-key={key}"]
