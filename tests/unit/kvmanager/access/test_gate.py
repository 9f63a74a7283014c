"""The gate: who is let in, as whom, and the record of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.access.calls import PEER, Call, bearer, http_request
from support.access.client_certificates import certificate
from support.clients.protected_stack import key_section, write_identities
from support.event_loop import in_event_loop, until

from pagekv.common.errors import (
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Overloaded,
    PageKVError,
    PermissionDenied,
    Unauthenticated,
)
from pagekv.kvmanager.access.audit_log import AuditLog
from pagekv.kvmanager.access.caller import caller
from pagekv.kvmanager.access.gate import Gate
from pagekv.kvmanager.access.identity import Identity, Role
from pagekv.kvmanager.access.toml_file import TomlFileError

GENERATE = "/pagekv.v1.InferenceService/Generate"
ABORT = "/pagekv.v1.InferenceService/Abort"
STATS = "/pagekv.v1.OperatorService/GetStats"
RESET = "/pagekv.v1.OperatorService/ResetPrefixCache"
HEALTH = "/grpc.health.v1.Health/Check"
PROMETHEUS = '[certificates.prometheus]\nsubject = "CN=prometheus"\nroles = ["observe"]\n'
GATE = key_section("gate", "gate-key", ["generate", "operate", "act-for"]) + 'act_for = ["team-a"]\n'


class Entrance:
    """A gate, and those that it lets in."""

    def __init__(self, folder: Path) -> None:
        self.path, self.audit = folder / "identities.toml", folder / "audit.jsonl"
        write_identities(self.path, PROMETHEUS, GATE)
        self.log = AuditLog(self.audit)
        self.gate = Gate(self.path, self.log)

    def let_in(self, *asked: tuple[str, Call] | web.Request) -> list[Identity | None]:
        """The callers of these, which one task answers, as that of an HTTP connection does."""

        async def answer() -> list[Identity | None]:
            found = []
            for each in asked:
                await (self.gate.admit_call(*each) if isinstance(each, tuple) else self.gate.admit_request(each))
                found.append(caller.get())
            return found

        return asyncio.run(answer())

    def call(self, method: str, *metadata: tuple[str, str | bytes], pem: bytes | None = None) -> Identity | None:
        return self.let_in((method, Call(*metadata, pem=pem)))[0]

    def name_of(self, method: str, *metadata: tuple[str, str | bytes], pem: bytes | None = None) -> str:
        found = self.call(method, *metadata, pem=pem)
        assert found is not None
        return found.name

    def recorded(self) -> list[dict[str, Any]]:
        self.log.close()
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@pytest.fixture
def entrance(tmp_path: Path) -> Entrance:
    return Entrance(tmp_path)


def test_a_key_or_a_certificate_lets_in(entrance: Entrance) -> None:
    assert entrance.name_of(GENERATE, bearer("alice-key")) == "alice"
    valid = certificate("CN=prometheus", *around_now())
    assert entrance.name_of(STATS, pem=valid) == "prometheus"
    # The key counts where there are both.
    assert entrance.name_of(STATS, bearer("meter-key"), pem=valid) == "meter"
    found = entrance.let_in(
        http_request("GET", "/metrics", bearer("meter-key")), http_request("GET", "/metrics", pem=valid)
    )
    assert [each.name for each in found if each is not None] == ["meter", "prometheus"]


def around_now() -> Sequence[Any]:
    now = datetime.now(UTC)
    return now - timedelta(hours=1), now + timedelta(hours=1)


@pytest.mark.parametrize("first", ["alice-key", "wrong-key"])
@pytest.mark.parametrize("second", ["alice-key", "olga-key"])
def test_an_authorization_that_is_sent_twice_is_refused(entrance: Entrance, first: str, second: str) -> None:
    """Also where it is the same one, or both are good."""
    words = r"^authorization was sent more than once: send one$"
    with pytest.raises(Unauthenticated, match=words):
        entrance.call(GENERATE, bearer(first), ("x", "y"), bearer(second))
    with pytest.raises(Unauthenticated, match=words):
        entrance.let_in(http_request("GET", "/metrics", bearer(first), ("AUTHORIZATION", f"Bearer {second}")))
    assert entrance.gate.refusals["sent_twice"] == 2
    assert {line["reason"] for line in entrance.recorded()} == {"authorization was sent more than once: send one"}


@pytest.mark.parametrize(
    ("method", "metadata", "words"),
    [
        (GENERATE, [], "no identity: send an API key in authorization, or a client certificate"),
        (GENERATE, [bearer("wrong-key")], "unknown key"),
        (GENERATE, [("authorization", b"Bearer alice-key")], "unknown key"),
        (RESET, [bearer("alice-key")], "needs the role operate; alice has generate"),
        ("/x/y", [bearer("olga-key")], "nobody may call /x/y"),
    ],
)
def test_a_refusal_is_raised_counted_and_recorded(
    entrance: Entrance, method: str, metadata: list[tuple[str, str | bytes]], words: str
) -> None:
    with pytest.raises((Unauthenticated, PermissionDenied), match=f"^{words}$"):
        entrance.call(method, *metadata)
    assert sum(entrance.gate.refusals.values()) == 1
    (line,) = entrance.recorded()
    assert (line["event"], line["peer"], line["call"], line["reason"]) == ("refused", PEER, method, words)
    assert "key" not in line["identity"]


def test_an_address_of_ipv6_is_recorded_without_escapes(entrance: Entrance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "peer", lambda self: "ipv6:%5B::1%5D:50051")

    async def answer() -> None:
        await entrance.gate.admit_call(RESET, Call(bearer("olga-key")))
        for error in (PermissionDenied("no"), Overloaded("the queue is full", 1.0)):
            entrance.gate.note_refusal(RESET, Call(), error)
        with pytest.raises(Unauthenticated):
            await entrance.gate.admit_call(RESET, Call())

    asyncio.run(answer())
    assert [line["peer"] for line in entrance.recorded()] == ["ipv6:[::1]:50051"] * 4


def test_a_refusal_leaves_no_caller(entrance: Entrance) -> None:
    async def answer() -> Identity | None:
        await entrance.gate.admit_call(GENERATE, Call(bearer("alice-key")))
        with pytest.raises(PageKVError):
            await entrance.gate.admit_call(RESET, Call(bearer("alice-key")))
        return caller.get()

    assert asyncio.run(answer()) is None


def test_the_caller_of_a_request_is_not_that_of_the_next_on_its_connection(entrance: Entrance) -> None:
    olga, nobody = entrance.let_in(http_request("GET", "/", bearer("olga-key")), http_request("GET", "/health"))
    assert olga is not None
    assert nobody is None
    assert entrance.let_in((GENERATE, Call(bearer("alice-key"))), (HEALTH, Call()))[1] is None


def test_health_is_open(entrance: Entrance) -> None:
    wrong = bearer("wrong-key")
    assert (
        entrance.let_in((HEALTH, Call(wrong)), http_request("GET", "/ready", wrong), http_request("HEAD", "/health"))
        == [None] * 3
    )
    assert entrance.recorded() == []


def test_what_operators_do_is_recorded_and_what_others_do_is_not(entrance: Entrance) -> None:
    for method in (RESET, STATS, ABORT, GENERATE):
        entrance.call(method, bearer("olga-key"))
    for method in (ABORT, GENERATE):
        entrance.call(method, bearer("alice-key"))
    entrance.let_in(
        http_request("GET", "/metrics", bearer("olga-key")),
        http_request("HEAD", "/page/x", bearer("olga-key"), canonical="/page"),
    )
    lines = entrance.recorded()
    # An operator's Abort may be of a request of others.
    assert [line["call"] for line in lines] == [RESET, ABORT, "GET /page"]
    assert {(line["event"], line["identity"]) for line in lines} == {("called", "olga")}


def test_a_gateway_calls_for_the_tenant_that_it_names(entrance: Entrance) -> None:
    gateway, named = bearer("gate-key"), ("pagekv-tenant", "team-a")
    own, other = entrance.let_in((GENERATE, Call(gateway)), (GENERATE, Call(gateway, named)))
    assert own is not None
    assert (own.name, own.tenant) == ("gate", "gate")
    assert other == replace(own, tenant="team-a", acting=True)
    (found,) = entrance.let_in(http_request("GET", "/api/requests", gateway, ("Pagekv-Tenant", "team-a")))
    assert found == other
    # An operator's call in the name of others says so.
    assert [line["reason"] for line in entrance.recorded()] == ["for the tenant team-a"]


@pytest.mark.parametrize(
    ("key", "named", "error", "words"),
    [
        ("alice-key", ["alice"], PermissionDenied, "pagekv-tenant needs the role act-for; alice has generate"),
        ("gate-key", ["team-b"], PermissionDenied, "gate may not act for the tenant team-b"),
        ("gate-key", ["team-a", "team-a"], InvalidRequest, "pagekv-tenant: must be sent once"),
        ("gate-key", ["a b"], InvalidRequest, "pagekv-tenant: must be 1 to 64 characters"),
        ("gate-key", [""], InvalidRequest, "pagekv-tenant: must be 1 to 64 characters"),
        ("wrong-key", ["team-a"], Unauthenticated, "unknown key"),
    ],
)
def test_a_tenant_that_may_not_be_named_is_refused(
    entrance: Entrance, key: str, named: list[str], error: type[PageKVError], words: str
) -> None:
    with pytest.raises(error, match=f"^{words}"):
        entrance.call(GENERATE, bearer(key), *(("pagekv-tenant", each) for each in named))
    counted = "unknown_key" if error is Unauthenticated else "wrong_tenant"
    assert {reason: count for reason, count in entrance.gate.refusals.items() if count} == {counted: 1}
    (line,) = entrance.recorded()
    assert line["event"] == "refused"


OF_GATEWAY = '[gateway]\nroles = ["generate"]\ntenant = "web"\n'


@pytest.fixture
def gateway(entrance: Entrance) -> Entrance:
    """The same entrance, with an identity for those who come through a gateway."""
    write_identities(entrance.path, GATE, OF_GATEWAY)
    entrance.gate._reload()
    return entrance


def test_whoever_shows_nothing_at_the_gateways_address_is_the_gateway(gateway: Entrance) -> None:
    async def answer() -> tuple[Identity | None, ...]:
        await gateway.gate.admit_gateway_call(GENERATE, Call())
        unnamed = caller.get()
        await gateway.gate.admit_gateway_call(GENERATE, Call(bearer("alice-key")))
        named = caller.get()
        await gateway.gate.admit_gateway_call(HEALTH, Call())
        return unnamed, named, caller.get()

    unnamed, named, nobody = asyncio.run(answer())
    assert unnamed == Identity("gateway", frozenset({Role.GENERATE}), "web")
    # A caller that shows something is that one.
    assert named is not None
    assert named.name == "alice"
    assert nobody is None


@pytest.mark.parametrize(
    ("method", "metadata", "words"),
    [
        (GENERATE, [bearer("wrong-key")], "unknown key"),
        (GENERATE, [("authorization", b"x")], "unknown key"),
        (GENERATE, [bearer("alice-key"), bearer("alice-key")], "authorization was sent more than once"),
        (RESET, [], "needs the role operate; gateway has generate"),
        (GENERATE, [("pagekv-tenant", "team-a")], "pagekv-tenant needs the role act-for; gateway has generate"),
    ],
)
def test_the_gateways_address_lets_in_nothing_else(
    gateway: Entrance, method: str, metadata: list[tuple[str, str | bytes]], words: str
) -> None:
    with pytest.raises((Unauthenticated, PermissionDenied), match=f"^{words}"):
        asyncio.run(gateway.gate.admit_gateway_call(method, Call(*metadata)))
    (line,) = gateway.recorded()
    assert (line["event"], line["call"]) == ("refused", method)


def test_the_gateway_has_no_identity_at_any_other_address(gateway: Entrance) -> None:
    with pytest.raises(Unauthenticated, match=r"^no identity"):
        gateway.call(GENERATE)
    with pytest.raises(Unauthenticated, match=r"^no identity"):
        gateway.let_in(http_request("GET", "/metrics"))


def test_a_gateway_that_leaves_the_file_is_nobody_from_then_on(gateway: Entrance) -> None:
    assert gateway.gate.authenticator.gateway is not None
    write_identities(gateway.path)
    gateway.gate._reload()
    assert gateway.gate.authenticator.gateway is None
    with pytest.raises(Unauthenticated, match=r"^no identity"):
        asyncio.run(gateway.gate.admit_gateway_call(GENERATE, Call()))


def test_health_asks_for_no_tenant(entrance: Entrance) -> None:
    assert entrance.call(HEALTH, ("pagekv-tenant", "team-a")) is None


def test_a_path_without_a_route_is_nobodys_and_short_in_the_record(entrance: Entrance) -> None:
    with pytest.raises(PermissionDenied):
        entrance.let_in(http_request("GET", "/" + "x" * 5000, bearer("olga-key"), canonical=None))
    with pytest.raises(Unauthenticated):
        entrance.let_in(http_request("GET", "/nothing", canonical=None))
    long, short = entrance.recorded()
    assert len(long["call"]) < 150
    assert short["call"] == "GET /nothing"


def test_without_an_audit_log_nothing_is_written(tmp_path: Path) -> None:
    write_identities(tmp_path / "identities.toml")
    gate = Gate(tmp_path / "identities.toml", None)
    with pytest.raises(Unauthenticated):
        asyncio.run(gate.admit_call(GENERATE, Call()))
    asyncio.run(gate.admit_call(RESET, Call(bearer("olga-key"))))
    assert [path.name for path in tmp_path.iterdir()] == ["identities.toml"]


@in_event_loop
async def test_the_file_is_read_again_as_a_whole_or_not_at_all(entrance: Entrance) -> None:
    watching = asyncio.create_task(entrance.gate.files.watch(0.02))
    write_identities(entrance.path, PROMETHEUS.replace("CN=prometheus", "CN=other"))
    await until_known(entrance, "CN=other", True)
    # A key that is good, behind a section that is not.
    entrance.path.write_text(entrance.path.read_text().replace("CN=other", "CN=third") + "[keys.x]\nsha256 = 5\n")
    await until(lambda: entrance.gate.files.are_refused)
    await until_known(entrance, "CN=other", True)
    await until_known(entrance, "CN=third", False)
    watching.cancel()


async def until_known(entrance: Entrance, subject: str, known: bool) -> None:
    """Returns once a certificate is let in, or is not."""
    pem, end = certificate(subject, *around_now()), time.monotonic() + 30
    while time.monotonic() < end:
        try:
            await entrance.gate.admit_call(STATS, Call(pem=pem))
            found = True
        except Unauthenticated:
            found = False
        if found == known:
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(subject)


def test_a_file_that_cannot_be_used_makes_no_gate(tmp_path: Path) -> None:
    with pytest.raises(TomlFileError, match=r"identities.toml: cannot be read"):
        Gate(tmp_path / "identities.toml", None)


def test_what_is_refused_behind_the_gate_is_recorded_too(entrance: Entrance) -> None:
    """A tenant that is not known, a limit; and nothing twice, nor what is no refusal."""

    async def answer() -> None:
        context = Call(bearer("alice-key"))
        await entrance.gate.admit_call(GENERATE, context)
        for error in (
            PermissionDenied("the tenant alice is not known"),
            LimitExceeded("max_blocks"),
            Overloaded("the queue is full", 1.0),
            NotFound("no such adapter"),
        ):
            entrance.gate.note_refusal(GENERATE, context, error)
        stranger = Call()
        with pytest.raises(Unauthenticated) as refused:
            await entrance.gate.admit_call(GENERATE, stranger)
        entrance.gate.note_refusal(GENERATE, stranger, refused.value)

    asyncio.run(answer())
    lines = [(line["event"], line["identity"], line["peer"], line["reason"]) for line in entrance.recorded()]
    assert lines == [
        ("refused", "alice", PEER, "the tenant alice is not known"),
        ("refused", "alice", PEER, "max_blocks"),
        ("refused", "alice", PEER, "the queue is full"),
        ("refused", "", PEER, "no identity: send an API key in authorization, or a client certificate"),
    ]
    counted = {reason: count for reason, count in entrance.gate.refusals.items() if count}
    assert counted == {"no_identity": 1, "not_allowed": 1}


def test_requests_that_are_refused_behind_the_gate_are_recorded_too(entrance: Entrance) -> None:
    async def answer() -> None:
        request = http_request("POST", "/api/explain", bearer("olga-key"))
        await entrance.gate.admit_request(request)
        for error in (
            PermissionDenied("the tenant olga is not known"),
            Overloaded("16 pages are open", 1.0),
            NotFound("no such adapter"),
        ):
            entrance.gate.note_refused_request(request, error)
        stranger = http_request("GET", "/", bearer("wrong-key"))
        with pytest.raises(Unauthenticated) as refused:
            await entrance.gate.admit_request(stranger)
        entrance.gate.note_refused_request(stranger, refused.value)

    asyncio.run(answer())
    lines = [(line["event"], line["identity"], line["call"], line["reason"]) for line in entrance.recorded()]
    assert lines == [
        ("called", "olga", "POST /api/explain", ""),
        ("refused", "olga", "POST /api/explain", "the tenant olga is not known"),
        ("refused", "olga", "POST /api/explain", "16 pages are open"),
        ("refused", "", "GET /", "unknown key"),
    ]
    counted = {reason: count for reason, count in entrance.gate.refusals.items() if count}
    assert counted == {"unknown_key": 1, "not_allowed": 1}
