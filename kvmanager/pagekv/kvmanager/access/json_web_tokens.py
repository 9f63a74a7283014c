"""JSON Web Tokens: PyJWT checks signature, issuer, audience and times; the subject becomes the caller's name."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jwt

from pagekv.kvmanager.access.identities_file import JwtSettings
from pagekv.kvmanager.access.identity import TENANT_NAME, Identity, Role
from pagekv.kvmanager.access.json_web_keys import KeySet, VerifyingKey
from pagekv.kvmanager.access.key_sources import KeySetFile, KeySetUrl
from pagekv.kvmanager.access.refusals import RefusalReason, UnknownCaller

MAX_TOKEN_BYTES = 8 * 2**10
MAX_SUBJECT_CHARACTERS = 128
MAX_CACHED = 4096
# Stands before a caller's name from a token; no name in an identities file has a colon.
PREFIX = "jwt:"
_REQUIRED = ["exp", "iss", "aud", "sub"]
# Errors of an invalid token: PyJWT's own, and those of conversions that it leaves to Python.
_NOT_VALID = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


class JsonWebTokens:
    """Verifies the tokens of one issuer. Valid tokens are cached until they expire or the key set changes."""

    def __init__(self, settings: JwtSettings) -> None:
        self.settings = settings
        self._source = KeySetFile(settings.jwks) if isinstance(settings.jwks, Path) else KeySetUrl(settings.jwks)
        # By the token's SHA-256: identity and expiry; least recently used first. All were verified with `_cached_with`.
        self._cache: OrderedDict[bytes, tuple[Identity, float]] = OrderedDict()
        self._cached_with: KeySet | None = None

    @property
    def refresh_failures(self) -> int:
        """Number of failed attempts to read the key set."""
        return self._source.refresh_failures

    async def verify(self, token: str) -> Identity:
        """The caller that the token names. Raises UnknownCaller."""
        if len(token) > MAX_TOKEN_BYTES or not token.isascii():
            raise UnknownCaller(RefusalReason.INVALID_TOKEN)
        digest = hashlib.sha256(token.encode()).digest()
        found = self._cached(digest)
        if found is not None:
            return found
        try:
            keys, key = await self._key(_key_id(token))
            claims = self._decode(token, key)
            identity, expires = self._identity(claims), float(claims["exp"])
        except jwt.ExpiredSignatureError as error:
            raise UnknownCaller(RefusalReason.EXPIRED_TOKEN) from error
        except _NOT_VALID as error:
            raise UnknownCaller(RefusalReason.INVALID_TOKEN) from error
        self._remember(digest, identity, expires, keys)
        return identity

    async def _key(self, key_id: str | None) -> tuple[KeySet, VerifyingKey]:
        """The key that a token names, and its set, read again if it lacks the key. Raises InvalidTokenError."""
        keys = self._source.current()
        key = keys.find(key_id) if keys is not None else None
        if key is None:
            keys = await self._source.newer()
            key = keys.find(key_id) if keys is not None else None
        if keys is None or key is None:
            raise jwt.InvalidTokenError("no such key")
        return keys, key

    def _decode(self, token: str, key: VerifyingKey) -> dict[str, Any]:
        return jwt.decode(
            token,
            key.key,
            algorithms=sorted(key.algorithms),
            audience=self.settings.audience,
            issuer=self.settings.issuer,
            leeway=self.settings.leeway_s,
            options={"require": _REQUIRED},
        )

    def _identity(self, claims: dict[str, Any]) -> Identity:
        subject = claims["sub"]
        # Too long a subject is refused, not cut, because two subjects would become one caller.
        if not isinstance(subject, str) or not subject.isprintable() or not 1 <= len(subject) <= MAX_SUBJECT_CHARACTERS:
            raise jwt.InvalidTokenError("sub must be 1 to 128 printable characters")
        return Identity(PREFIX + subject, _roles(claims.get(self.settings.roles_claim)), self._tenant(claims))

    def _tenant(self, claims: dict[str, Any]) -> str:
        """The tenant in the claim; "" for the caller's name, which has a colon, so that no claim can give it."""
        if not self.settings.tenant_claim:
            return ""
        tenant = claims.get(self.settings.tenant_claim)
        if not isinstance(tenant, str) or not TENANT_NAME.fullmatch(tenant):
            raise jwt.InvalidTokenError("the tenant must be 1 to 64 characters of [A-Za-z0-9._-]")
        return tenant

    def _cached(self, digest: bytes) -> Identity | None:
        if self._source.current() is not self._cached_with:
            return None
        identity, expires = self._cache.get(digest, (None, 0.0))
        # After the expiry the leeway may still apply, which PyJWT checks.
        if identity is None or time.time() >= expires:
            return None
        self._cache.move_to_end(digest)
        return identity

    def _remember(self, digest: bytes, identity: Identity, expires: float, keys: KeySet) -> None:
        # The set may have changed while this token waited for it.
        if keys is not self._source.current():
            return
        if keys is not self._cached_with:
            self._cache.clear()
            self._cached_with = keys
        self._cache[digest] = (identity, expires)
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)


def _key_id(token: str) -> str | None:
    """The id of the key that a token names. It is not verified, but only selects the key. Raises PyJWTError."""
    header = jwt.get_unverified_header(token)
    # crit names extensions that must be understood (RFC 7515, 4.1.11), and none is. PyJWT before 2.12 ignores it.
    if "crit" in header:
        raise jwt.InvalidTokenError("crit: no extension is known")
    key_id: str | None = header.get("kid")
    return key_id


def _roles(claim: object) -> frozenset[Role]:
    """Roles in a claim, which is a list of names or a text with spaces between them; unknown names are ignored."""
    names = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
    return frozenset(role for role in Role if role.value in names)
