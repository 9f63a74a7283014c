"""JSON Web Tokens: good ones, forged ones, and what is remembered."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from support.access.issuer import AUDIENCE, DAY_S, ISSUER, claims, ec_key, ed_key, jwk, jwks, rsa_key, token
from support.access.key_server import key_server

from pagekv.kvmanager.access import json_web_tokens
from pagekv.kvmanager.access.identities_file import JwtSettings
from pagekv.kvmanager.access.identity import Identity, Role
from pagekv.kvmanager.access.json_web_keys import MAX_KEY_SET_BYTES, MAX_KEYS
from pagekv.kvmanager.access.json_web_tokens import MAX_TOKEN_BYTES, JsonWebTokens
from pagekv.kvmanager.access.refusals import RefusalReason, UnknownCaller

ALICE = Identity("jwt:alice", frozenset({Role.GENERATE, Role.OBSERVE}))


@pytest.fixture
def verifier(tmp_path: Path) -> JsonWebTokens:
    """With the first RSA key as "a", and an EC and an Ed25519 key as "e" and "d"."""
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(jwk(rsa_key(), kid="a"), jwk(ec_key(), kid="e"), jwk(ed_key(), kid="d")))
    return JsonWebTokens(JwtSettings(ISSUER, AUDIENCE, path))


def verify(verifier: JsonWebTokens, text: str) -> Identity:
    return asyncio.run(verifier.verify(text))


def refusal(verifier: JsonWebTokens, text: str) -> RefusalReason:
    with pytest.raises(UnknownCaller) as caught:
        verify(verifier, text)
    return caught.value.reason


@pytest.mark.parametrize(
    "good",
    [
        *(token(algorithm=name) for name in ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")),
        token(ec_key(), "ES256", "e"),
        token(ed_key(), "EdDSA", "d"),
        token(aud=["other", AUDIENCE]),
        token(roles="observe generate other"),
        token(iat=None),
        token(nbf=int(time.time())),
    ],
)
def test_good_tokens(verifier: JsonWebTokens, good: str) -> None:
    assert verify(verifier, good) == ALICE


@pytest.mark.parametrize("roles", [None, [], ["admin"], "admin", 3, {"generate": 1}, [["generate"], None, 1]])
def test_a_token_without_known_roles_has_none(verifier: JsonWebTokens, roles: Any) -> None:
    assert verify(verifier, token(roles=roles)) == Identity("jwt:alice", frozenset())


def test_roles_are_read_from_the_claim_that_is_set(tmp_path: Path) -> None:
    (tmp_path / "jwks.json").write_bytes(jwks(jwk(rsa_key())))
    verifier = JsonWebTokens(JwtSettings(ISSUER, AUDIENCE, tmp_path / "jwks.json", roles_claim="https://example/roles"))
    changed: dict[str, Any] = {"https://example/roles": ["operate"]}
    found = verify(verifier, token(kid=None, **changed))
    assert found.roles == {Role.OPERATE}


@pytest.fixture
def of_tenants(tmp_path: Path) -> JsonWebTokens:
    """With tenants in the claim "org"."""
    (tmp_path / "jwks.json").write_bytes(jwks(jwk(rsa_key(), kid="a")))
    return JsonWebTokens(JwtSettings(ISSUER, AUDIENCE, tmp_path / "jwks.json", tenant_claim="org"))


def test_the_tenant_is_the_name_or_that_of_the_claim(verifier: JsonWebTokens, of_tenants: JsonWebTokens) -> None:
    # A claim that nobody configured means nothing.
    assert verify(verifier, token(org="team-a")).tenant == "jwt:alice"
    assert verify(of_tenants, token(org="team-a")).tenant == "team-a"


@pytest.mark.parametrize("org", [None, "", "jwt:bob", "*", "a b", "x" * 65, ["team-a"], 7])
def test_a_token_without_a_good_tenant_is_refused(of_tenants: JsonWebTokens, org: Any) -> None:
    """The caller's name in its stead would be a tenant of its own, with a share of its own for each subject."""
    assert refusal(of_tenants, token(org=org)) is RefusalReason.INVALID_TOKEN


def test_a_token_may_act_for_nobody(verifier: JsonWebTokens) -> None:
    assert verify(verifier, token(roles=["act-for"], act_for=["*"])).act_for == frozenset()


def part(data: Any) -> str:
    """A part of a token, encoded."""
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def hs256_with_the_public_key() -> str:
    """A token that takes the issuer's public key for a shared secret."""
    pem = rsa_key().public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    # jwt.encode refuses such a secret: signed by hand, as an attacker would.
    signed = f"{part({'alg': 'HS256', 'kid': 'a', 'typ': 'JWT'})}.{part(claims())}"
    return f"{signed}.{part(hmac.digest(pem, signed.encode(), 'sha256'))}"


def with_header(**header: Any) -> str:
    """A token with a good signature of another header."""
    return f"{part({'alg': 'RS256', 'kid': 'a'} | header)}.{'.'.join(token().split('.')[1:])}"


