"""The addresses of a stack: ports, and Unix sockets of executors."""

from __future__ import annotations

import re
import socket
import tempfile
from pathlib import Path

import pytest
from support.clients.held_port import held_port, hold
from support.clients.stand_ins import config

from pagekv.client.launcher.errors import StackError
from pagekv.client.launcher.gateway import GatewayConfig
from pagekv.client.launcher.stack import Stack


def test_a_taken_port_is_a_clear_error(journal: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StackError, match=rf"port {port} of 127.0.0.1 cannot be used .*--executor-port 0"):
            Stack(config(journal, executor_port=port))
    with held_port() as port, pytest.raises(StackError, match="two processes cannot use the same port"):
        Stack(config(journal, port=port, executor_port=port))


def test_ports_are_of_the_stack_before_its_processes_listen(journal: Path) -> None:
    """A process that asks for any port is given none of them."""
    with Stack(config(journal, executor_port=0)) as stack:
        for target in (stack.target, stack.executor_targets[0]):
            host, _, port = target.rpartition(":")
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((host, int(port)))
        stack.start()
        assert stack.wait_ready(120)


def test_executors_listen_at_sockets_that_only_this_user_can_open(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short, and not that of the tests.
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    with Stack(config(journal, replicas=2)) as stack:
        stack.start()
        assert stack.wait_ready(120)
        paths = [Path(target.removeprefix("unix:")) for target in stack.executor_targets]
        assert len(set(paths)) == 2
        for path in paths:
            assert path.is_socket()
            assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not paths[0].parent.exists()


@pytest.mark.parametrize("name", ["é" * 50, "a,b", "a#b", "a%20b"])
def test_where_a_folder_cannot_have_sockets_executors_have_ports(
    journal: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A path that is too long, and characters that gRPC takes for something else."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, name)
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with Stack(config(journal)) as stack:
            (target,) = stack.executor_targets
            assert re.fullmatch(r"127\.0\.0\.1:\d+", target)
            stack.start()
            assert stack.wait_ready(120)


def test_where_there_is_no_port_either_nothing_is_left(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, "a,b")
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        stack = Stack(config(journal))

        def taken(*_: object) -> str:
            raise StackError("no port")

        monkeypatch.setattr(stack._ports, "target", taken)
        with pytest.raises(StackError, match="no port"), stack:
            pass
        assert list(folder.iterdir()) == []
    # Nothing keeps the port that was chosen.
    Stack(config(journal, port=int(stack.target.rpartition(":")[2])))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_a_stack_may_serve_an_address_of_ipv6(journal: Path) -> None:
    with Stack(config(journal, host="[::1]")) as stack:
        assert stack.target.startswith("[::1]:")
        stack.start()
        assert stack.wait_ready(120)


def test_a_host_is_that_of_what_clients_connect_to(journal: Path) -> None:
    """An executor can be taken from its manager by anybody who reaches it, and only the manager has to."""
    gateway = GatewayConfig(port=0, command=["smg"])
    stack = Stack(config(journal, host="0.0.0.0", executor_port=0, replicas=2, gateway=gateway))
    outer, inner = [*stack.targets, stack.gateway_target], [*stack.executor_targets, stack.gateway_metrics_target]
    assert {address.rpartition(":")[0] for address in outer} == {"0.0.0.0"}
    assert {address.rpartition(":")[0] for address in inner} == {"127.0.0.1"}
    assert len({address.rpartition(":")[2] for address in outer + inner}) == 6


def test_each_manager_publishes_at_an_address_of_its_own_and_says_so(journal: Path) -> None:
    events = ["--kv-events", "--kv-events-endpoint", f"ipc://{journal}-events"]
    with Stack(config(journal, replicas=2, manager_args=events)) as stack:
        stack.start()
        assert stack.wait_ready(120)
        assert [at["endpoint"] for at in stack.listening("kv_events")] == [
            f"ipc://{journal}-events", f"ipc://{journal}-events-2",
        ]  # fmt: skip  # laid out as a table
        assert stack.listening("recordings") == []


def test_ports_that_run_out_are_refused_with_the_flag(journal: Path) -> None:
    events = ["--kv-events", "--kv-events-endpoint=tcp://127.0.0.1:65535"]
    with pytest.raises(StackError, match=r"--kv-events-endpoint tcp://127\.0\.0\.1:65535: leaves no port for pair 2"):
        Stack(config(journal, replicas=2, manager_args=events))


@pytest.mark.parametrize("flag", ["--kv-events-endpoint", "--kv-events-replay-endpoint"])
def test_an_event_port_that_is_taken_is_refused_with_the_flag(journal: Path, flag: str) -> None:
    # A free port for the other socket, whose default may be taken on this machine.
    free = ["--kv-events-endpoint=tcp://127.0.0.1:0", "--kv-events-replay-endpoint=tcp://127.0.0.1:0"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        given = ["--kv-events", *free, f"{flag}={endpoint}"]
        words = f"^{flag} {endpoint}: this port cannot be used; choose another, or 0 for a free one$"
        with pytest.raises(StackError, match=words):
            Stack(config(journal, manager_args=given))
        # Without events nothing listens there.
        Stack(config(journal, manager_args=[*given, "--no-kv-events"]))


def test_the_page_has_the_port_asked_for_or_a_free_one_where_that_is_taken(journal: Path) -> None:
    with held_port() as port:
        with hold(port) as taken:
            taken.listen()
            with Stack(config(journal, page_port=port, replicas=2)) as stack:
                stack.start()
                assert stack.wait_ready(120)
                assert stack.page_moved
                # The stand-in says the 0 that it was told, a manager the port that it took.
                assert stack.listening("http") == ["127.0.0.1:0"] * 2
        with Stack(config(journal, page_port=port)) as again:
            again.start()
            assert again.wait_ready(120)
            assert (again.listening("http"), again.page_moved) == ([f"127.0.0.1:{port}"], False)
