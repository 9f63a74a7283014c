"""A JSON Web Key Set (RFC 7517): the public keys that an issuer signs its tokens with, and the algorithms of each.

The algorithms follow from the key, never from the token. So no token can make the manager use a public key as a shared
secret.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

MAX_KEY_SET_BYTES = 256 * 2**10
MAX_KEYS = 100
MAX_KEY_ID_CHARACTERS = 256
# Smaller keys can be broken, and checking a signature by a larger one holds up the event loop.
MIN_RSA_BITS, MAX_RSA_BITS = 2048, 8192
_RSA = frozenset(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"))
_OF_CURVE = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
# Members of a private or symmetric key, which only the issuer may have.
_SECRET = ("d", "k", "p", "q", "dp", "dq", "qi", "oth")

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey | Ed448PublicKey


@dataclass(frozen=True, slots=True)
class VerifyingKey:
    """A public key, and the algorithms that a token signed with it may name."""

    key: PublicKey
    algorithms: frozenset[str]


@dataclass(frozen=True, slots=True)
class KeySet:
    """Keys by their ids, and keys without an id. `digest` is the SHA-256 of the text: equal texts are the same set."""

    by_id: Mapping[str, VerifyingKey]
    without_id: tuple[VerifyingKey, ...]
    digest: bytes

    def find(self, key_id: str | None) -> VerifyingKey | None:
        """The key that a token names; without a name, the set's only key. None if there is no such key."""
        if key_id is not None:
            return self.by_id.get(key_id)
        keys = (*self.by_id.values(), *self.without_id)
        return keys[0] if len(keys) == 1 else None


def read_key_set(text: bytes) -> KeySet:
    """The keys in the text of a key set; keys for other purposes and of other kinds are left out. Raises ValueError,
    with a message of one line, if there is no key to verify with, or a secret key.
    """
    if len(text) > MAX_KEY_SET_BYTES:
        raise ValueError(f"a key set must have at most {MAX_KEY_SET_BYTES} bytes, has {len(text)}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("a key set must be JSON") from error
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("keys: must be a list")
    if len(listed) > MAX_KEYS:
        raise ValueError(f"keys: must have at most {MAX_KEYS} keys, has {len(listed)}")
    by_id: dict[str, VerifyingKey] = {}
    without_id: list[VerifyingKey] = []
    for index, given in enumerate(listed):
        field = f"keys[{index}]"
        if not isinstance(given, dict):
            raise ValueError(f"{field}: must be an object")
        _check_public(field, given)
        key = _read_key(given)
        if key is None:
            continue
        key_id = given.get("kid")
        if key_id is None:
            without_id.append(key)
        elif not isinstance(key_id, str) or len(key_id) > MAX_KEY_ID_CHARACTERS:
            raise ValueError(f"{field}.kid: must be a text of at most {MAX_KEY_ID_CHARACTERS} characters")
        elif key_id in by_id:
            raise ValueError(f"{field}.kid: another key has this id: {key_id[:64]!r}")
        else:
            by_id[key_id] = key
    if not by_id and not without_id:
        raise ValueError("keys: must have one key at least that verifies signatures (RSA, EC or OKP)")
    return KeySet(by_id, tuple(without_id), hashlib.sha256(text).digest())


def _check_public(field: str, given: dict[str, Any]) -> None:
    """Refuses the whole set for one secret key, because everybody who can read the set could sign as the issuer."""
    if given.get("kty") == "oct":
        raise ValueError(f"{field}.kty: must not be oct: shared secrets are not taken")
    if any(name in given for name in _SECRET):
        raise ValueError(f"{field}: must be a public key, has members of a private one")


def _read_key(given: dict[str, Any]) -> VerifyingKey | None:
    """The key; None for a key with another purpose, or of a kind, size or form that is not accepted."""
    operations = given.get("key_ops", ["verify"])
    if given.get("use", "sig") != "sig" or not isinstance(operations, list) or "verify" not in operations:
        return None
    readers = {"RSA": RSAAlgorithm.from_jwk, "EC": ECAlgorithm.from_jwk, "OKP": OKPAlgorithm.from_jwk}
    kind = given.get("kty")
    if not isinstance(kind, str) or kind not in readers:
        return None
    try:
        key = readers[kind](given)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, OverflowError):
        return None
    algorithms = _algorithms(key)
    if "alg" in given:
        algorithms = frozenset(name for name in algorithms if name == given["alg"])
    return VerifyingKey(key, algorithms) if algorithms else None  # type: ignore[arg-type]  # no private key has any


def _algorithms(key: object) -> frozenset[str]:
    if isinstance(key, RSAPublicKey):
        return _RSA if MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS else frozenset()
    if isinstance(key, EllipticCurvePublicKey):
        return frozenset({_OF_CURVE[key.curve.name]} if key.curve.name in _OF_CURVE else ())
    return frozenset({"EdDSA"} if isinstance(key, Ed25519PublicKey | Ed448PublicKey) else ())
