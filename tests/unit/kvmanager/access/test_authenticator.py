"""Callers by header or certificate; refusals and their counts."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.access.client_certificates import BEGINS, ENDS, certificate
from support.access.issuer import AUDIENCE, ISSUER, jwk, jwks, rsa_key, token

from pagekv.common.errors import Unauthenticated
from pagekv.kvmanager.access.authenticator import MAX_HEADER_CHARACTERS, MAX_SUBJECT_CHARACTERS, Authenticator
from pagekv.kvmanager.access.identities_file import Identities, JwtSettings
from pagekv.kvmanager.access.identity import Identity, Role
from pagekv.kvmanager.access.refusals import RefusalReason

ALICE = Identity("alice", frozenset({Role.GENERATE}))
PROMETHEUS = Identity("prometheus", frozenset({Role.OBSERVE}))
KEY = "pk-0123456789abcdef"
DIGEST = hashlib.sha256(KEY.encode()).digest()
NOW = (BEGINS.timestamp() + ENDS.timestamp()) / 2
FILE = Identities({DIGEST: ALICE}, {"CN=prometheus": PROMETHEUS})
PEM = certificate("CN=prometheus")


def identified(
    authenticator: Authenticator, authorization: str | None, pem: bytes | None = None, now: float = NOW
) -> Identity:
    return asyncio.run(authenticator.identify(authorization, pem, lambda: now))


def refusal(authenticator: Authenticator, authorization: str | None, pem: bytes | None = None, now: float = NOW) -> str:
    """The words for the caller; counted once."""
    before = authenticator.refusals.total()
    with pytest.raises(Unauthenticated) as caught:
        identified(authenticator, authorization, pem, now)
    assert authenticator.refusals.total() == before + 1
    return str(caught.value)


def basic(text: str | bytes) -> str:
    return "Basic " + base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator(FILE)


@pytest.mark.parametrize(
    "header",
    [
        f"Bearer {KEY}",
        f"bearer {KEY}",
        f"BEARER   {KEY} ",
        basic(f"alice:{KEY}"),
        basic(f":{KEY}").replace("B", "b", 1),
    ],
)
def test_a_key_is_known(authenticator: Authenticator, header: str) -> None:
    assert identified(authenticator, header) == ALICE
    assert authenticator.refusals.total() == 0


@pytest.mark.parametrize(
    "header",
    [
        "",
        " ",
        "Bearer",
        "Bearer ",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY.upper()}",
        f"Bearer {DIGEST.hex()}",
        f"Bearer x {KEY}",
        f"Bearer\t{KEY}",
        KEY,
        f"Digest {KEY}",
        "Bearer a.b.c",
        basic(f"bob:{KEY}"),
        basic(f"Alice:{KEY}"),
        basic("alice:"),
        basic("alice"),
        basic(KEY),
        basic(f"alice:{KEY}:"),
        basic(b"\xff:\xff"),
        basic(f"alice:{KEY}") + "=",
        f"Basic {KEY}",
        "Basic ***",
        "Bearer ä",
        "Bearer \ud800",
        "Bearer " + "x" * MAX_HEADER_CHARACTERS,
        f"Bearer {KEY}" + " " * MAX_HEADER_CHARACTERS,
    ],
)
def test_a_wrong_header_is_refused_even_beside_a_good_certificate(authenticator: Authenticator, header: str) -> None:
    assert refusal(authenticator, header, PEM) == "unknown key"


def test_without_anything_the_answer_says_what_to_send(authenticator: Authenticator) -> None:
    assert refusal(authenticator, None) == "no identity: send an API key in authorization, or a client certificate"


def test_a_certificate_is_known_by_its_subject(authenticator: Authenticator) -> None:
    assert identified(authenticator, None, PEM) == PROMETHEUS


@pytest.mark.parametrize("subject", ["CN=eve", "CN=prometheus,O=eve", "CN=Prometheus"])
def test_another_certificate_is_refused_by_its_own_name(authenticator: Authenticator, subject: str) -> None:
    words = f"certificate of {subject} is not in the identities file"
    assert refusal(authenticator, None, certificate(subject)) == words


def test_a_name_in_a_refusal_is_short_and_on_its_line(authenticator: Authenticator) -> None:
    words = refusal(authenticator, None, certificate("OU=" + "x" * 60 + ",CN=a\n\x1b[2Jb"))
    assert words.startswith(f"certificate of OU={'x' * 60},CN=a??[2Jb is not")
    many = ",".join(f"OU={n:060}" for n in range(9))
    assert len(refusal(authenticator, None, certificate(many))) < MAX_SUBJECT_CHARACTERS + 60


@pytest.mark.parametrize("pem", [b"", b"noise"])
def test_bytes_that_are_no_certificate_are_refused(authenticator: Authenticator, pem: bytes) -> None:
    assert refusal(authenticator, None, pem) == "certificate is not known"


@pytest.mark.parametrize("now", [BEGINS.timestamp() - 1, ENDS.timestamp() + 1])
def test_a_certificate_outside_of_its_dates_is_refused(authenticator: Authenticator, now: float) -> None:
    assert refusal(authenticator, None, PEM, now) == "certificate expired"


@pytest.mark.parametrize("now", [BEGINS.timestamp(), ENDS.timestamp()])
def test_both_dates_belong_to_a_certificate(authenticator: Authenticator, now: float) -> None:
    assert identified(authenticator, None, PEM, now) == PROMETHEUS


def with_tokens(folder: Path) -> Authenticator:
    (folder / "jwks.json").write_bytes(jwks(jwk(rsa_key(), kid="a")))
    return Authenticator(Identities({DIGEST: ALICE}, {}, JwtSettings(ISSUER, AUDIENCE, folder / "jwks.json")))


def test_tokens_and_keys_side_by_side(tmp_path: Path) -> None:
    authenticator = with_tokens(tmp_path)
    assert identified(authenticator, f"Bearer {token()}").name == "jwt:alice"
    assert identified(authenticator, f"Bearer {KEY}") == ALICE
    assert refusal(authenticator, f"Bearer {token(exp=1)}") == "expired token"
    assert refusal(authenticator, f"Bearer {token(aud='other')}") == "token is not valid"
    assert refusal(authenticator, "Bearer x") == "unknown key"
    # Only the scheme for tokens takes them.
    assert refusal(authenticator, basic(f":{token()}")) == "unknown key"
    assert authenticator.refusals == {
        "no_identity": 0, "sent_twice": 0, "unknown_key": 2, "expired_token": 1, "invalid_token": 1,
        "unknown_certificate": 0, "expired_certificate": 0,
    }  # fmt: skip  # several entries a line


def test_reasons_are_bounded(authenticator: Authenticator) -> None:
    for number in range(50):
        refusal(authenticator, f"Bearer {number}")
        refusal(authenticator, None, b"%d" % number)
    assert set(authenticator.refusals) == {str(reason) for reason in RefusalReason}


def test_replaced_identities_count_from_the_next_call(authenticator: Authenticator) -> None:
    authenticator.replace(Identities({}, {"CN=prometheus": ALICE}))
    assert refusal(authenticator, f"Bearer {KEY}") == "unknown key"
    assert identified(authenticator, None, PEM) == ALICE


def test_a_call_goes_on_with_the_identities_that_it_began_with(tmp_path: Path) -> None:
    """Another thread replaces them at any moment, here when the header is looked at."""
    authenticator = with_tokens(tmp_path)

    class Header(str):
        def strip(self, chars: str | None = None, /) -> str:
            authenticator.replace(Identities({}, {}))
            return super().strip(chars)

    assert identified(authenticator, Header(f"Bearer {token()}")).name == "jwt:alice"
    assert refusal(authenticator, f"Bearer {token()}") == "unknown key"


def test_an_issuer_that_stays_keeps_its_keys_and_another_one_begins_anew(tmp_path: Path) -> None:
    authenticator = with_tokens(tmp_path)
    text = f"Bearer {token()}"
    identified(authenticator, text)
    (tmp_path / "jwks.json").unlink()
    settings = JwtSettings(ISSUER, AUDIENCE, tmp_path / "jwks.json")
    authenticator.replace(Identities({}, {}, settings))
    # The last good set is still there, and the attempt to read it again is counted.
    assert identified(authenticator, text).name == "jwt:alice"
    assert authenticator.refresh_failures == 1
    authenticator.replace(Identities({}, {}, JwtSettings(ISSUER, "other", tmp_path / "jwks.json")))
    assert refusal(authenticator, text) == "token is not valid"
    assert authenticator.refresh_failures == 2
    authenticator.replace(FILE)
    assert refusal(authenticator, text) == "unknown key"
    assert authenticator.refresh_failures == 2


HEADERS = st.one_of(
    st.none(),
    st.text(),
    st.builds("{} {}".format, st.sampled_from(["Bearer", "basic", "BASIC", "x"]), st.text()),
    st.builds("Bearer {}.{}.{}".format, *[st.binary().map(lambda raw: base64.urlsafe_b64encode(raw).decode())] * 3),
    st.builds(
        lambda header, rest: f"Bearer {base64.urlsafe_b64encode(header.encode()).decode().rstrip('=')}.{rest}",
        st.recursive(
            st.sampled_from(['"a"', "1", "null", "NaN"]), lambda inner: st.builds('{{"kid":{}}}'.format, inner)
        ),
        st.sampled_from(["e30.AA", "e30.", ".", "W10.AA"]),
    ),
    st.binary().map(basic),
)


@given(header=HEADERS, pem=st.one_of(st.none(), st.binary(), st.binary().map(lambda raw: PEM[:40] + raw + PEM[-30:])))
@settings(max_examples=300, deadline=None)
def test_random_input_raises_nothing_but_unauthenticated(
    tmp_path_factory: pytest.TempPathFactory, header: str | None, pem: bytes | None
) -> None:
    authenticator = with_tokens(tmp_path_factory.getbasetemp())
    with pytest.raises(Unauthenticated):
        identified(authenticator, header, pem)
