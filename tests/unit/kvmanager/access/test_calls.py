"""The table of calls and routes: complete, and closed to what is not in it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, cast

import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from pagekv.common.errors import PermissionDenied
from pagekv.kvmanager.access.calls import (
    OPEN_CALLS,
    OPEN_ROUTES,
    OPERATORS_TOO,
    ROLE_OF_CALL,
    ROLE_OF_ROUTE,
    check_call,
    check_route,
)
from pagekv.kvmanager.access.identity import Identity, Role
from pagekv.kvmanager.observe.health_routes import health_routes
from pagekv.kvmanager.observe.metrics.prometheus import metrics_routes
from pagekv.kvmanager.page.routes import Page
from pagekv.v1 import cache_service_pb2, inference_service_pb2, operator_service_pb2

CONTRACT = (inference_service_pb2, cache_service_pb2, operator_service_pb2)
NOBODY, ALICE, PROMETHEUS, OLGA = (
    Identity("nobody", frozenset()),
    Identity("alice", frozenset({Role.GENERATE})),
    Identity("prometheus", frozenset({Role.OBSERVE})),
    Identity("olga", frozenset({Role.OPERATE})),
)


def methods(*modules: Any) -> set[str]:
    """Full names of the methods of all services in these files."""
    return {
        f"/{service.full_name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def served_methods() -> set[str]:
    gateway = importlib.import_module("smg_grpc_proto.generated.vllm_engine_pb2")
    # Reflection is also served by its newer name where there is a package of it.
    v1 = {name.replace("v1alpha", "v1") for name in methods(reflection_pb2)}
    return methods(*CONTRACT, gateway, health_pb2, reflection_pb2) | v1


def test_every_method_has_a_role_and_no_other_has_one() -> None:
    served = served_methods()
    assert len(served) > 30
    assert served == set(ROLE_OF_CALL) | OPEN_CALLS
    assert not set(ROLE_OF_CALL) & OPEN_CALLS
    assert set(ROLE_OF_CALL) >= OPERATORS_TOO


def test_the_contract_lies_in_the_files_that_are_walked() -> None:
    """A new file with a service in it has to be named here."""
    folder = importlib.import_module("pagekv.v1").__path__
    names = [each.name for each in pkgutil.iter_modules(folder) if each.name.endswith("_pb2")]
    modules = [importlib.import_module(f"pagekv.v1.{name}") for name in names]
    assert methods(*modules) == methods(*CONTRACT)


def registered() -> Iterator[tuple[str, str]]:
    """Method and canonical pattern of each route, as a request's own resource has them."""
    page = Page(cast(Any, None), cast(Any, None), cast(Any, None), show_text=False, reached={})
    app = web.Application()
    app.add_routes([*metrics_routes(cast(Any, NoMetrics())), *health_routes(str), *page.routes()])
    for route in app.router.routes():
        assert route.resource is not None
        yield route.method, route.resource.canonical


class NoMetrics:
    """A collector of nothing."""

    def collect(self) -> list[Any]:
        return []


def test_every_route_has_a_role_and_no_other_has_one() -> None:
    found = set(registered())
    assert ("HEAD", "/") in found
    assert {(method, path) for method, path in found if method != "HEAD"} == set(ROLE_OF_ROUTE) | OPEN_ROUTES
    for route in ROLE_OF_ROUTE:
        with pytest.raises(PermissionDenied):
            check_route(NOBODY, *route)
        check_route(Identity("root", frozenset(Role)), *route)


V1 = "/pagekv.v1."
ALLOWED = {
    ALICE: [
        *(f"{V1}InferenceService/{name}" for name in ("Generate", "Abort", "Tokenize", "Detokenize", "GetModelInfo")),
        *(f"{V1}CacheService/{name}" for name in ("LookupPrefix", "ExplainPrefix")),
        *(
            f"/vllm.grpc.engine.VllmEngine/{name}"
            for name in ("HealthCheck", "GetModelInfo", "GetServerInfo", "GetTokenizer", "Generate", "Abort", "Embed")
        ),
    ],
    PROMETHEUS: [f"{V1}OperatorService/GetStats", "/vllm.grpc.engine.VllmEngine/GetLoads"],
    NOBODY: [
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ],
}


def may(identity: Identity, method: str) -> bool:
    try:
        check_call(identity, method)
    except PermissionDenied:
        return False
    return True


@pytest.mark.parametrize("identity", [ALICE, PROMETHEUS])
def test_a_role_has_its_calls_and_no_others(identity: Identity) -> None:
    assert {method for method in served_methods() if may(identity, method)} == {
        *ALLOWED[identity],
        *ALLOWED[NOBODY],
    }


def test_everybody_who_is_known_may_ask_for_services_and_a_stranger_for_health() -> None:
    assert {f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch")} == OPEN_CALLS
    assert {method for method in served_methods() if may(NOBODY, method)} == set(ALLOWED[NOBODY])


def test_operators_have_the_rest_and_end_the_requests_of_others() -> None:
    found = {method for method in served_methods() if may(OLGA, method)}
    assert found == served_methods() - OPEN_CALLS - {*ALLOWED[ALICE], *ALLOWED[PROMETHEUS]} | OPERATORS_TOO
    assert found >= {f"{V1}OperatorService/WatchEvents", f"{V1}CacheService/PinPrefix"}


def test_a_refusal_says_what_is_needed_and_what_is_there() -> None:
    with pytest.raises(PermissionDenied, match=r"^needs the role operate; alice has generate$"):
        check_call(ALICE, f"{V1}OperatorService/ListRequests")
    with pytest.raises(PermissionDenied, match=r"^needs the role generate; nobody has none$"):
        check_call(NOBODY, f"{V1}InferenceService/Generate")
    both = Identity("both", frozenset({Role.OBSERVE, Role.GENERATE}))
    with pytest.raises(PermissionDenied, match=r"^needs the role operate; both has generate, observe$"):
        check_route(both, "GET", "/api/requests")


@pytest.mark.parametrize(
    "method",
    ["", "/", "/pagekv.v1.InferenceService/generate", "pagekv.v1.InferenceService/Generate", "/x/" + "y" * 999],
)
def test_unknown_methods_are_nobodys(method: str) -> None:
    with pytest.raises(PermissionDenied, match=r"^nobody may call") as caught:
        check_call(Identity("root", frozenset(Role)), method)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "route", [("POST", "/"), ("GET", "/api/explain"), ("HEAD", "/api/explain"), ("POST", "/health"), ("GET", "/x")]
)
def test_unknown_routes_are_nobodys(route: tuple[str, str]) -> None:
    with pytest.raises(PermissionDenied, match=r"^nobody may ask for"):
        check_route(Identity("root", frozenset(Role)), *route)
