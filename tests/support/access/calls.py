"""Calls of gRPC and HTTP requests as the gate sees them."""

from __future__ import annotations

import ssl
from typing import Any
from unittest.mock import Mock

from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

PEER = "ipv4:10.0.0.1:5"


class Call:
    """The context of a call, with this metadata, over a connection with this certificate."""

    def __init__(self, *metadata: tuple[str, str | bytes], pem: bytes | None = None) -> None:
        self._metadata, self._pem = metadata, pem

    def invocation_metadata(self) -> Any:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {} if self._pem is None else {"x509_pem_cert": [self._pem]}

    def peer(self) -> str:
        return PEER


def bearer(key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}")


def http_request(
    method: str, path: str, *headers: tuple[str, str], canonical: str | None = "", pem: bytes | None = None
) -> web.Request:
    """A request for the route with this canonical form, the path unless it is given; None: for no route."""
    connection = Mock()
    connection.getpeercert.return_value = ssl.PEM_cert_to_DER_cert(pem.decode()) if pem is not None else None
    transport: Any = Mock()
    transport.get_extra_info.side_effect = lambda name, default=None: connection if name == "ssl_object" else default
    request: Any = make_mocked_request(method, path, CIMultiDict(headers), transport=transport)
    resource = Mock(canonical=canonical or path) if canonical is not None else None
    request._match_info = Mock(route=Mock(resource=resource))
    found: web.Request = request
    return found
