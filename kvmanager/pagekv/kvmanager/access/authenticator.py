"""Finds a caller's identity from its authorization header or its client certificate."""

from __future__ import annotations

import base64
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from pagekv.kvmanager.access.certificates import subject_of
from pagekv.kvmanager.access.identities_file import Identities
from pagekv.kvmanager.access.identity import Identity
from pagekv.kvmanager.access.json_web_tokens import JsonWebTokens
from pagekv.kvmanager.access.refusals import RefusalReason, UnknownCaller

MAX_HEADER_CHARACTERS = 16 * 2**10
# Most characters of a subject in an error's text.
MAX_SUBJECT_CHARACTERS = 256


class _Known(NamedTuple):
    """The data against which callers are checked, replaced as a whole."""

    identities: Identities
    tokens: JsonWebTokens | None


class Authenticator:
    """Identifies callers. `refusals` counts, by reason, callers that could not be identified."""

    def __init__(self, identities: Identities) -> None:
        self.refusals: Counter[str] = Counter({reason.value: 0 for reason in RefusalReason})
        self._known = _Known(identities, JsonWebTokens(identities.jwt) if identities.jwt is not None else None)
        # Failures of replaced token verifiers, so that the count never falls.
        self._earlier_failures = 0

    @property
    def refresh_failures(self) -> int:
        """Number of failed attempts to read the issuer's key set."""
        tokens = self._known.tokens
        return self._earlier_failures + (tokens.refresh_failures if tokens is not None else 0)

    @property
    def gateway(self) -> Identity | None:
        """The identity of callers at the gateway's own address that show none; None: they are refused."""
        return self._known.identities.gateway

    def replace(self, identities: Identities) -> None:
        """Replaces the identities from the next call on. If the issuer's settings are the same, its keys are kept. May
        be called on another thread, because a call in progress goes on with the identities with which it began.
        """
        tokens = self._known.tokens
        if tokens is not None and tokens.settings != identities.jwt:
            self._earlier_failures += tokens.refresh_failures
            tokens = None
        if tokens is None and identities.jwt is not None:
            tokens = JsonWebTokens(identities.jwt)
        self._known = _Known(identities, tokens)

    async def identify(
        self, authorization: str | None, certificate_pem: bytes | None, now: Callable[[], float] = time.time
    ) -> Identity:
        """The caller's identity. If there is a header, it alone decides: a wrong one is refused whatever the
        certificate. `now`: the time at which certificates have to be valid, in seconds since 1970. Raises
        UnknownCaller, which is an Unauthenticated.
        """
        known = self._known
        try:
            if authorization is not None:
                return await _by_header(known, authorization)
            if certificate_pem is not None:
                return _by_certificate(known.identities, certificate_pem, now())
        except UnknownCaller as error:
            self.refusals[error.reason.value] += 1
            raise
        raise self.refusal(RefusalReason.NO_IDENTITY)

    def refusal(self, reason: RefusalReason) -> UnknownCaller:
        """Counts a refusal; returns the error for its caller."""
        self.refusals[reason.value] += 1
        return UnknownCaller(reason)


async def _by_header(known: _Known, authorization: str) -> Identity:
    if len(authorization) > MAX_HEADER_CHARACTERS or not authorization.isascii():
        raise UnknownCaller(RefusalReason.UNKNOWN_KEY)
    scheme, _, rest = authorization.strip().partition(" ")
    proof = rest.strip()
    match scheme.lower():
        case "bearer" if known.tokens is not None and proof.count(".") == 2:
            return await known.tokens.verify(proof)
        case "bearer":
            return _by_key(known.identities, proof.encode())
        case "basic":
            return _by_name_and_key(known.identities, proof)
    raise UnknownCaller(RefusalReason.UNKNOWN_KEY)


def _by_name_and_key(identities: Identities, encoded: str) -> Identity:
    """HTTP Basic authentication, as browsers use it. The name may be empty; otherwise it has to be that of the key."""
    try:
        name, _, key = base64.b64decode(encoded, validate=True).partition(b":")
    except ValueError as error:
        raise UnknownCaller(RefusalReason.UNKNOWN_KEY) from error
    identity = _by_key(identities, key)
    if name not in (b"", identity.name.encode()):
        raise UnknownCaller(RefusalReason.UNKNOWN_KEY)
    return identity


def _by_key(identities: Identities, key: bytes) -> Identity:
    # The time of this lookup depends only on the digest. Learning a digest from it does not help: a caller cannot
    # choose a key's digest, and no key can be found from its digest, because keys are random and too long to guess.
    identity = identities.keys.get(hashlib.sha256(key).digest())
    if identity is None:
        raise UnknownCaller(RefusalReason.UNKNOWN_KEY)
    return identity


def _by_certificate(identities: Identities, pem: bytes, now: float) -> Identity:
    try:
        certificate = subject_of(pem)
    except ValueError as error:
        raise UnknownCaller(RefusalReason.UNKNOWN_CERTIFICATE) from error
    identity = identities.certificates.get(certificate.subject)
    if identity is None:
        shown = "".join(each if each.isprintable() else "?" for each in certificate.subject[:MAX_SUBJECT_CHARACTERS])
        words = f"certificate of {shown or 'an empty subject'} is not in the identities file"
        raise UnknownCaller(RefusalReason.UNKNOWN_CERTIFICATE, words)
    # TLS checks the dates only when a connection begins, which may be long ago.
    if not certificate.not_valid_before <= datetime.fromtimestamp(now, UTC) <= certificate.not_valid_after:
        raise UnknownCaller(RefusalReason.EXPIRED_CERTIFICATE)
    return identity
