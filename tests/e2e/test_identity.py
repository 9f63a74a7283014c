"""Nobody gets in who does not belong: mutual TLS on every port, identities and roles, over both processes."""

from __future__ import annotations

import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.certificates import Authority, Pair, client_credentials
from support.clients.protected_stack import (
    KEYS,
    ROLES,
    ProtectedStack,
    key_section,
    protected_stack,
    tls_flags,
    write_identities,
)
from support.clients.stack import MANAGER, ORACLE, Process, running_executor, running_manager
from support.json_lines import json_lines
from support.prompts import as_prompt
from support.waiting import wait_until

from pagekv.steps.v1 import executor_service_pb2 as steps_pb
from pagekv.steps.v1 import executor_service_pb2_grpc as steps_grpc
from pagekv.v1 import (
    cache_service_pb2,
    inference_service_pb2,
    inference_service_pb2_grpc,
    operator_service_pb2,
    operator_service_pb2_grpc,
)
from pagekv.v1 import inference_service_pb2 as pb

REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
SERVICES = (inference_service_pb2, cache_service_pb2, operator_service_pb2)
# Methods by the role that they need, as their callers are told in docs/deployment.md.
NEEDS = {
    "generate": ("Generate", "Abort", "Tokenize", "Detokenize", "GetModelInfo", "LookupPrefix", "ExplainPrefix"),
    "observe": ("GetStats",),
    "operate": (
        "PinPrefix", "ListPins", "UnpinPrefix", "ListRequests", "GetBlockTable", "ListBlocks", "ResetPrefixCache",
        "WatchEvents", "ListTenants",
    ),
}  # fmt: skip  # several names a line
ROLE_OF = {name: role for role, names in NEEDS.items() for name in names}


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProtectedStack]:
    folder = tmp_path_factory.mktemp("protected")
    with protected_stack(
        folder, manager_args=["--http-listen=127.0.0.1:0", f"--audit-log={folder / 'audit.jsonl'}"]
    ) as stack:
        yield stack


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def methods() -> list[str]:
    """Full names of all methods of the client-facing services."""
    services = [service for module in SERVICES for service in module.DESCRIPTOR.services_by_name.values()]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


def status_of(channel: grpc.Channel, method: str, metadata: tuple[tuple[str, str], ...] = ()) -> str:
    """The status of a call with an empty request; OK as soon as anything is answered."""
    # Any: without a serializer the stubs know no type of request.
    begin: Any = channel.unary_stream(method)
    call = begin(b"", timeout=30, metadata=metadata)
    try:
        next(iter(call), None)
    except grpc.RpcError as error:
        return str(error.code().name)
    finally:
        call.cancel()
    return "OK"


def test_every_method_refuses_callers_it_does_not_know_or_that_lack_the_role(protected: ProtectedStack) -> None:
    """With no identity, a wrong one, and each role."""
    assert {method.rpartition("/")[2] for method in methods()} == set(ROLE_OF)
    with protected.channel() as channel:
        for method in methods():
            needed = ROLE_OF[method.rpartition("/")[2]]
            assert status_of(channel, method) == "UNAUTHENTICATED", method
            assert status_of(channel, method, bearer("wrong-key")) == "UNAUTHENTICATED", method
            assert status_of(channel, method, (("authorization", "nonsense"),)) == "UNAUTHENTICATED", method
            for name, key in KEYS.items():
                status = status_of(channel, method, bearer(key))
                if needed in ROLES[name]:
                    assert status not in REFUSED, (method, name)
                else:
                    assert status == "PERMISSION_DENIED", (method, name)


def test_health_stays_open(protected: ProtectedStack) -> None:
    with protected.channel() as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_needs_some_identity(protected: ProtectedStack) -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    with protected.channel() as channel:
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream(method)(iter(()), timeout=30))
        assert refused.value.code().name == "UNAUTHENTICATED"
        assert list(channel.stream_stream(method)(iter(()), timeout=30, metadata=bearer(KEYS["meter"]))) == []


