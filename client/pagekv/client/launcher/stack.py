"""The server processes of one machine as children of this one: start, wait until ready, watch, stop."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import grpc

from pagekv.client.launcher.certificates import PROBE, StackCertificates, server_name
from pagekv.client.launcher.child import Child
from pagekv.client.launcher.child_flags import event_endpoints, flag_value, grace_s
from pagekv.client.launcher.errors import StackError
from pagekv.client.launcher.gateway import COMMAND, GatewayConfig, gateway_args, has_tokenizer, serves
from pagekv.client.launcher.held_ports import HeldPorts
from pagekv.client.launcher.own_folder import OwnFolder
from pagekv.common.probe import check

# -P in each command: a file of the working directory, such as torch.py, would otherwise replace the module of its name.
EXECUTOR_COMMAND = (sys.executable, "-P", "-m", "pagekv.executor")
# Stands before the command of the ranks, without its interpreter. torchrun gets SIGTERM when this process is gone, and
# ends its ranks.
TORCHRUN = (
    sys.executable, "-P", "-m", "pagekv.client.launcher.with_parent", "torch.distributed.run", "--standalone",
    "--max-restarts=1000000",
)  # fmt: skip  # as one would type it
MANAGER_COMMAND = (sys.executable, "-P", "-m", "pagekv.kvmanager")
# Address of the ports to which only processes of the stack connect: executors, and the gateway's own metrics.
LOOPBACK = "127.0.0.1"
# Characters of a path that mean something else to gRPC: it decodes %, ends a path at # and ?, and lists paths by comma.
_NOT_LITERAL = re.compile("[%#?,]")
_POLL_S = 0.1
# Seconds that the gateway gets to answer its last callers after the managers have ended.
_GATEWAY_LAST_S = 1.0


@dataclass(frozen=True, slots=True)
class StackConfig:
    """The processes to start, and their command-line arguments."""

    # A name or an address; an IPv6 address in brackets.
    host: str = "127.0.0.1"
    # Ports of the first pair; 0: free ports. All other pairs get free ports. Without a port for the executor, executors
    # listen at Unix sockets that only this user can open, where the folder for temporary files can have sockets.
    port: int = 50051
    executor_port: int | None = None
    # Pairs of an executor and a manager.
    replicas: int = 1
    # Ranks of each executor. torchrun starts them, and restarts them when one has ended.
    ranks: int = 1
    # None: no gateway in front.
    gateway: GatewayConfig | None = None
    # Port of the first manager's live page; a free port if it is 0 or taken. None: no page.
    page_port: int | None = None
    manager_args: Sequence[str] = ()
    executor_args: Sequence[str] = ()
    # None: nothing is encrypted.
    certificates: StackCertificates | None = None
    # Seconds that a process gets to stop by itself beyond its --grace-s.
    stop_timeout_s: float = 15.0
    manager_command: Sequence[str] = MANAGER_COMMAND
    executor_command: Sequence[str] = EXECUTOR_COMMAND
    # Called with (process name, line) from another thread; None keeps lines only for reports.
    on_log: Callable[[str, str], None] | None = None


class Stack:
    """Executors, their managers, and a gateway if one is configured. States: built → started → stopped. Leaving a
    `with` statement stops all of them.
    """

    def __init__(self, config: StackConfig) -> None:
        """Chooses the ports, but for those of executors that may get sockets. Raises StackError if a port is taken, a
        port file cannot be used, or the gateway is not installed.
        """
        self.config = config
        _check_port_files(config)
        if config.gateway is not None and config.gateway.command is COMMAND and find_spec("smg") is None:
            raise StackError("the gateway is not installed: pip install 'pagekv[gateway]'")
        self._ports = HeldPorts()
        target, inner = partial(self._ports.target, config.host), partial(self._ports.target, LOOPBACK)
        self.targets = [target(0 if pair else config.port, "--port") for pair in range(config.replicas)]
        # Of the first pair.
        self.target = self.targets[0]
        # Without a port they get their addresses with the folder for temporary files, inside `with`.
        self.executor_targets: list[str] = []
        if config.executor_port is not None:
            self.executor_targets = self._executor_ports(config.executor_port)
        # Addresses of the gateway and of its Prometheus metrics; empty without a gateway.
        self.gateway_target = self.gateway_metrics_target = ""
        if config.gateway is not None:
            self.gateway_target = target(config.gateway.port, "--gateway-port")
            self.gateway_metrics_target = inner(0, "--gateway-port")
        # Whether the first manager's page has another port, because the configured port is taken.
        self.page_moved = False
        if config.page_port is not None:
            try:
                target(config.page_port, "--http-port")
            except StackError:
                self.page_moved = True
        self._event_endpoints = event_endpoints(config.manager_args, os.environ, config.replicas)
        for endpoints in self._event_endpoints:
            self._ports.hold(endpoints)
        # For port files and Unix sockets; exists only inside `with`.
        self._folder: OwnFolder
        # In the order of starting.
        self.children: list[Child] = []
        # Names of processes whose death was reported.
        self._reported: set[str] = set()

    def __enter__(self) -> Self:
        try:
            self._folder = OwnFolder("pagekv-stack-")
        except OSError as error:
            self._ports.close()
            raise StackError(
                f"cannot make a folder for temporary files: {error.strerror}: free some space there, or set TMPDIR to "
                "another folder"
            ) from error
        if self.config.executor_port is None:
            try:
                self.executor_targets = self._executor_sockets()
            except StackError:
                self._folder.remove()
                self._ports.close()
                raise
        return self

    def _executor_ports(self, first: int) -> list[str]:
        """Addresses of the executors on loopback. Raises StackError if the port of the first one is taken."""
        return [
            self._ports.target(LOOPBACK, 0 if pair else first, "--executor-port")
            for pair in range(self.config.replicas)
        ]

    def _executor_sockets(self) -> list[str]:
        """Unix sockets of the executors, or free ports where the folder for temporary files cannot have sockets. On two
        cores of an Intel Xeon of family 6, model 207, one request alone had 1.1 times as many tokens per second through
        a socket as over TCP.
        """
        paths = [f"{self._folder.path}/executor-{pair + 1}.socket" for pair in range(self.config.replicas)]
        if not all(map(_can_be_socket, paths)):
            return self._executor_ports(0)
        return [f"unix:{path}" for path in paths]

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except BaseException:
            # Ctrl-C while stopping: nothing may be left running.
            self.kill()
            raise
        finally:
            self._folder.remove()
            self._ports.close()

    def start(self) -> None:
        """Starts all processes except the gateway; each manager waits for its executor by itself. Raises StackError."""
        config, certificates = self.config, self.config.certificates
        to_executor = [*(certificates.executor_args() if certificates else []), *config.executor_args]
        to_manager = [*(certificates.manager_args() if certificates else []), *config.manager_args]
        for pair, target in enumerate(self.executor_targets):
            self._spawn_server("executor", pair, target, self._executor_command(), to_executor)
        for pair, target in enumerate(self.targets):
            command = [*config.manager_command, "--executor", self.executor_targets[pair]]
            if config.page_port is not None:
                page_port = 0 if pair or self.page_moved else config.page_port
                command += ["--http-listen", f"{config.host}:{page_port}"]
            # The first manager has the addresses of its own flags.
            events = [
                f"--{name}={endpoint}" for name, endpoint in self._event_endpoints[pair].items() if pair and endpoint
            ]
            self._spawn_server("manager", pair, target, command, [*to_manager, *events])

    def _executor_command(self) -> Sequence[str]:
        command, ranks = self.config.executor_command, self.config.ranks
        if ranks == 1:
            return command
        # torchrun starts the interpreters itself, with its own environment.
        return (*TORCHRUN, f"--nproc-per-node={ranks}", *(word for word in command[1:] if word != "-P"))

    def _spawn_server(self, role: str, pair: int, target: str, command: Sequence[str], args: Sequence[str]) -> None:
        name = role if self.config.replicas == 1 else f"{role} {pair + 1}"
        port_file = Path(flag_value("port-file", args, {}) or self._folder.path / name)
        # A port file named by the user may be left from an earlier process.
        with suppress(OSError):
            port_file.unlink()
        command = [*command, "--listen", target, "--port-file", str(port_file), *args]
        ready = partial(_serves, target, role, self.config.certificates)
        self.children.append(Child(name, command, ready, port_file, self.config.on_log))

    def _start_gateway(self, config: GatewayConfig) -> None:
        # A manager with identities has a separate address for the gateway.
        managers = self.listening("gateway") or self.targets
        if not has_tokenizer(managers[0]):
            raise StackError("the gateway needs a tokenizer: serve a model that has one, or name one with --tokenizer")
        grace = self._grace_s("manager")
        args = gateway_args(config, self.gateway_target, self.gateway_metrics_target, managers, grace)
        ready = partial(serves, self.gateway_target, len(self.targets))
        no_file = self._folder.path / "gateway"
        self.children.append(Child("gateway", [*config.command, *args], ready, no_file, self.config.on_log))

    def wait_ready(
        self,
        timeout_s: float,
        pause: Callable[[float], object] = time.sleep,
        on_wait: Callable[[str, float], object] = lambda name, waited_s: None,
    ) -> bool:
        """Waits until all are healthy. Raises StackError on a death or the timeout.

        `pause` waits for a number of seconds; if it returns True, the wait ends and the result is False. `on_wait` gets
        the name of the process that is not ready and the seconds waited.
        """
        begun = time.monotonic()
        for child in self._in_order():
            while not child.ready():
                waited = time.monotonic() - begun
                self.check()
                if waited > timeout_s:
                    raise StackError(f"the {child.name} was not ready within {timeout_s:g} s{child.tail()}")
                on_wait(child.name, waited)
                if pause(_POLL_S):
                    return False
        return True

    def _in_order(self) -> Iterator[Child]:
        """Every process. The gateway, which asks the managers for their models, starts once the others are ready."""
        yield from [*self.children]
        if self.config.gateway is not None:
            self._start_gateway(self.config.gateway)
            yield self.children[-1]

    def check(self) -> None:
        """Raises StackError if a process has died, or if ranks cannot start: torchrun would restart them for ever."""
        for child in self.children:
            if child.popen.poll() is not None:
                raise child.death()
            if self.config.ranks > 1 and (reason := child.listening.get("cannot_start")):
                raise StackError(f"the {child.name} cannot start: {reason}")

    def new_deaths(self) -> list[str]:
        """Reports of the processes that died since the last call, in a ready stack whose other processes continue to
        serve.

        Raises StackError if no pair is left, or if the gateway has died. If no pair is left, the remaining processes
        are ended without waiting for streams, which nobody could finish.
        """
        dead = [child for child in self.children if child.popen.poll() is not None]
        found = [str(child.death()) for child in dead if child.name not in self._reported]
        self._reported.update(child.name for child in dead)
        lost = {child.name.partition(" ")[2] for child in dead if child.name != "gateway"}
        no_pair = len(lost) == self.config.replicas
        if no_pair or any(child.name == "gateway" for child in dead):
            for child in self.children if no_pair else ():
                child.leave()
            raise StackError("\n".join(found) or "the last pair has died")
        return found

    def stop(self) -> None:
        """Stops the gateway and the managers, then the executors; kills processes that do not stop in time. Idempotent.

        The gateway gets SIGTERM at the same time as the managers, and passes on the rest of their running streams. Once
        the managers have ended, nothing can be left in the gateway, so it need not wait for anything else.
        """
        for roles in (("manager", "gateway"), ("executor",)):
            for child in self._of(*roles):
                child.popen.terminate()
            for role in roles:
                left = _GATEWAY_LAST_S if role == "gateway" else self._grace_s(role) + self.config.stop_timeout_s
                deadline = time.monotonic() + left
                for child in self._of(role):
                    child.wait_until(deadline)

    def _grace_s(self, role: str) -> float:
        """Seconds that the managers or the executors may take to finish what they do."""
        args = self.config.manager_args if role == "manager" else self.config.executor_args
        return grace_s(role, args, os.environ)

    def _of(self, *roles: str) -> list[Child]:
        return [child for child in self.children if child.name.split()[0] in roles]

    def listening(self, key: str) -> list[Any]:
        """The values of this key in the port files of the managers that have it."""
        return [child.listening[key] for child in self._of("manager") if key in child.listening]

    def phases(self) -> list[tuple[str, str, int | None]]:
        """The current phase of the start of each process that has one: process, phase, and percent if it is counted."""
        found = [(child.name, child.listening.get("phase")) for child in self.children]
        return [(name, phase["name"], phase["percent"]) for name, phase in found if phase]

    def kill(self) -> None:
        """Kills all at once; may be called from a signal handler while `stop` waits."""
        for child in self.children:
            child.popen.kill()


def _can_be_socket(path: str) -> bool:
    """Whether gRPC can serve at a Unix socket with this path, where nothing is yet. The path may be too long, and not
    every file system has sockets.
    """
    if _NOT_LITERAL.search(path):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(path)
            os.unlink(path)
        except OSError:
            return False
    return True


def _check_port_files(config: StackConfig) -> None:
    """Raises StackError if several processes would write one port file, or if it is a directory."""
    flags = [flag_value("port-file", args, {}) for args in (config.executor_args, config.manager_args)]
    named = [os.path.abspath(path) for path in flags if path]
    for path in named:
        if (writers := named.count(path) * config.replicas) > 1:
            raise StackError(f"--port-file {path}: {writers} processes would write to it, and it is for one")
        if Path(path).is_dir():
            raise StackError(f"--port-file {path}: is a directory")


def _serves(target: str, role: str, certificates: StackCertificates | None) -> bool:
    """Whether the process serves. It is addressed by the name in its certificate, because its address may stand for all
    interfaces.
    """
    credentials, name = (certificates.credentials(PROBE), server_name(role)) if certificates else (None, "")
    try:
        return check(target, "", 1.0, credentials, name) == "SERVING"
    except grpc.RpcError:
        return False
