"""How a client and its manager know each other: TLS made of PEM files, and an API key; all checked here, once.

A message names the argument, and the file or the variable of the environment; none shows a key.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeAlias

import grpc

from pagekv.common.errors import InvalidRequest
from pagekv.common.loopback import is_local

API_KEY_VARIABLE = "PAGEKV_API_KEY"
# Of the environment, by argument.
FILE_VARIABLES = {"ca": "PAGEKV_CA", "client_cert": "PAGEKV_CLIENT_CERT", "client_key": "PAGEKV_CLIENT_KEY"}
AUTHORIZATION = "authorization"
# The entry of metadata that names the tenant a call is for.
TENANT = "pagekv-tenant"
_TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Of a key: what a client's metadata have room for, in the scheme's word and with the entry's own bytes.
_MOST_CHARACTERS = 8000
_API_KEY = re.compile(rf"[!-~]{{1,{_MOST_CHARACTERS}}}")
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----")
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_PASSPHRASE = re.compile(rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: 4,ENCRYPTED", re.MULTILINE)

FilePath: TypeAlias = str | Path
# Of metadata.
Entries: TypeAlias = tuple[tuple[str, str | bytes], ...]


def authorization(api_key: str | None, entries: Entries, target: str, *, encrypted: bool) -> Entries:
    """The metadata with the key given, else with that of the environment, which yields to an authorization that is in
    the metadata. Raises InvalidRequest for a key that is no key, that comes beside an authorization, or that others
    could read on its way.
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
    """The metadata with the tenant of the calls. Raises InvalidRequest for a name that is none, or a second one."""
    if act_for is None:
        return entries
    if any(key == TENANT for key, _ in entries):
        raise InvalidRequest("act_for", f"must be left out beside metadata with {TENANT}")
    if not isinstance(act_for, str) or not _TENANT_NAME.fullmatch(act_for):
        raise InvalidRequest(
            "act_for", f"must be 1 to 64 of the characters A-Z, a-z, 0-9, ., _ and -, is {act_for!r:.80}"
        )
    return (*entries, (TENANT, act_for))


def tls_credentials(
    *, ca: FilePath | None, client_cert: FilePath | None, client_key: FilePath | None, beside: str = ""
) -> grpc.ChannelCredentials | None:
    """Credentials of the files given, else of those that the environment names; None where there are none.

    Without `ca` the authorities count that gRPC brings. `beside` is the argument that has credentials of its own, if
    one is given: a file is then refused, and the environment is not asked. Raises InvalidRequest.
    """
    given = {"ca": ca, "client_cert": client_cert, "client_key": client_key}
    if beside:
        for name, path in given.items():
            if path is not None:
                raise InvalidRequest(name, f"must be left out beside {beside}, which has its own")
        return None
    files = {name: _File(name, path) for name, path in given.items() if path is not None}
    for name in given.keys() - files.keys():
        # A variable that is empty is none.
        if value := os.environ.get(FILE_VARIABLES[name]):
            files[name] = _File(name, value, f" (from {FILE_VARIABLES[name]})")
    for name, other in (("client_cert", "client_key"), ("client_key", "client_cert")):
        if name in files and other not in files:
            raise InvalidRequest(name, f"needs {other} beside it: both or neither")
    if not files:
        return None
    _check(files)
    pem = {name: file.pem for name, file in files.items()}
    return grpc.ssl_channel_credentials(pem.get("ca"), pem.get("client_key"), pem.get("client_cert"))


class _File:
    """A PEM file, read. `source` says where its path comes from if not from the argument."""

    def __init__(self, name: str, path: FilePath, source: str = "") -> None:
        self.name = name
        if not isinstance(path, (str, Path)) or not str(path):
            raise InvalidRequest(name, f"must be the path of a PEM file, is {path!r:.80}")
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
        """Raises InvalidRequest where nothing begins so in the file."""
        if not begin.search(self.pem):
            raise self.refuse(f"must have {what} in PEM, which begins with -----BEGIN")


def _check(files: dict[str, _File]) -> None:
    """Raises InvalidRequest for files of which gRPC could make nothing: it would only say so at every call, and as if
    no server were there.
    """
    # Costs 15 ms, and most clients have no files.
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authority := files.get("ca"):
        authority.must_have(_CERTIFICATE, "a certificate")
        try:
            context.load_verify_locations(cafile=authority.path)
        except ssl.SSLError as error:
            raise authority.refuse(f"is no certificate: {error.reason or error}") from error
    if "client_key" in files:
        certificate, key = files["client_cert"], files["client_key"]
        certificate.must_have(_CERTIFICATE, "a certificate")
        key.must_have(_PRIVATE_KEY, "a private key")
        if _PASSPHRASE.search(key.pem):
            raise key.refuse("has a passphrase, for which nobody can be asked: it must be without one")
        try:
            # The password keeps OpenSSL from asking at the terminal.
            context.load_cert_chain(certificate.path, key.path, password="")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise key.refuse(f"is not the key of the certificate {certificate.path}") from error
            raise certificate.refuse(f"is no certificate with the key {key.path}: {error.reason or error}") from error