def test_the_words_of_a_refusal_say_what_to_do_and_nothing_of_others(protected: ProtectedStack) -> None:
    with protected.channel() as channel:
        stub = operator_service_pb2_grpc.OperatorServiceStub(channel)
        request = operator_service_pb2.GetStatsRequest()
        with pytest.raises(grpc.RpcError, match="certificate of CN=nobody is not in the identities file"):
            stub.GetStats(request)
        with pytest.raises(grpc.RpcError, match="needs the role observe; alice has generate"):
            stub.GetStats(request, metadata=bearer(KEYS["alice"]))


@contextmanager
def soon_expired(protected: ProtectedStack, name: str) -> Iterator[grpc.Channel]:
    """A connection with a certificate that expires within seconds, and had not when it was shown: on a busy machine
    with one of longer life.
    """
    seconds = 4
    while True:
        with protected.channel(protected.authority.pair(name, until=timedelta(seconds=seconds))) as channel:
            try:
                grpc.channel_ready_future(channel).result(seconds)
            except grpc.FutureTimeoutError:
                assert seconds < 100, "no connection with a certificate that is valid"
                seconds *= 3
            else:
                yield channel
                return


def test_a_certificate_that_is_an_identity_needs_no_key(protected: ProtectedStack) -> None:
    sections = [
        f'[certificates.{name}]\nsubject = "CN={name}"\nroles = ["observe"]\n' for name in ("prometheus", "late")
    ]
    write_identities(protected.identities, *sections)
    method = "/pagekv.v1.OperatorService/GetStats"
    with (
        soon_expired(protected, "late") as connected_before,
        protected.channel(protected.authority.pair("prometheus")) as channel,
    ):
        wait_until(lambda: status_of(channel, method) == "OK")
        assert status_of(channel, method, bearer("wrong-key")) == "UNAUTHENTICATED"
        assert status_of(channel, "/pagekv.v1.OperatorService/ListBlocks") == "PERMISSION_DENIED"
        # A connection outlives its certificate; what is asked over it then is refused.
        wait_until(lambda: status_of(connected_before, method) == "UNAUTHENTICATED")
    write_identities(protected.identities)


# -- HTTP


def get(protected: ProtectedStack, path: str, *headers: tuple[str, str], pair: Pair | None = None) -> tuple[int, str]:
    """Status and text of an HTTPS request."""
    context = ssl.create_default_context(cafile=protected.authority.ca)
    shown = pair or protected.client_pair
    context.load_cert_chain(shown.cert, shown.key)
    request = urllib.request.Request(f"https://{protected.stack.manager.http}{path}", headers=dict(headers))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        # A browser asks its user then.
        asks = (error.headers["WWW-Authenticate"] or "").startswith("Basic ")
        return (error.code if asks == (error.code == 401) else 0), error.read().decode()


def test_http_asks_for_an_identity_too(protected: ProtectedStack) -> None:
    pages = ("/", "/page/main.js", "/api/requests", "/api/request?id=x", "/api/block/0", "/nothing")
    for path in ("/metrics", *pages):
        assert get(protected, path)[0] == 401, path
        assert get(protected, path, ("Authorization", "Bearer wrong-key"))[0] == 401, path
    for name, roles in ROLES.items():
        key = ("Authorization", f"Bearer {KEYS[name]}")
        assert get(protected, "/metrics", key)[0] == (200 if "observe" in roles else 403)
        for path in pages[:-1]:
            assert (get(protected, path, key)[0] == 403) == ("operate" not in roles), (path, name)
    # As a browser sends what its user typed: olga:olga-key.
    assert get(protected, "/", ("Authorization", "Basic b2xnYTpvbGdhLWtleQ=="))[0] == 200
    assert get(protected, "/health")[0] == 200
    assert get(protected, "/ready") == (200, "ready\n")


