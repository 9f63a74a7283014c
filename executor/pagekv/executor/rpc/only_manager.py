"""With mutual TLS, the executor serves only the manager that --manager-name names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pagekv.common import health
from pagekv.common.errors import PermissionDenied
from pagekv.common.server import Admit


def only_manager(name: str) -> Admit:
    """Admits calls of peers whose certificate has the name `name`; health calls of every peer with a certificate."""
    health_calls = f"/{health.SERVICE_NAME}/"

    async def admit(method: str, context: Any) -> None:
        if method.startswith(health_calls):
            return
        if name not in peer_names(context.auth_context()):
            words = "this executor serves only its manager (--manager-name), and your certificate has another name"
            raise PermissionDenied(words)

    return admit


def peer_names(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[str]:
    """The names in a gRPC peer's certificate: the subject's common name and all alternative names. Empty without a
    certificate.
    """
    keys = ("x509_common_name", "x509_subject_alternative_name")
    return frozenset(name.decode(errors="replace") for key in keys for name in auth_context.get(key, ()))
