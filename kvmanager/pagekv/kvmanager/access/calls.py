"""The table of calls and HTTP routes, and the role that each needs. A call that is not in the table is refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagekv.common.errors import PermissionDenied
from pagekv.kvmanager.access.identity import Identity, Role

_NAME_CHARACTERS = 256


def _methods(service: str, names: str, role: Role | None) -> dict[str, Role | None]:
    return {f"/{service}/{name}": role for name in names.split()}


SERVICES = tuple(f"pagekv.v1.{name}Service" for name in ("Inference", "Cache", "Operator"))
_INFERENCE, _CACHE, _OPERATOR = SERVICES
GATEWAY_SERVICE = "vllm.grpc.engine.VllmEngine"
_HEALTH = "grpc.health.v1.Health"

# Load balancers and orchestrators make these calls without an identity; the answers contain only a state.
OPEN_CALLS = frozenset(_methods(_HEALTH, "Check Watch List", None))

# None: every known caller may make the call.
ROLE_OF_CALL: Mapping[str, Role | None] = MappingProxyType(
    _methods(_INFERENCE, "Generate Abort Tokenize Detokenize GetModelInfo", Role.GENERATE)
    | _methods(_CACHE, "LookupPrefix ExplainPrefix", Role.GENERATE)
    | _methods(_CACHE, "PinPrefix ListPins UnpinPrefix", Role.OPERATE)
    | _methods(_OPERATOR, "GetStats", Role.OBSERVE)
    | _methods(
        _OPERATOR, "ListRequests GetBlockTable ListBlocks ResetPrefixCache WatchEvents ListTenants", Role.OPERATE
    )
    | _methods(
        GATEWAY_SERVICE, "HealthCheck GetModelInfo GetServerInfo GetTokenizer Generate Abort Embed", Role.GENERATE
    )
    | _methods(GATEWAY_SERVICE, "GetLoads", Role.OBSERVE)
    | _methods(GATEWAY_SERVICE, "FlushCache SubscribeKvEvents StartProfile StopProfile", Role.OPERATE)
    | _methods("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", None)
    | _methods("grpc.reflection.v1.ServerReflection", "ServerReflectionInfo", None)
)

# Operators may end other callers' requests, even without the role that lets them generate.
OPERATORS_TOO = frozenset((f"/{_INFERENCE}/Abort", f"/{GATEWAY_SERVICE}/Abort"))

# Routes are given by method and the canonical form of aiohttp's resource; all files below /page are one resource.
OPEN_ROUTES = frozenset({("GET", "/health"), ("GET", "/ready")})
ROLE_OF_ROUTE: Mapping[tuple[str, str], Role] = MappingProxyType(
    {
        ("GET", "/metrics"): Role.OBSERVE,
        ("GET", "/"): Role.OPERATE,
        ("GET", "/page"): Role.OPERATE,
        ("GET", "/api/stream"): Role.OPERATE,
        ("GET", "/api/block/{block_id}"): Role.OPERATE,
        ("GET", "/api/host-block/{block_id}"): Role.OPERATE,
        ("GET", "/api/requests"): Role.OPERATE,
        ("GET", "/api/request"): Role.OPERATE,
        ("GET", "/api/tenants"): Role.OPERATE,
        ("POST", "/api/explain"): Role.OPERATE,
    }
)


def check_call(identity: Identity, method: str) -> None:
    """Raises PermissionDenied unless the caller may make the call, `/package.Service/Method`. Not for OPEN_CALLS."""
    if method in OPERATORS_TOO and Role.OPERATE in identity.roles:
        return
    if method not in ROLE_OF_CALL:
        raise PermissionDenied(f"nobody may call {method[:_NAME_CHARACTERS]}")
    _check_role(identity, ROLE_OF_CALL[method])


def check_route(identity: Identity, method: str, pattern: str) -> None:
    """Raises PermissionDenied unless the caller may use the route; `pattern` is its resource's canonical form."""
    route = method, pattern
    if route not in ROLE_OF_ROUTE:
        raise PermissionDenied(f"nobody may ask for {' '.join(route)[:_NAME_CHARACTERS]}")
    _check_role(identity, ROLE_OF_ROUTE[route])


def _check_role(identity: Identity, role: Role | None) -> None:
    if role is not None and role not in identity.roles:
        held = ", ".join(sorted(identity.roles)) or "none"
        raise PermissionDenied(f"needs the role {role}; {identity.name} has {held}")
