"""An issuer of JSON Web Tokens: its keys, its key set, and tokens good and bad."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

# Tokens of parametrized tests are made before the first test of a run, which may take hours.
DAY_S = 86_400
ISSUER, AUDIENCE = "https://login.example", "pagekv"
ROLES = ["generate", "observe", "admin of another system"]


@cache
def rsa_key(bits: int = 2048, number: int = 0) -> rsa.RSAPrivateKey:
    """One key for each number, since making one takes a tenth of a second."""
    return rsa.generate_private_key(65537, bits)


@cache
def ec_key(curve: type[ec.EllipticCurve] = ec.SECP256R1) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(curve())


@cache
def ed_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def jwk(key: Any, **members: Any) -> dict[str, Any]:
    """The public half of a private key, as a member of a key set."""
    public = key.public_key()
    if isinstance(key, rsa.RSAPrivateKey):
        return RSAAlgorithm.to_jwk(public, as_dict=True) | members
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return ECAlgorithm.to_jwk(public, as_dict=True) | members
    return OKPAlgorithm.to_jwk(public, as_dict=True) | members


def jwks(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def claims(**changed: Any) -> dict[str, Any]:
    """The claims of a good token; None leaves one out."""
    now = int(time.time())
    good = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": now + DAY_S, "iat": now, "roles": ROLES} | changed
    return {name: value for name, value in good.items() if value is not None}


def token(key: Any = None, algorithm: str = "RS256", kid: str | None = "a", **changed: Any) -> str:
    """A token signed with `key`, or with the first RSA key."""
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode(claims(**changed), rsa_key() if key is None else key, algorithm, headers=headers)
