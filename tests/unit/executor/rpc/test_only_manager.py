"""Connections that an executor serves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagekv.common.errors import PermissionDenied
from pagekv.executor.rpc.only_manager import only_manager, peer_names

ATTACH = "/pagekv.steps.v1.ExecutorService/Attach"


class Connection:
    """The context of a call over a connection whose peer has these names."""

    def __init__(self, **names: list[bytes]) -> None:
        self._names = names

    def auth_context(self) -> dict[str, Any]:
        return self._names


def admit(connection: Connection, method: str = ATTACH) -> None:
    async def ask() -> None:
        await only_manager("pagekv-manager")(method, connection)

    asyncio.run(ask())


@pytest.mark.parametrize(
    "names",
    [
        {"x509_common_name": [b"pagekv-manager"]},
        {"x509_common_name": [b"x"], "x509_subject_alternative_name": [b"localhost", b"pagekv-manager"]},
    ],
)
def test_the_manager_is_let_in_by_either_name(names: dict[str, list[bytes]]) -> None:
    admit(Connection(**names))


@pytest.mark.parametrize(
    "names",
    [
        {},
        {"x509_common_name": [b""]},
        {"x509_common_name": [b"pagekv-manager.evil.example"]},
        {"x509_common_name": [b"PageKV-Manager"]},
        {"x509_common_name": [b"pagekv-manager\x00.evil.example"]},
        {"x509_common_name": [b"\xff\xfe"], "x509_subject_alternative_name": [b"localhost"]},
        # Of the connection's other properties none is a name.
        {"x509_subject": [b"pagekv-manager"], "transport_security_type": [b"pagekv-manager"]},
    ],
)
@pytest.mark.parametrize("method", [ATTACH, "/pagekv.steps.v1.ExecutorService/Run", "/grpc.health.v1.Healthy/Check"])
def test_everybody_else_is_refused_in_words(names: dict[str, list[bytes]], method: str) -> None:
    with pytest.raises(PermissionDenied, match=r"serves only its manager \(--manager-name\)") as caught:
        admit(Connection(**names), method)
    # The name that would be let in is not told.
    assert "pagekv-manager" not in str(caught.value)


def test_health_is_open_to_all_that_have_a_certificate() -> None:
    """TLS has asked for one before any call."""
    admit(Connection(x509_common_name=[b"nobody"]), "/grpc.health.v1.Health/Check")


def test_names_are_the_common_one_and_the_alternatives() -> None:
    context = {"x509_common_name": (b"a",), "x509_subject_alternative_name": (b"b", b"\xe4"), "x509_subject": (b"c",)}
    assert peer_names(context) == {"a", "b", "\ufffd"}
    assert peer_names({}) == frozenset()