def test_refusals_are_counted_and_written_down(protected: ProtectedStack) -> None:
    with protected.channel() as channel:
        status_of(channel, "/pagekv.v1.OperatorService/ResetPrefixCache", bearer(KEYS["alice"]))
        status_of(channel, "/pagekv.v1.OperatorService/ResetPrefixCache", bearer(KEYS["olga"]))
    _, metrics = get(protected, "/metrics", ("Authorization", f"Bearer {KEYS['meter']}"))
    assert "pagekv_refused_calls_total{reason=" in metrics
    assert 'pagekv_files_refused{files="identities"} 0.0' in metrics
    assert "pagekv_certificate_end_seconds" in metrics
    log = protected.folder / "audit.jsonl"

    def resets() -> set[tuple[str, str]]:
        lines = [line for line in json_lines(log) if line["call"].endswith("/ResetPrefixCache")]
        return {(line["event"], line["identity"]) for line in lines}

    # A thread writes them.
    wait_until(lambda: {("refused", "alice"), ("called", "olga")} <= resets())
    assert not any(key in log.read_text() for key in KEYS.values())


# -- requests of others


def test_a_request_is_aborted_by_its_caller_or_an_operator_alone(tmp_path: Path) -> None:
    slow = [*ORACLE, "--step-time-ms", "50"]
    with protected_stack(tmp_path, slow) as protected, protected.channel() as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)

        def abort(name: str, request_id: str) -> list[str]:
            request = pb.AbortRequest(request_ids=[request_id])
            return list(stub.Abort(request, metadata=bearer(KEYS[name])).aborted_request_ids)

        for request_id, stranger, entitled in (("one", "bob", "alice"), ("two", "bob", "olga")):
            request = pb.GenerateRequest(request_id=request_id, prompt=as_prompt("In the beginning"))
            request.sampling_params.max_tokens = 400
            request.sampling_params.ignore_eos = True
            stream = stub.Generate(request, metadata=bearer(KEYS["alice"]))
            next(stream)
            assert abort(stranger, request_id) == []
            assert abort(stranger, "no-such-request") == []
            next(stream)
            assert abort(entitled, request_id) == [request_id]
            assert [each.complete.finish_reason for each in stream if each.HasField("complete")] == [3]


# -- what changes while it serves


