"""From what a caller shows, an authorization header or a client certificate, to its identity."""

from __future__ import annotations

import base64
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from pagekv.kvmanager.access.certificates import subject_of
from pagekv.kvmanager.access.identities_file import Identities
from pagekv.kvmanager.access.identity import Identity
from pagekv.kvmanager.access.json_web_tokens import JsonWebTokens
from pagekv.kvmanager.access.refusals import RefusalReason, UnknownCaller

MAX_HEADER_CHARACTERS = 16 * 2**10


class Authenticator:
    """Identifies callers. `refusals` counts by reason those that were not known."""

    def __init__(self, identities: Identities) -> None:
        self.refusals: Counter[str] = Counter({reason.value: 0 for reason in RefusalReason})
        self._identities = identities
        self._tokens = JsonWebTokens(identities.jwt) if identities.jwt is not None else None
        # Of token verifiers that were replaced, so that the count never falls.
        self._earlier_failures = 0

    @property
    def refresh_failures(self) -> int:
        """Attempts to read the issuer's key set that failed."""
        return self._earlier_failures + (self._tokens.refresh_failures if self._tokens is not None else 0)

    def replace(self, identities: Identities) -> None:
        """From the next call on these count. An issuer that is the same keeps its keys."""
        old = self._tokens
        if old is not None and old.settings != identities.jwt:
            self._earlier_failures += old.refresh_failures
            old = None
        if old is None and identities.jwt is not None:
            old = JsonWebTokens(identities.jwt)
        self._identities, self._tokens = identities, old

    async def identify(
        self, authorization: str | None, certificate_pem: bytes | None, now: Callable[[], float] = time.time
    ) -> Identity:
        """The caller's identity. A header decides alone: a wrong one is refused, whatever the certificate. `now`: the
        time that certificates are held against, in seconds since 1970. Raises UnknownCaller, an Unauthenticated.
        """
        try:
            if authorization is not None:
                return await self._by_header(authorization)
            if certificate_pem is not None:
                return self._by_certificate(certificate_pem, now())
            raise UnknownCaller(RefusalReason.NO_IDENTITY)
        except UnknownCaller as error:
            self.refusals[error.reason.value] += 1
            raise

    async def _by_header(self, authorization: str) -> Identity:
        if len(authorization) > MAX_HEADER_CHARACTERS or not authorization.isascii():
            raise UnknownCaller(RefusalReason.UNKNOWN_KEY)
        scheme, _, rest = authorization.strip().partition(" ")
        proof = rest.strip()
        match scheme.lower():
            case "bearer" if self._tokens is not None and proof.count(".") == 2:
                return await self._tokens.verify(proof)
            case "bearer":
                return self._by_key(proof.encode())
            case "basic":
                return self._by_name_and_key(proof)
        raise UnknownCaller(RefusalReason.UNKNOWN_KEY)

    def _by_name_and_key(self, encoded: str) -> Identity:
        """Basic authentication, as browsers do it. The name may be left out, but one that is not the key's is wrong."""
        try:
            name, _, key = base64.b64decode(encoded, validate=True).partition(b":")
        except ValueError as error:
            raise UnknownCaller(RefusalReason.UNKNOWN_KEY) from error
        identity = self._by_key(key)
        if name not in (b"", identity.name.encode()):
            raise UnknownCaller(RefusalReason.UNKNOWN_KEY)
        return identity

    def _by_key(self, key: bytes) -> Identity:
        # The time of this lookup depends on the digest alone. To learn a digest from it helps nobody: a caller cannot
        # choose a key's digest, and no key is found from one, since keys are random and too long to try.
        identity = self._identities.keys.get(hashlib.sha256(key).digest())
        if identity is None:
            raise UnknownCaller(RefusalReason.UNKNOWN_KEY)
        return identity

    def _by_certificate(self, pem: bytes, now: float) -> Identity:
        try:
            certificate = subject_of(pem)
        except ValueError as error:
            raise UnknownCaller(RefusalReason.UNKNOWN_CERTIFICATE) from error
        identity = self._identities.certificates.get(certificate.subject)
        if identity is None:
            raise UnknownCaller(RefusalReason.UNKNOWN_CERTIFICATE)
        # TLS looked at the dates once, when the connection began, which may have been long ago.
        if not certificate.not_valid_before <= datetime.fromtimestamp(now, UTC) <= certificate.not_valid_after:
            raise UnknownCaller(RefusalReason.EXPIRED_CERTIFICATE)
        return identity
