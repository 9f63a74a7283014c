"""Ports that are free when they are chosen, and nobody's else from then on."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from pagekv.client.launcher.errors import StackError
from pagekv.client.launcher.held_ports import HeldPorts


def port_of(target: str) -> int:
    return int(target.rpartition(":")[2])


def test_a_port_is_held_until_the_end() -> None:
    ports = HeldPorts()
    port = port_of(ports.target("127.0.0.1", 0, "--port"))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(StackError, match=f"^--port {port}: two processes cannot use the same port; --port 0"):
        ports.target("127.0.0.1", port, "--port")
    ports.close()
    ports.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_no_port_is_given_twice_though_it_is_free_at_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    bind, wanted = socket.socket.bind, [0]

    def again(probe: socket.socket, address: tuple[str, int]) -> None:
        # The first port that Linux gives at one host is what it gives at the other, once.
        if address[0] == "127.0.0.1" and wanted[0]:
            address, wanted[0] = (address[0], wanted[0]), 0
        bind(probe, address)
        if address[0] == "127.0.0.2":
            wanted[0] = probe.getsockname()[1]

    monkeypatch.setattr(socket.socket, "bind", again)
    ports = HeldPorts()
    first = ports.target("127.0.0.2", 0, "--port")
    assert port_of(ports.target("127.0.0.1", 0, "--executor-port")) != port_of(first)
    assert wanted == [0]
    ports.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_of_this_machine_is_not_told_as_a_taken_port(host: str) -> None:
    with pytest.raises(StackError, match=rf"^--host {host}: this machine cannot listen there \("):
        HeldPorts().target(host, 0, "--port")


def test_endpoints_of_tcp_are_held_and_others_are_not() -> None:
    ports = HeldPorts()
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StackError, match=rf"^--kv-events tcp://\*:{port}: this port cannot be used"):
            ports.hold({"kv-events": f"tcp://*:{port}"})
    ports.hold({"kv-events": f"tcp://*:{port}", "gateway-events": "ipc:///tmp/events", "none": ""})
    with pytest.raises(StackError, match="two processes cannot use the same port"):
        ports.target("127.0.0.1", port, "--port")
    ports.close()


def test_a_privileged_port_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, to whom no port is refused."""

    def refuse(probe: socket.socket, address: tuple[str, int]) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    words = "^port 80 of 127.0.0.1 cannot be used .Permission denied.: it is for privileged users. Choose another"
    with pytest.raises(StackError, match=words):
        HeldPorts().target("127.0.0.1", 80, "--port")