def test_keys_and_certificates_are_rotated_under_load_and_no_stream_breaks(tmp_path: Path) -> None:
    with protected_stack(tmp_path, [*ORACLE, "--step-time-ms", "20"]) as protected:
        results: list[int] = []
        stop = threading.Event()

        def generate() -> None:
            with protected.channel() as channel:
                stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
                while not stop.is_set():
                    request = pb.GenerateRequest(prompt=as_prompt("In the beginning"))
                    request.sampling_params.max_tokens = 40
                    request.sampling_params.ignore_eos = True
                    answers = list(stub.Generate(request, metadata=bearer(KEYS["alice"])))
                    results.append(answers[-1].complete.completion_tokens)

        threads = [threading.Thread(target=generate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for turn in range(3):
            done = len(results)
            # The same authority signs; files are replaced one after the other, as tools do.
            protected.authority.pair("pagekv-manager")
            protected.authority.pair("pagekv-executor")
            write_identities(protected.identities, key_section(f"new{turn}", f"new-key-{turn}", ["observe"]))
            method = "/pagekv.v1.OperatorService/GetStats"
            with protected.channel() as channel:
                wait_until(lambda: status_of(channel, method, bearer(f"new-key-{turn}")) == "OK")  # noqa: B023  # called here
                if turn:
                    assert status_of(channel, method, bearer(f"new-key-{turn - 1}")) == "UNAUTHENTICATED"
            wait_until(lambda: len(results) >= done + 8)  # noqa: B023  # called here
        # A file that cannot be read changes nothing, and that is told.
        protected.identities.write_text("[keys.alice]\nsha256 = 7\n")
        wait_until(lambda: "cannot be used; the earlier content stays in force" in protected.stack.manager.tail(400))
        done = len(results)
        wait_until(lambda: len(results) >= done + 8)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert set(results) == {40}
        assert protected.stack.manager.stop() == 0


# -- rivals


def test_a_rival_manager_gets_nothing_of_the_executor(protected: ProtectedStack) -> None:
    """With a certificate of the same authority for another name, with one of its own authority, and with none."""
    target = protected.stack.executor.target
    stranger = Authority(protected.folder, "rival").pair("pagekv-manager", file="rival-manager")
    statuses = []
    for pair in (protected.client_pair, stranger, None):
        with grpc.secure_channel(target, protected.credentials(pair)) as channel:
            stub = steps_grpc.ExecutorServiceStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.Attach(steps_pb.AttachRequest(manager_id="rival", take_over=True), timeout=30)
            statuses.append(refused.value.code().name)
    assert statuses == ["PERMISSION_DENIED", "UNAVAILABLE", "UNAVAILABLE"]
    with protected.channel() as channel:
        assert status_of(channel, "/pagekv.v1.InferenceService/GetModelInfo", bearer(KEYS["alice"])) == "OK"


def test_a_rival_executor_or_a_proxy_between_is_not_attached(tmp_path: Path) -> None:
    """Either has a certificate that the manager's authority did not sign."""
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "rival")
    false = theirs.pair("pagekv-executor")
    trusts_theirs = grpc.ssl_channel_credentials(theirs.ca.read_bytes(), false.key_pem, false.pem)
    manager_pair, identities = ours.pair("pagekv-manager"), tmp_path / "identities.toml"
    write_identities(identities)
    flags = [*tls_flags(manager_pair, ours.ca), f"--identities={identities}", f"--executor-ca={ours.ca}"]
    with running_executor([*ORACLE, *tls_flags(false, theirs.ca)], tmp_path, credentials=trusts_theirs) as executor:
        manager = Process(MANAGER, ["--executor", executor.target, *flags], tmp_path)
        manager.start()
        wait_until(lambda: "no executor" in manager.tail())
        assert "attached" not in manager.tail().replace("no executor is attached", "")
        assert manager.stop() == 0


def test_a_client_does_not_speak_to_a_manager_of_another_authority(protected: ProtectedStack) -> None:
    other = Authority(protected.folder, "other")
    with grpc.secure_channel(protected.stack.target, grpc.ssl_channel_credentials(other.ca.read_bytes())) as channel:
        assert status_of(channel, "/pagekv.v1.InferenceService/GetModelInfo", bearer(KEYS["alice"])) == "UNAVAILABLE"
    with grpc.insecure_channel(protected.stack.target) as channel:
        assert status_of(channel, "/pagekv.v1.InferenceService/GetModelInfo", bearer(KEYS["alice"])) == "UNAVAILABLE"


def test_tls_of_the_link_alone_needs_no_identities(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    executor_pair, manager_pair = authority.pair("pagekv-executor"), authority.pair("pagekv-manager")
    to_executor = grpc.ssl_channel_credentials(authority.ca.read_bytes(), manager_pair.key_pem, manager_pair.pem)
    to_manager = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    flags = [f"--tls-cert={manager_pair.cert}", f"--tls-key={manager_pair.key}", f"--executor-ca={authority.ca}"]
    with (
        running_executor(
            [*ORACLE, *tls_flags(executor_pair, authority.ca)], tmp_path, credentials=to_executor
        ) as executor,
        running_manager(executor, flags, credentials=to_manager) as stack,
        stack.manager.channel() as channel,
    ):
        assert status_of(channel, "/pagekv.v1.InferenceService/GetModelInfo") == "OK"


def test_the_link_has_a_certificate_of_its_own_where_clients_need_no_tls(tmp_path: Path) -> None:
    """As in compose.yaml: a gateway that speaks no TLS is in front of the manager, and the executor is elsewhere."""
    authority = Authority(tmp_path)
    executor_pair, manager_pair = authority.pair("pagekv-executor"), authority.pair("pagekv-manager")
    to_executor = client_credentials(authority.ca, authority.pair("pagekv-probe"))
    link = [f"--executor-cert={manager_pair.cert}", f"--executor-key={manager_pair.key}"]
    with (
        running_executor(
            [*ORACLE, *tls_flags(executor_pair, authority.ca)], tmp_path, credentials=to_executor
        ) as executor,
        running_manager(executor, [f"--executor-ca={authority.ca}", *link]) as stack,
        stack.manager.channel() as channel,
    ):
        assert status_of(channel, "/pagekv.v1.InferenceService/GetModelInfo") == "OK"
