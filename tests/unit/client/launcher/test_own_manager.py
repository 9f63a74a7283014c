"""A client of a manager that was started here takes nothing from the environment that is for others."""

from __future__ import annotations

import pytest
from support.clients.scripted_server import ScriptedServer

from pagekv.client.launcher.own_manager import client_of
from pagekv.v1 import operator_service_pb2 as operator_pb


def test_files_for_other_managers_are_no_matter(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKV_CA", "/nowhere")
    server.expect("GetStats", operator_pb.GetStatsResponse())
    with client_of(server.target) as client:
        client.stats()


def test_a_proxy_is_no_matter(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an address of every interface gRPC does not know that it is this machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server.expect("GetStats", operator_pb.GetStatsResponse())
    with client_of(server.target.replace("127.0.0.1", "0.0.0.0")) as client:
        client.stats()


def test_an_address_of_every_interface_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKV_API_KEY", "a-key")
    with client_of("0.0.0.0:1") as client:
        assert client.target == "0.0.0.0:1"
