"""The gate that every gRPC call and every HTTP request has to pass before its content is parsed.

authorization or certificate -> Authenticator -> Identity -> the table of roles -> its tenant -> `caller`, the handler
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from pagekv.common.errors import (
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    PageKVError,
    PermissionDenied,
    Unauthenticated,
)
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
from pagekv.kvmanager.access.tenancy import TENANT, acting

if TYPE_CHECKING:
    from aiohttp import web

# Key of gRPC's metadata, and name of HTTP's header.
_AUTHORIZATION = "authorization"
# Reasons for which the gate refuses known callers.
_NO_ROLE, _WRONG_TENANT = "no_role", "wrong_tenant"
# Reason of refusals after the gate: the caller's tenant is not known, or may not use something that the call needs.
_NOT_ALLOWED = "not_allowed"


class _Attempt(NamedTuple):
    """A call at the gate: the peer's address, the call's name, the authorizations that it shows, the tenants that it
    names, and its certificate.
    """

    peer: str
    call: str
    shown: Sequence[str]
    named: Sequence[str]
    certificate_pem: bytes | None


def _peer(context: Any) -> str:
    """The address that a call comes from. gRPC gives a URI, in which the brackets of IPv6 are escaped."""
    return unquote(context.peer())


def _route_of(request: web.Request) -> tuple[str, str]:
    """The route as in ROLE_OF_ROUTE."""
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    return method, resource.canonical if resource is not None else ""


def _call_of(request: web.Request, route: tuple[str, str]) -> str:
    """The name of a request in the record."""
    return f"{route[0]} {route[1] or request.path[:128]}"


class Gate:
    """Lets in the callers of one identities file, which is read again when it changes."""

    def __init__(self, identities: Path, audit_log: AuditLog | None) -> None:
        """Raises TomlFileError if the file cannot be used."""
        self.files = WatchedFiles("identities", [identities], self._reload)
        self._path = identities
        self.audit_log = audit_log
        self.authenticator = Authenticator(read_identities(identities))
        self._refusals: Counter[str] = Counter({_NO_ROLE: 0, _WRONG_TENANT: 0, _NOT_ALLOWED: 0})

    @property
    def refusals(self) -> dict[str, int]:
        """Numbers of refused calls and HTTP requests, by the reason."""
        return {**self.authenticator.refusals, **self._refusals}

    def close(self) -> None:
        """Closes the audit log. Idempotent."""
        if self.audit_log is not None:
            self.audit_log.close()

    def _reload(self) -> None:
        self.authenticator.replace(read_identities(self._path))

    async def admit_call(self, method: str, context: Any) -> None:
        """Identifies the caller, checks its role and sets `caller` for this task. Raises Unauthenticated,
        PermissionDenied and InvalidRequest.
        """
        await self._admit_call(method, context, None)

    async def admit_gateway_call(self, method: str, context: Any) -> None:
        """`admit_call` for the gateway's own address, where a caller that shows no authorization is the gateway."""
        await self._admit_call(method, context, self.authenticator.gateway)

    async def _admit_call(self, method: str, context: Any, unnamed: Identity | None) -> None:
        """`unnamed`: the identity of a caller that shows no authorization; None: it needs a known certificate."""
        caller.set(None)
        if method in OPEN_CALLS:
            return
        metadata = context.invocation_metadata() or ()
        # A value of bytes counts as "", which is no key and no tenant.
        shown, named = (
            [value if isinstance(value, str) else "" for key, value in metadata if key == name]
            for name in (_AUTHORIZATION, TENANT)
        )
        certificates = context.auth_context().get("x509_pem_cert", ())
        attempt = _Attempt(_peer(context), method, shown, named, next(iter(certificates), None))
        known = await self._let_in(attempt, lambda known: check_call(known, method), unnamed)
        # An operator's Abort is recorded, because it may end another caller's request.
        if ROLE_OF_CALL.get(method) is Role.OPERATE or (method in OPERATORS_TOO and Role.OPERATE in known.roles):
            self._note_call(known, attempt)
        caller.set(known)

    def note_refusal(self, method: str, context: Any, error: PageKVError) -> None:
        """Counts and records a gRPC call that was let in and then refused for its tenant or for a limit. Calls that
        were not let in have been counted already.
        """
        known = caller.get()
        if known is not None:
            self._note_refusal(known, _peer(context), method, error)

    def note_refused_request(self, request: web.Request, error: PageKVError) -> None:
        """`note_refusal` for HTTP requests."""
        known = caller.get()
        if known is not None:
            self._note_refusal(known, request.remote or "", _call_of(request, _route_of(request)), error)

    def _note_refusal(self, known: Identity, peer: str, call: str, error: PageKVError) -> None:
        if isinstance(error, PermissionDenied):
            self._refusals[_NOT_ALLOWED] += 1
            if self.audit_log is not None:
                self.audit_log.refused(known.name, peer, call, str(error))
        elif isinstance(error, (LimitExceeded, Overloaded)) and self.audit_log is not None:
            self.audit_log.limited(known.name, peer, call, str(error))

    async def admit_request(self, request: web.Request) -> None:
        """`admit_call` for HTTP requests."""
        # One task answers all requests of a connection, so the caller of the request before must not stay.
        caller.set(None)
        route = _route_of(request)
        if route in OPEN_ROUTES:
            return
        connection = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
        encoded = connection.getpeercert(binary_form=True) if connection is not None else None
        certificate = ssl.DER_cert_to_PEM_cert(encoded).encode() if encoded else None
        shown, named = (request.headers.getall(name, []) for name in (_AUTHORIZATION, TENANT))
        attempt = _Attempt(request.remote or "", _call_of(request, route), shown, named, certificate)
        known = await self._let_in(attempt, lambda known: check_route(known, *route))
        if ROLE_OF_ROUTE.get(route) is Role.OPERATE:
            self._note_call(known, attempt)
        caller.set(known)

    async def _let_in(
        self, attempt: _Attempt, check: Callable[[Identity], None], unnamed: Identity | None = None
    ) -> Identity:
        """The caller's identity, with the tenant that the call is for. `check` checks its roles. Raises
        Unauthenticated, PermissionDenied and InvalidRequest.
        """
        known: Identity | None = None
        reason = _NO_ROLE
        try:
            if unnamed is not None and not attempt.shown:
                known = unnamed
            else:
                known = await self._identify(attempt.shown, attempt.certificate_pem)
            check(known)
            reason = _WRONG_TENANT
            return acting(known, attempt.named)
        except (Unauthenticated, PermissionDenied, InvalidRequest) as error:
            if known is not None:
                self._refusals[reason] += 1
            if self.audit_log is not None:
                name = known.name if known is not None else ""
                self.audit_log.refused(name, attempt.peer, attempt.call, str(error))
            raise

    async def _identify(self, authorizations: Sequence[str], certificate_pem: bytes | None) -> Identity:
        """Raises Unauthenticated, also for two authorizations, because a proxy may have checked the other one."""
        if len(authorizations) > 1:
            raise self.authenticator.refusal(RefusalReason.SENT_TWICE)
        return await self.authenticator.identify(next(iter(authorizations), None), certificate_pem)

    def _note_call(self, known: Identity, attempt: _Attempt) -> None:
        if self.audit_log is not None:
            reason = f"for the tenant {known.tenant}" if attempt.named else ""
            self.audit_log.called(known.name, attempt.peer, attempt.call, reason)
