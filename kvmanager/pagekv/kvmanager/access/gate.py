"""The gate that every call of gRPC and every HTTP request passes before anything of it is looked at.

authorization or certificate -> Authenticator -> Identity -> the table of roles -> `caller`, and the handler
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagekv.common.errors import PermissionDenied, Unauthenticated
from pagekv.common.watched_files import WatchedFiles
from pagekv.kvmanager.access.audit_log import AuditLog
from pagekv.kvmanager.access.authenticator import Authenticator
from pagekv.kvmanager.access.caller import caller
from pagekv.kvmanager.access.calls import (
    OPEN_CALLS,
    OPEN_ROUTES,
    OPERATORS_TOO,
    ROLE_OF_CALL,
    ROLE_OF_ROUTE,
    check_call,
    check_route,
)
from pagekv.kvmanager.access.identities_file import read_identities
from pagekv.kvmanager.access.identity import Identity, Role
from pagekv.kvmanager.access.refusals import RefusalReason

if TYPE_CHECKING:
    from aiohttp import web

# Of gRPC's metadata and of HTTP's headers.
_AUTHORIZATION = "authorization"
# The reason of refusals to callers who are known.
_NO_ROLE = "no_role"


class Gate:
    """Lets in the callers of one file of identities, which is read again when it changes."""

    def __init__(self, identities: Path, audit_log: AuditLog | None) -> None:
        """Raises IdentitiesError where the file cannot be used."""
        self.files = WatchedFiles("identities", [identities], self._reload)
        self._path = identities
        self._audit_log = audit_log
        self._authenticator = Authenticator(read_identities(identities))
        self._without_role = 0

    @property
    def refusals(self) -> dict[str, int]:
        """Calls and requests that were refused, by the reason."""
        return {**self._authenticator.refusals, _NO_ROLE: self._without_role}

    def _reload(self) -> None:
        self._authenticator.replace(read_identities(self._path))

    async def admit_call(self, method: str, context: Any) -> None:
        """Makes the caller of `method`, a full name, the one of this task. Raises Unauthenticated, PermissionDenied."""
        caller.set(None)
        if method in OPEN_CALLS:
            return
        metadata = context.invocation_metadata() or ()
        shown = [value if isinstance(value, str) else "" for key, value in metadata if key == _AUTHORIZATION]
        certificates = context.auth_context().get("x509_pem_cert", ())
        certificate = next(iter(certificates), None)
        known: Identity | None = None
        try:
            known = await self._identify(shown, certificate)
            check_call(known, method)
        except (Unauthenticated, PermissionDenied) as error:
            self._note_refusal(known, context.peer(), method, error)
            raise
        # An operator may be ending another's request.
        if ROLE_OF_CALL.get(method) is Role.OPERATE or (method in OPERATORS_TOO and Role.OPERATE in known.roles):
            self._note_call(known, context.peer(), method)
        caller.set(known)

    async def admit_request(self, request: web.Request) -> None:
        """Makes the caller of an HTTP request the one of this task. Raises Unauthenticated, PermissionDenied."""
        # One task answers all requests of a connection: the caller of the one before must not stay.
        caller.set(None)
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        route = (method, resource.canonical if resource is not None else "")
        if route in OPEN_ROUTES:
            return
        connection = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
        encoded = connection.getpeercert(binary_form=True) if connection is not None else None
        certificate = ssl.DER_cert_to_PEM_cert(encoded).encode() if encoded else None
        call = f"{route[0]} {route[1] or request.path[:128]}"
        known: Identity | None = None
        try:
            known = await self._identify(request.headers.getall(_AUTHORIZATION, ()), certificate)
            check_route(known, *route)
        except (Unauthenticated, PermissionDenied) as error:
            self._note_refusal(known, request.remote or "", call, error)
            raise
        if ROLE_OF_ROUTE.get(route) is Role.OPERATE:
            self._note_call(known, request.remote or "", call)
        caller.set(known)

    async def _identify(self, authorizations: Sequence[str], certificate_pem: bytes | None) -> Identity:
        """Raises Unauthenticated; also where authorization was sent twice, for a proxy between may have looked at the
        other one.
        """
        if len(authorizations) > 1:
            raise self._authenticator.refusal(RefusalReason.SENT_TWICE)
        return await self._authenticator.identify(next(iter(authorizations), None), certificate_pem)

    def _note_refusal(self, known: Identity | None, peer: str, call: str, error: Exception) -> None:
        self._without_role += known is not None
        if self._audit_log is not None:
            self._audit_log.refused(known.name if known is not None else "", peer, call, str(error))

    def _note_call(self, known: Identity, peer: str, call: str) -> None:
        if self._audit_log is not None:
            self._audit_log.called(known.name, peer, call)
