"""How a client and its manager authenticate each other: TLS from PEM files, and an API key. Everything is checked here,
once.

Error messages name the argument, and the file or the environment variable; no message shows a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import grpc

from pagekv.common.errors import InvalidRequest
from pagekv.common.loopback import is_local
from pagekv.common.watched_files import state_of

API_KEY_VARIABLE = "PAGEKV_API_KEY"
# Environment variables by argument.
FILE_VARIABLES = {"ca": "PAGEKV_CA", "client_cert": "PAGEKV_CLIENT_CERT", "client_key": "PAGEKV_CLIENT_KEY"}
AUTHORIZATION = "authorization"
# The entry of metadata that names the tenant a call is for.
TENANT = "pagekv-tenant"
_TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Longest key: it fits into the client's metadata together with "Bearer " and the bytes that HTTP/2 adds to an entry.
_MOST_CHARACTERS = 8000
_API_KEY = re.compile(rf"[!-~]{{1,{_MOST_CHARACTERS}}}")
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----")
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_PASSPHRASE = re.compile(rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: 4,ENCRYPTED", re.MULTILINE)

FilePath: TypeAlias = str | Path
# Entries of metadata.
Entries: TypeAlias = tuple[tuple[str, str | bytes], ...]


def authorization(api_key: str | None, entries: Entries, target: str, *, encrypted: bool) -> Entries:
    """The metadata with the given key, or else with the key of the environment, which is ignored if the metadata has an
    authorization already. Raises InvalidRequest for a malformed key, for a key given together with an authorization,
    and for a key that would cross the network unencrypted.
    """
    has_own = any(key == AUTHORIZATION for key, _ in entries)
    key, source = api_key, ""
    if api_key is None:
        # A variable that is empty is none.
        key, source = os.environ.get(API_KEY_VARIABLE) or None, f" (from {API_KEY_VARIABLE})"
        if key is None or has_own:
            return entries
    elif has_own:
        raise InvalidRequest("api_key", f"must be left out beside metadata with {AUTHORIZATION}")
    if not isinstance(key, str):
        raise InvalidRequest("api_key", f"must be text, is a {type(key).__name__}")
    if not _API_KEY.fullmatch(key):
        given = f"has {len(key):,}" if not 1 <= len(key) <= _MOST_CHARACTERS else "has others"
        problem = f"must be 1 to {_MOST_CHARACTERS:,} printable ASCII characters without spaces, {given}{source}"
        raise InvalidRequest("api_key", problem)
    if not encrypted and not is_local(target):
        raise InvalidRequest(
            "api_key",
            f"would cross the network in plain text{source}: give credentials for TLS, or ca, a PEM file of the "
            "authority that signed the manager's certificate",
        )
    return (*entries, (AUTHORIZATION, f"Bearer {key}"))


def for_tenant(act_for: str | None, entries: Entries) -> Entries:
    """The metadata with the tenant of the calls. Raises InvalidRequest for a malformed name, or if the metadata names a
    tenant already.
    """
    if act_for is None:
        return entries
    if any(key == TENANT for key, _ in entries):
        raise InvalidRequest("act_for", f"must be left out beside metadata with {TENANT}")
    if not isinstance(act_for, str) or not _TENANT_NAME.fullmatch(act_for):
        raise InvalidRequest(
            "act_for", f"must be 1 to 64 of the characters A-Z, a-z, 0-9, ., _ and -, is {act_for!r:.80}"
        )
    return (*entries, (TENANT, act_for))


class TlsFiles:
    """The PEM files of a client that uses TLS. Without an authority gRPC's built-in ones are trusted."""

    def __init__(self, paths: Mapping[str, tuple[FilePath, str]]) -> None:
        """`paths`: by argument, one or more, each with the source of a path that is not from the argument. Raises
        InvalidRequest.
        """
        self._paths = paths
        self._read: list[object] = []
        # Files that gRPC could not use are refused here, before anything else about the client is.
        self.credentials()

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials of the present content. Raises InvalidRequest for a file that gRPC could not use."""
        # Before the files are read, so that a change meanwhile is seen afterwards.
        states = self._states()
        files = {name: _File(name, path, source) for name, (path, source) in self._paths.items()}
        _check(files)
        self._read = states
        pem = {name: file.pem for name, file in files.items()}
        return grpc.ssl_channel_credentials(pem.get("ca"), pem.get("client_key"), pem.get("client_cert"))

    @property
    def have_changed(self) -> bool:
        """Whether the content may be another than that of the last credentials."""
        return self._states() != self._read

    def _states(self) -> list[object]:
        return [state_of(path) for path, _ in self._paths.values()]


def tls_files(
    *, ca: FilePath | None, client_cert: FilePath | None, client_key: FilePath | None, beside: str = ""
) -> TlsFiles | None:
    """The given files, or else those that the environment names; None if there are none.

    `beside` is the name of an argument that already has credentials, if one is given: files are then refused, and the
    environment is ignored. Raises InvalidRequest.
    """
    given = {"ca": ca, "client_cert": client_cert, "client_key": client_key}
    if beside:
        for name, path in given.items():
            if path is not None:
                raise InvalidRequest(name, f"must be left out beside {beside}, which has its own")
        return None
    paths = {name: (path, "") for name, path in given.items() if path is not None}
    for name, (path, _) in paths.items():
        if not isinstance(path, (str, Path)) or not str(path):
            raise InvalidRequest(name, f"must be the path of a PEM file, is {path!r:.80}")
    for name in given.keys() - paths.keys():
        # A variable that is empty is none.
        if value := os.environ.get(FILE_VARIABLES[name]):
            paths[name] = (value, f" (from {FILE_VARIABLES[name]})")
    return TlsFiles(paths) if paths else None


class _File:
    """A PEM file and its content. `source` says where its path comes from if not from the argument."""

    def __init__(self, name: str, path: FilePath, source: str = "") -> None:
        self.name = name
        self.path = Path(path)
        self.shown = f"{path}{source}"
        try:
            self.pem = self.path.read_bytes()
        except (OSError, ValueError) as error:
            # ValueError: a null byte in the path.
            why = error.strerror if isinstance(error, OSError) else error
            raise InvalidRequest(name, f"{self.shown}: cannot be read: {why}") from error

    def refuse(self, problem: str) -> InvalidRequest:
        return InvalidRequest(self.name, f"{self.shown}: {problem}")

    def must_have(self, begin: re.Pattern[bytes], what: str) -> None:
        """Raises InvalidRequest unless the file has a PEM block with this beginning."""
        if not begin.search(self.pem):
            raise self.refuse(f"must have {what} in PEM, which begins with -----BEGIN")


def _check(files: dict[str, _File]) -> None:
    """Raises InvalidRequest for files that gRPC could not use. gRPC itself would report this only at each call, as if
    no server were there.
    """
    for name, other in (("client_cert", "client_key"), ("client_key", "client_cert")):
        if name in files and other not in files:
            raise InvalidRequest(name, f"needs {other}, too: give both or neither")
    # Imported here: the import costs 15 ms, and most clients have no files.
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authority := files.get("ca"):
        authority.must_have(_CERTIFICATE, "a certificate")
        try:
            context.load_verify_locations(cafile=authority.path)
        except OSError as error:
            raise authority.refuse(f"is no certificate: {_reason(error)}") from error
    if "client_key" in files:
        certificate, key = files["client_cert"], files["client_key"]
        certificate.must_have(_CERTIFICATE, "a certificate")
        key.must_have(_PRIVATE_KEY, "a private key")
        if _PASSPHRASE.search(key.pem):
            raise key.refuse("must have no passphrase")
        try:
            # The password keeps OpenSSL from asking at the terminal.
            context.load_cert_chain(certificate.path, key.path, password="")
        except OSError as error:
            if _reason(error) == "KEY_VALUES_MISMATCH":
                raise key.refuse(f"is not the key of the certificate {certificate.path}") from error
            raise certificate.refuse(f"is no certificate with the key {key.path}: {_reason(error)}") from error


def _reason(error: OSError) -> object:
    """Of OpenSSL, which may also find the file gone."""
    return getattr(error, "reason", "") or error.strerror or error