FORGED = {
    "unsigned": f"{part({'alg': 'none', 'kid': 'a'})}.{part(claims())}.",
    "unsigned-in-other-letters": f"{part({'alg': 'nOnE', 'kid': 'a'})}.{part(claims())}.",
    "signature-left-out": token().rpartition(".")[0] + ".",
    "public-key-as-secret": hs256_with_the_public_key(),
    "another-key": token(rsa_key(number=1)),
    "key-of-another-id": token(ec_key(), "ES256", "a"),
    "rsa-signature-for-an-ec-key": token(kid="e"),
    "curve-of-another-key": token(ec_key(ec.SECP384R1), "ES384", "e"),
    "no-key-id-among-several": token(kid=None),
    "unknown-key-id": token(kid="z"),
    "algorithm-changed": with_header(alg="PS256"),
    "algorithm-a-list": with_header(alg=["RS256"]),
    "no-algorithm": with_header(alg=None),
    "key-id-a-number": with_header(kid=1),
    "key-id-null": with_header(kid=None),
    "critical-header": jwt.encode(claims(), rsa_key(), "RS256", headers={"kid": "a", "crit": ["x"], "x": 1}),
    "detached": f"{part({'alg': 'RS256', 'kid': 'a', 'b64': False, 'crit': ['b64']})}..{part(b'x')}",
    "key-in-the-header": jwt.encode(
        claims(), rsa_key(number=1), "RS256", headers={"kid": "a", "jwk": jwk(rsa_key(number=1))}
    ),
    "url-in-the-header": jwt.encode(claims(), rsa_key(number=1), "RS256", headers={"kid": "a", "jku": "http://evil"}),
    "claims-changed": f"{token().split('.')[0]}.{part(claims(sub='root'))}.{token().split('.')[2]}",
    "other-issuer": token(iss="https://evil.example"),
    "issuer-longer": token(iss=ISSUER + ".evil.example"),
    "no-issuer": token(iss=None),
    "other-audience": token(aud="other"),
    "audience-empty": token(aud=[]),
    "no-audience": token(aud=None),
    "no-expiry": token(exp=None),
    "no-subject": token(sub=None),
    "subject-empty": token(sub=""),
    "subject-a-line": token(sub="alice\nroot"),
    "subject-long": token(sub="a" * 129),
    "not-yet": token(nbf=int(time.time()) + DAY_S),
    "issued-by-a-clock-a-day-ahead": token(iat=int(time.time()) + DAY_S),
    "too-long": token(more="x" * MAX_TOKEN_BYTES),
    "not-ascii": token() + "ä",
    "empty": "",
    "points": "..",
    "noise": "a.b.c",
    "deep-header": f"{part(b'[' * 4000)}.{part(claims())}.AA",
    "header-a-list": f"{part([])}.{part(claims())}.AA",
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_forged_tokens_are_refused(verifier: JsonWebTokens, forged: str) -> None:
    assert refusal(verifier, forged) is RefusalReason.INVALID_TOKEN


@pytest.mark.parametrize("sub", [7, ["alice"], {"a": 1}, True])
def test_a_subject_that_is_no_text_is_refused(verifier: JsonWebTokens, sub: Any) -> None:
    payload = json.dumps(claims(sub=sub)).encode()
    assert refusal(verifier, signed_payload(payload)) is RefusalReason.INVALID_TOKEN


def signed_payload(payload: bytes) -> str:
    """A token whose payload its issuer signed, whatever it is."""
    return jwt.PyJWS().encode(payload, rsa_key(), "RS256", headers={"kid": "a"})


@pytest.mark.parametrize("exp", ["1e999", "-1e999", "NaN", "[]", "null", '"soon"', "{}"])
def test_an_expiry_that_is_no_time_is_refused(verifier: JsonWebTokens, exp: str) -> None:
    text = json.dumps(claims(exp=7)).replace('"exp": 7', f'"exp": {exp}')
    assert refusal(verifier, signed_payload(text.encode())) is RefusalReason.INVALID_TOKEN


@pytest.mark.parametrize("payload", [b"", b"[]", b"\xff", b"[" * 5000, b'{"sub": "\\ud800"}'])
def test_a_signed_payload_that_is_no_object_is_refused(verifier: JsonWebTokens, payload: bytes) -> None:
    assert refusal(verifier, signed_payload(payload)) is RefusalReason.INVALID_TOKEN


def test_half_a_surrogate_pair_is_no_name(verifier: JsonWebTokens) -> None:
    payload = json.dumps(claims(sub="\ud800")).encode()
    assert refusal(verifier, signed_payload(payload)) is RefusalReason.INVALID_TOKEN


@pytest.mark.parametrize(("ago_s", "good"), [(30, True), (90, False), (3600, False)])
def test_clocks_may_differ_by_the_leeway(verifier: JsonWebTokens, ago_s: int, good: bool) -> None:
    text = token(exp=int(time.time()) - ago_s)
    if good:
        assert verify(verifier, text) == ALICE
    else:
        assert refusal(verifier, text) is RefusalReason.EXPIRED_TOKEN


def test_only_a_token_that_the_issuer_signed_is_called_expired(verifier: JsonWebTokens) -> None:
    forged = token(rsa_key(number=1), exp=1)
    assert refusal(verifier, forged) is RefusalReason.INVALID_TOKEN


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tokens whose signature was checked."""
    seen: list[str] = []
    real = jwt.decode

    def decode(text: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        seen.append(text)
        return real(text, *args, **kwargs)

    monkeypatch.setattr(jwt, "decode", decode)
    return seen


def test_a_good_token_is_checked_once(verifier: JsonWebTokens, decodes: list[str]) -> None:
    text = token()
    for _ in range(3):
        assert verify(verifier, text) == ALICE
    assert decodes == [text]
    for _ in range(2):
        refusal(verifier, token(aud="other"))
    assert len(decodes) == 3


def test_a_token_is_remembered_until_it_expires(
    verifier: JsonWebTokens, decodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = token(exp=int(time.time()) + 100)
    verify(verifier, text)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 101)
    # Over by this clock, which PyJWT does not read: it is asked again.
    verify(verifier, text)
    assert len(decodes) == 2


def test_another_key_set_ends_what_was_remembered(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(jwk(rsa_key(), kid="a")))
    verifier = JsonWebTokens(JwtSettings(ISSUER, AUDIENCE, path))
    text = token()
    assert verify(verifier, text) == ALICE
    path.write_bytes(jwks(jwk(rsa_key(number=1), kid="a"), jwk(ec_key(), kid="e")))
    assert refusal(verifier, text) is RefusalReason.INVALID_TOKEN
    assert verify(verifier, token(rsa_key(number=1))) == ALICE
    # Nor does it come back with what is remembered of the new set.
    assert refusal(verifier, text) is RefusalReason.INVALID_TOKEN


def test_a_key_for_one_algorithm_verifies_no_other(tmp_path: Path) -> None:
    (tmp_path / "jwks.json").write_bytes(jwks(jwk(rsa_key(), kid="a", alg="RS256")))
    verifier = JsonWebTokens(JwtSettings(ISSUER, AUDIENCE, tmp_path / "jwks.json"))
    assert verify(verifier, token()) == ALICE
    assert refusal(verifier, token(algorithm="PS256")) is RefusalReason.INVALID_TOKEN


def test_few_tokens_are_remembered(
    verifier: JsonWebTokens, decodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_web_tokens, "MAX_CACHED", 2)
    one, two, three = (token(sub=name) for name in ("one", "two", "three"))
    for text in (one, two, one, three, one, two):
        verify(verifier, text)
    # The second was unused for the longest when the third came.
    assert decodes == [one, two, three, two]


def test_without_keys_every_token_is_refused(tmp_path: Path) -> None:
    verifier = JsonWebTokens(JwtSettings(ISSUER, AUDIENCE, tmp_path / "none"))
    assert refusal(verifier, token()) is RefusalReason.INVALID_TOKEN
    assert verifier.refresh_failures == 1


def test_keys_from_a_url_with_one_more_later() -> None:
    with key_server(jwks(jwk(rsa_key(), kid="a"))) as server:
        verifier = JsonWebTokens(JwtSettings(ISSUER, AUDIENCE, server.url))
        assert verify(verifier, token()) == ALICE
        for number in range(20):
            assert refusal(verifier, token(kid=f"unknown-{number}")) is RefusalReason.INVALID_TOKEN
        assert len(server.asked) == 1
        assert verifier.refresh_failures == 0


def test_a_huge_key_set_lets_in_nobody_and_takes_nobodys_keys() -> None:
    good = jwks(jwk(rsa_key(), kid="a"))
    with key_server(good + b" " * MAX_KEY_SET_BYTES) as server:
        verifier = JsonWebTokens(JwtSettings(ISSUER, AUDIENCE, server.url))
        assert refusal(verifier, token()) is RefusalReason.INVALID_TOKEN
        assert verifier.refresh_failures == 1
    with key_server(good) as server:
        verifier = JsonWebTokens(JwtSettings(ISSUER, AUDIENCE, server.url))
        assert verify(verifier, token()) == ALICE
        server.body = jwks(*(jwk(rsa_key(), kid=str(number)) for number in range(MAX_KEYS + 1)))
        verifier._source._tried_at = -1e9  # type: ignore[union-attr]  # as half a minute later
        assert refusal(verifier, token(kid="unknown")) is RefusalReason.INVALID_TOKEN
        assert len(server.asked) == 2
        assert verifier.refresh_failures == 1
        assert verify(verifier, token(sub="bob")).name == "jwt:bob"


def test_checking_a_token_holds_up_the_loop_for_no_time(verifier: JsonWebTokens) -> None:
    texts = [token(sub=f"caller-{number}") for number in range(20)]
    verify(verifier, token())
    begun = time.process_time()
    for text in texts:
        verify(verifier, text)
    # With the loop that each has here; measured: 0.3 ms. Of the processor, for a busy machine stretches any other time.
    assert (time.process_time() - begun) / len(texts) < 0.02
