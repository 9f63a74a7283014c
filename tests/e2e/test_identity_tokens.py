"""Tokens and tenants over both processes: every method and page refuses what is wrong, and nothing changes by it."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.access.issuer import AUDIENCE, ISSUER, claims, jwk, jwks, rsa_key, token
from support.clients.protected_stack import KEYS, ProtectedStack, key_section, protected_stack, write_identities
from support.clients.stack import ORACLE
from support.prompts import as_prompt
from support.waiting import wait_until

from pagekv.kvmanager.access.calls import ROLE_OF_CALL, ROLE_OF_ROUTE
from pagekv.kvmanager.access.identity import Role
from pagekv.kvmanager.access.refusals import WORDS
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb

HOUR = 3600
METHODS = [method for method in ROLE_OF_CALL if method.startswith("/pagekv.v1.")]
# A path of each route, by method.
ROUTES = {
    (method, pattern): pattern.replace("/page", "/page/main.js").replace("{block_id}", "0")
    for method, pattern in ROLE_OF_ROUTE
}
JWT = f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks = "jwks.json"\ntenant_claim = "org"\n'
PROMPT = "In the beginning there was the word, and it was long enough for some blocks of tokens"


def good(**changed: Any) -> str:
    """A token of a tenant; None leaves a claim out."""
    return token(**{"org": "team-a", "roles": [role.value for role in Role], **changed})


def unsigned() -> str:
    """A token that names no algorithm, with claims of an operator."""
    parts = ({"alg": "none", "typ": "JWT", "kid": "a"}, claims(org="team-a", roles=["operate", "observe", "generate"]))
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


def wrong() -> dict[str, str]:
    """Headers that let in nobody."""
    now = int(time.time())
    return {
        "wrong key": "Bearer wrong-key",
        "no scheme": KEYS["olga"],
        "unsigned": f"Bearer {unsigned()}",
        "another key": f"Bearer {good(key=rsa_key(number=1))}",
        "expired": f"Bearer {good(exp=now - HOUR)}",
        "issued by a clock an hour ahead": f"Bearer {good(iat=now + HOUR, exp=now + 2 * HOUR)}",
        "not valid for an hour": f"Bearer {good(nbf=now + HOUR, exp=now + 2 * HOUR)}",
        "for others": f"Bearer {good(aud='other')}",
        "without a tenant": f"Bearer {good(org=None)}",
    }


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProtectedStack]:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "jwks.json").write_bytes(jwks(jwk(rsa_key(), kid="a")))
    with protected_stack(folder, manager_args=["--http-listen=127.0.0.1:0"]) as stack:
        write_identities(stack.identities, JWT)
        with stack.channel() as channel:
            wait_until(lambda: called(channel, METHODS[0], f"Bearer {good()}")[0] != "UNAUTHENTICATED")
        yield stack


def called(channel: grpc.Channel, method: str, *authorization: str, body: bytes = b"") -> tuple[str, str]:
    """Status and words of a call; OK as soon as anything is answered."""
    # Any: without a serializer the stubs know no type of request.
    begin: Any = channel.unary_stream(method)
    call = begin(body, timeout=30, metadata=[("authorization", each) for each in authorization])
    try:
        next(iter(call), None)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    finally:
        call.cancel()
    return "OK", ""


def asked(protected: ProtectedStack, method: str, path: str, *authorization: str) -> tuple[int, dict[str, Any]]:
    """Status of an HTTPS request, and the JSON of a refusal."""
    context = ssl.create_default_context(cafile=protected.authority.ca)
    context.load_cert_chain(protected.client_pair.cert, protected.client_pair.key)
    connection = http.client.HTTPSConnection(protected.stack.manager.http, timeout=30, context=context)
    try:
        connection.putrequest(method, path)
        for each in authorization:
            connection.putheader("Authorization", each)
        connection.endheaders()
        answer = connection.getresponse()
        refused = answer.status in (401, 403)
        return answer.status, json.loads(answer.read()) if refused else {}
    finally:
        connection.close()


def state(channel: grpc.Channel) -> list[Any]:
    """All that a stranger could change: pins, requests and the table of blocks."""
    metadata = [("authorization", f"Bearer {KEYS['olga']}")]

    def get(method: str, request: Any, answer: Any) -> Any:
        call: Any = channel.unary_unary(method, type(request).SerializeToString, answer.FromString)
        return call(request, timeout=30, metadata=metadata)

    operator, cache = "/pagekv.v1.OperatorService", "/pagekv.v1.CacheService"
    lookup = cache_pb.LookupPrefixRequest(prompt=as_prompt(PROMPT))
    return [
        get(f"{cache}/ListPins", cache_pb.ListPinsRequest(), cache_pb.ListPinsResponse),
        get(f"{operator}/ListRequests", operator_pb.ListRequestsRequest(), operator_pb.ListRequestsResponse),
        get(f"{operator}/ListBlocks", operator_pb.ListBlocksRequest(), operator_pb.ListBlocksResponse),
        get(f"{cache}/LookupPrefix", lookup, cache_pb.LookupPrefixResponse),
    ]


def test_what_lets_in_nobody_changes_nothing_and_learns_nothing(protected: ProtectedStack) -> None:
    """Of every method and every route, with no header and with each that is wrong."""
    olga = f"Bearer {KEYS['olga']}"
    generate = pb.GenerateRequest(prompt=as_prompt(PROMPT))
    generate.sampling_params.max_tokens = 4
    pin = cache_pb.PinPrefixRequest(prompt=as_prompt(PROMPT), lease_seconds=600)
    with protected.channel() as channel:
        stream: Any = channel.unary_stream("/pagekv.v1.InferenceService/Generate")
        list(stream(generate.SerializeToString(), timeout=30, metadata=[("authorization", olga)]))
        assert called(channel, "/pagekv.v1.CacheService/PinPrefix", olga, body=pin.SerializeToString())[0] == "OK"
        before = state(channel)
        bodies = {
            "/pagekv.v1.InferenceService/Generate": generate.SerializeToString(),
            "/pagekv.v1.CacheService/UnpinPrefix": cache_pb.UnpinPrefixRequest(
                pin_id=before[0].pins[0].pin_id
            ).SerializeToString(),
        }
        headers = [(), *((header,) for header in wrong().values()), (olga, olga), (olga, "Bearer wrong-key")]
        for shown in headers:
            for method in METHODS:
                status, words = called(channel, method, *shown, body=bodies.get(method, b""))
                assert (status, words in allowed()) == ("UNAUTHENTICATED", True), (method, shown, words)
            for (verb, _), path in ROUTES.items():
                code, answer = asked(protected, verb, path, *shown)
                assert code == 401, (path, shown)
                assert list(answer) == ["error"]
                assert answer["error"] in allowed()
        assert state(channel) == before


def allowed() -> set[str]:
    """The words of refusals, which tell nothing but what the caller has shown."""
    return {*WORDS.values(), "certificate of CN=nobody is not in the identities file"}


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.ACT_FOR])
def test_the_roles_of_a_token_are_those_of_its_claim(protected: ProtectedStack, role: Role) -> None:
    header = f"Bearer {good(roles=[role.value])}"
    with protected.channel() as channel:
        for method in METHODS:
            refused = called(channel, method, header)[0] == "PERMISSION_DENIED"
            aborts = method.endswith("/Abort") and role is Role.OPERATE
            assert refused == (ROLE_OF_CALL[method] is not role and not aborts), method
    for (verb, pattern), path in ROUTES.items():
        if path != "/api/stream":
            code = asked(protected, verb, path, header)[0]
            assert (code == 403) == (ROLE_OF_ROUTE[verb, pattern] is not role), path


# -- between client and manager


@pytest.mark.parametrize(("since", "until_"), [(1, 48), (-48, -1)], ids=["ahead", "behind"])
def test_a_certificate_of_a_clock_an_hour_off_makes_no_connection(
    protected: ProtectedStack, since: int, until_: int
) -> None:
    hours = [timedelta(hours=each) for each in (since, until_)]
    pair = protected.authority.pair("olga", file=f"off{since}", since=hours[0], until=hours[1])
    with protected.channel(pair) as channel:
        # Not even beside a good key.
        assert called(channel, METHODS[0], f"Bearer {KEYS['olga']}")[0] == "UNAVAILABLE"


@contextmanager
def relay(target: str) -> Iterator[tuple[int, bytearray]]:
    """A port that passes everything on, and all that it saw."""
    host, _, port = target.rpartition(":")
    seen = bytearray()
    opened: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                seen.extend(data)
                sink.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                opened.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pass_on, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], seen
    finally:
        for each in (listener, *opened):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_a_man_in_the_middle_sees_no_key_no_prompt_and_no_answer(protected: ProtectedStack) -> None:
    """One that passes everything on; with a certificate of his own no client speaks to him (test_identity.py)."""
    request = pb.TokenizeRequest(prompt=as_prompt("a secret that is nobody's business"))
    with relay(protected.stack.target) as (port, seen):
        credentials = protected.credentials(protected.client_pair)
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            method = "/pagekv.v1.InferenceService/Tokenize"
            assert called(channel, method, f"Bearer {KEYS['alice']}", body=request.SerializeToString())[0] == "OK"
    through = bytes(seen)
    assert len(through) > 1000
    assert b"secret" not in through
    assert b"Tokenize" not in through


# -- tenants


def test_requests_are_ended_by_their_tenant_and_by_a_gateway_that_names_it(tmp_path: Path) -> None:
    gateway = key_section("gate", "gate-key", ["generate", "act-for"]) + 'act_for = ["team-a", "bob"]\n'
    members = [key_section(name, f"{name}-key", ["generate"]) + 'tenant = "team-a"\n' for name in ("ann", "ben")]
    with protected_stack(tmp_path, [*ORACLE, "--step-time-ms", "50"]) as protected, protected.channel() as channel:
        write_identities(protected.identities, gateway, *members)
        wait_until(lambda: called(channel, METHODS[0], "Bearer gate-key")[0] != "UNAUTHENTICATED")

        def metadata(name: str, tenant: str) -> list[tuple[str, str]]:
            named = [("pagekv-tenant", tenant)] if tenant else []
            return [("authorization", f"Bearer {name}-key"), *named]

        def abort(request_id: str, name: str, tenant: str = "") -> list[str]:
            call: Any = channel.unary_unary(
                "/pagekv.v1.InferenceService/Abort", pb.AbortRequest.SerializeToString, pb.AbortResponse.FromString
            )
            answer = call(pb.AbortRequest(request_ids=[request_id]), metadata=metadata(name, tenant), timeout=30)
            return list(answer.aborted_request_ids)

        generate: Any = channel.unary_stream(
            "/pagekv.v1.InferenceService/Generate",
            pb.GenerateRequest.SerializeToString,
            pb.GenerateResponse.FromString,
        )
        for request_id, owner, entitled in (
            ("one", ("ann", ""), ("ben", "")),
            ("two", ("gate", "team-a"), ("ann", "")),
            ("three", ("ann", ""), ("gate", "team-a")),
        ):
            request = pb.GenerateRequest(request_id=request_id, prompt=as_prompt("In the beginning"))
            request.sampling_params.max_tokens = 400
            request.sampling_params.ignore_eos = True
            stream = generate(request, metadata=metadata(*owner))
            next(stream)
            for stranger in (("bob", ""), ("gate", ""), ("gate", "bob")):
                assert abort(request_id, *stranger) == [], stranger
            for code, name, tenant in (
                ("PERMISSION_DENIED", "bob", "team-a"),
                ("PERMISSION_DENIED", "gate", "team-b"),
                ("INVALID_ARGUMENT", "gate", "team a"),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    abort(request_id, name, tenant)
                assert refused.value.code().name == code
            next(stream)
            assert abort(request_id, *entitled) == [request_id]
            stream.cancel()
