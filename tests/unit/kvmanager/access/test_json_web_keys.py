"""Key sets: keys that are taken, left out, and the sets that are refused."""

from __future__ import annotations

import base64
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from jwt.algorithms import OKPAlgorithm, RSAAlgorithm
from support.access.issuer import ec_key, ed_key, jwk, jwks, rsa_key

from pagekv.kvmanager.access.json_web_keys import MAX_KEY_SET_BYTES, MAX_KEYS, read_key_set

RSA = ["PS256", "PS384", "PS512", "RS256", "RS384", "RS512"]


@pytest.mark.parametrize(
    ("key", "algorithms"),
    [
        (rsa_key(), RSA),
        (ec_key(), ["ES256"]),
        (ec_key(ec.SECP384R1), ["ES384"]),
        (ec_key(ec.SECP521R1), ["ES512"]),
        (ed_key(), ["EdDSA"]),
        (Ed448PrivateKey.generate(), ["EdDSA"]),
    ],
)
def test_algorithms_follow_from_the_key(key: Any, algorithms: list[str]) -> None:
    found = read_key_set(jwks(jwk(key, kid="a"))).find("a")
    assert found is not None
    assert sorted(found.algorithms) == algorithms
    assert found.key == key.public_key()


def test_a_key_may_be_for_one_algorithm_alone() -> None:
    found = read_key_set(jwks(jwk(rsa_key(), kid="a", alg="PS256"))).find("a")
    assert found is not None
    assert found.algorithms == {"PS256"}


def test_a_token_without_a_key_id_means_the_only_key() -> None:
    assert read_key_set(jwks(jwk(ec_key()))).find(None) is not None
    assert read_key_set(jwks(jwk(ec_key(), kid="a"))).find(None) is not None
    two = read_key_set(jwks(jwk(ec_key()), jwk(rsa_key(), kid="a")))
    assert two.find(None) is None
    assert two.find("a") is not None
    assert two.find("b") is None


def test_a_key_id_does_not_mean_a_key_without_one() -> None:
    assert read_key_set(jwks(jwk(ec_key()))).find("a") is None


def short(bits: int) -> dict[str, Any]:
    """An RSA key of a size that no library makes any more, or none can make in time."""
    number = base64.urlsafe_b64encode(((1 << (bits - 1)) | 1).to_bytes(bits // 8, "big")).rstrip(b"=").decode()
    return {"kty": "RSA", "n": number, "e": "AQAB"}


@pytest.mark.parametrize(
    "other",
    [
        jwk(rsa_key(), use="enc"),
        jwk(rsa_key(), key_ops=["encrypt"]),
        jwk(rsa_key(), key_ops="verify"),
        jwk(rsa_key(), alg="RSA-OAEP"),
        jwk(rsa_key(), alg="HS256"),
        jwk(rsa_key(), alg=["RS256"]),
        jwk(ec_key(), alg="RS256"),
        jwk(ec_key(ec.SECP256K1)),
        short(1024),
        short(16384),
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"},
        {"kty": "EC", "crv": "P-256", "x": 1, "y": None},
        {"kty": "OKP", "crv": "X25519", "x": "AA"},
        {"kty": "RSA", "n": [], "e": {}},
        {"kty": "RSA"},
        {"kty": ["RSA"]},
        {"kty": "post-quantum"},
        {},
    ],
)
def test_keys_for_other_things_are_left_out(other: dict[str, Any]) -> None:
    found = read_key_set(jwks(other | {"kid": "b"}, jwk(ec_key(), kid="a")))
    assert list(found.by_id) == ["a"]
    with pytest.raises(ValueError, match=r"^keys: must have one key at least that verifies"):
        read_key_set(jwks(other))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "must be JSON"),
        (b"\xff", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[]", "keys: must be a list"),
        (b"{}", "keys: must be a list"),
        (b'{"keys": {}}', "keys: must be a list"),
        (b'{"keys": []}', "one key at least"),
        (b'{"keys": [1]}', r"keys\[0\]: must be an object"),
        (b" " * (MAX_KEY_SET_BYTES + 1), "at most 262144 bytes, has 262145"),
        (jwks(*[{}] * (MAX_KEYS + 1)), "at most 100 keys, has 101"),
        (jwks(jwk(ec_key(), kid=1)), r"keys\[0\].kid: must be a text"),
        (jwks(jwk(ec_key(), kid="x" * 257)), r"keys\[0\].kid: must be a text of at most 256"),
        (jwks(jwk(ec_key(), kid="a"), jwk(rsa_key(), kid="a")), r"keys\[1\].kid: another key has this id: 'a'"),
        (jwks(jwk(ec_key()), {"kty": "oct", "k": "c2VjcmV0"}), r"keys\[1\].kty: must not be oct"),
        (jwks(RSAAlgorithm.to_jwk(rsa_key(), as_dict=True)), r"keys\[0\]: must be a public key"),
        (jwks(OKPAlgorithm.to_jwk(ed_key(), as_dict=True)), r"keys\[0\]: must be a public key"),
    ],
)
def test_a_set_is_refused_on_one_line(text: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_key_set(text)
    assert "\n" not in str(caught.value)


def test_equal_texts_have_equal_digests() -> None:
    text = jwks(jwk(ec_key()))
    assert read_key_set(text).digest == read_key_set(text).digest != read_key_set(text + b" ").digest


def test_the_keys_verify_what_pyjwt_signed() -> None:
    found = read_key_set(jwks(jwk(rsa_key()))).find(None)
    assert found is not None
    assert isinstance(found.key, rsa.RSAPublicKey)
    signed = jwt.encode({"a": 1}, rsa_key(), "PS512")
    assert jwt.decode(signed, found.key, algorithms=sorted(found.algorithms)) == {"a": 1}
