"""The server processes of one machine as children of this one: start, wait until ready, watch, stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import grpc

from pagekv.client.launcher.gateway import COMMAND, GatewayConfig, gateway_args, has_tokenizer, is_installed, serves
from pagekv.client.launcher.kv_events import PUBLISH_FLAG, REPLAY_FLAG, KvEventEndpoints, endpoints_of_pairs, tcp_port
from pagekv.common.probe import check

EXECUTOR_COMMAND = (sys.executable, "-m", "pagekv.executor.server")
MANAGER_COMMAND = (sys.executable, "-m", "pagekv.kvmanager.server")
# What a manager logs about a file that it began, as text or as JSON (--log-format).
_RECORDING = re.compile(
    r'kvmanager: recording what=\w+ file=(?P<text>.+)|"message": "recording".* "file": (?P<json>.+)}'
)
# The last line of argparse's refusals, behind its usage.
_USAGE_ERROR = re.compile(r"^\S+: error: (?P<reason>.+)")
# Lines of each child's log that are kept for the report of its death.
KEPT_LINES = 40
_POLL_S = 0.1
# Seconds that the gateway gets to answer its last callers once the managers are gone.
_GATEWAY_LAST_S = 1.0


class StackError(Exception):
    """The processes could not be started or one of them died; the message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What to start. Arguments are those of the processes' own command lines."""

    host: str = "127.0.0.1"
    # 0 takes a free port. Of several pairs these are the first one's; the others take free ones.
    port: int = 50051
    executor_port: int = 50052
    # Pairs of an executor and a manager.
    replicas: int = 1
    # None: no gateway in front.
    gateway: GatewayConfig | None = None
    # Of the first manager's live page; where it is taken, as with 0, a free one is. None: no page.
    page_port: int | None = None
    manager_args: Sequence[str] = ()
    executor_args: Sequence[str] = ()
    # Seconds a process gets to stop by itself; its own --grace-s should be less.
    stop_timeout_s: float = 45.0
    manager_command: Sequence[str] = MANAGER_COMMAND
    executor_command: Sequence[str] = EXECUTOR_COMMAND
    # Called with (process name, line) from a thread of its own; None keeps lines only for reports.
    on_log: Callable[[str, str], None] | None = None


@dataclass(slots=True)
class Child:
    """One process and the end of its log. States: running → ended."""

    name: str
    target: str
    popen: subprocess.Popen[str]
    # Whether it serves now.
    ready: Callable[[], bool]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    reader: threading.Thread | None = None

    def report(self) -> str:
        """How it ended, and its last log lines."""
        status = self.popen.wait()
        if self.reader is not None:
            self.reader.join(timeout=2)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        wrong = _USAGE_ERROR.search(self.lines[-1]) if self.lines else None
        if status == 2 and wrong is not None:
            # What stands before it is the usage, which is longer than what is kept and names no cause.
            return f"the {self.name} refuses its command line: {wrong['reason']}"
        tail = "".join(f"\n  {line}" for line in self.lines)
        return f"the {self.name} {how}" + (f"; its last lines:{tail}" if tail else " and said nothing")


class Stack:
    """Executors, their managers, and a gateway if one is asked for. States: built → started → stopped. Leaving a `with`
    statement stops all of them.
    """

    def __init__(self, config: StackConfig) -> None:
        """Chooses the ports. Raises StackError when one is taken, or when what is asked for is not installed."""
        self._config = config
        if config.gateway is not None and config.gateway.command is COMMAND and not is_installed():
            raise StackError("the gateway is not installed: pip install 'pagekv[gateway]'")
        taken: set[int] = set()

        def target(port: int, flag: str) -> str:
            found = _usable_port(config.host, port, flag, taken)
            taken.add(found)
            return f"{config.host}:{found}"

        self.targets: list[str] = []
        self.executor_targets: list[str] = []
        for replica in range(config.replicas):
            self.targets.append(target(0 if replica else config.port, "--port"))
            self.executor_targets.append(target(0 if replica else config.executor_port, "--executor-port"))
        # Of the gateway, empty without one: where it serves, and where Prometheus reads it.
        self.gateway_target = self.gateway_metrics_target = ""
        if config.gateway is not None:
            self.gateway_target = target(config.gateway.port, "--gateway-port")
            self.gateway_metrics_target = target(0, "--gateway-port")
        # Addresses of the live pages, one a manager; and whether the first one is not where it should be.
        self.page_targets: list[str] = []
        self.page_moved = False
        if config.page_port is not None:
            try:
                self.page_targets.append(target(config.page_port, "--http-port"))
            except StackError:
                self.page_moved = True
                self.page_targets.append(target(0, "--http-port"))
            self.page_targets += [target(0, "--http-port") for _ in range(config.replicas - 1)]
        # Where the managers publish KV events; empty: they do not.
        try:
            endpoints = endpoints_of_pairs(config.manager_args, os.environ, config.replicas)
        except ValueError as error:
            raise StackError(str(error)) from error
        self.kv_events = [_with_usable_ports(endpoint, taken) for endpoint in endpoints]
        # In the order of starting.
        self.children: list[Child] = []
        # Names of those whose death was told.
        self._reported: set[str] = set()

    @property
    def target(self) -> str:
        """Address of the first manager."""
        return self.targets[0]

    @property
    def executor_target(self) -> str:
        """Address of its executor."""
        return self.executor_targets[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.stop()
        except BaseException:
            # Ctrl-C while stopping: nothing may be left running.
            self.kill()
            raise

    def start(self) -> None:
        """Starts all but the gateway; each manager waits for its executor by itself. Raises StackError."""
        listen, config = "--listen", self._config
        for number, target in enumerate(self.executor_targets):
            self._spawn(
                self._name("executor", number),
                target,
                [*config.executor_command, listen, target],
                config.executor_args,
                ready=partial(_serves, target),
            )
        for number, target in enumerate(self.targets):
            self._spawn(
                self._name("manager", number),
                target,
                [*config.manager_command, listen, target, "--executor", self.executor_targets[number]],
                [*self._page_args(number), *config.manager_args, *self._event_args(number)],
                ready=partial(_serves, target),
            )

    def _page_args(self, number: int) -> list[str]:
        return ["--http-listen", self.page_targets[number]] if self.page_targets else []

    def _event_args(self, number: int) -> list[str]:
        return self.kv_events[number].args() if self.kv_events else []

    def _name(self, role: str, number: int) -> str:
        return role if self._config.replicas == 1 else f"{role} {number + 1}"

    def _start_gateway(self, config: GatewayConfig) -> None:
        if not has_tokenizer(self.target):
            raise StackError("the gateway needs a tokenizer: serve a model that has one, or name one with --tokenizer")
        args = gateway_args(config, self.gateway_target, self.gateway_metrics_target, self.targets)
        ready = partial(serves, self.gateway_target, len(self.targets))
        self._spawn("gateway", self.gateway_target, config.command, args, ready=ready)

    def wait_ready(
        self, timeout_s: float, stop: threading.Event | None = None, on_wait: Callable[[str, float], None] | None = None
    ) -> bool:
        """Waits until all are healthy. False when `stop` was set first. Raises StackError on a death or the timeout.

        The gateway is started once all managers serve: it asks them what they serve when it meets them. `on_wait` gets
        the name of the process waited for and the seconds waited.
        """
        begun = time.monotonic()
        if not self._wait_for(list(self.children), begun, timeout_s, stop, on_wait):
            return False
        if self._config.gateway is None:
            return True
        self._start_gateway(self._config.gateway)
        return self._wait_for(self.children[-1:], begun, timeout_s, stop, on_wait)

    def _wait_for(
        self,
        children: Sequence[Child],
        begun: float,
        timeout_s: float,
        stop: threading.Event | None,
        on_wait: Callable[[str, float], None] | None,
    ) -> bool:
        for child in children:
            while not child.ready():
                waited = time.monotonic() - begun
                self.check()
                if waited > timeout_s:
                    raise StackError(
                        f"the {child.name} was not ready within {timeout_s:g} s; its last lines:"
                        + "".join(f"\n  {line}" for line in child.lines)
                    )
                if on_wait is not None:
                    on_wait(child.name, waited)
                if stop is not None and stop.wait(_POLL_S):
                    return False
                if stop is None:
                    time.sleep(_POLL_S)
        return True

    def check(self) -> None:
        """Raises StackError when a process has died."""
        for child in self.children:
            if child.popen.poll() is not None:
                raise StackError(child.report())

    def news(self) -> list[str]:
        """Of a stack that is ready: reports of the processes that died since the last call, while the others serve on.
        Raises StackError when no pair is left, or nothing in front of it.
        """
        dead = [child for child in self.children if child.popen.poll() is not None]
        found = [child.report() for child in dead if child.name not in self._reported]
        self._reported.update(child.name for child in dead)
        lost = {child.name.partition(" ")[2] for child in dead}
        if dead and (len(lost) == self._config.replicas or any(child.name == "gateway" for child in dead)):
            raise StackError("\n".join(found) or "the last pair has died")
        return found

    def stop(self) -> None:
        """Stops the managers behind the gateway, then the executors; kills what does not stop in time. Idempotent.

        The gateway learns at the same time as the managers that this is the end, and passes on what their running
        streams still bring. Once they are gone nothing can be left in it, so it need not wait for anything else.
        """
        gateway, managers, executors = (
            [child for child in self.children if child.name.split()[0] == role]
            for role in ("gateway", "manager", "executor")
        )
        _terminate([*gateway, *managers])
        _wait(managers, self._config.stop_timeout_s)
        _wait(gateway, _GATEWAY_LAST_S)
        _terminate(executors)
        _wait(executors, self._config.stop_timeout_s)

    def recordings(self) -> list[str]:
        """Files that the managers said they record to; each has a number behind its name if there was one already."""
        found = (_RECORDING.search(line) for child in self.children for line in tuple(child.lines))
        names = (match["text"] or match["json"] for match in found if match)
        return [json.loads(name) if name.startswith('"') else name for name in names]

    def kill(self) -> None:
        """Kills all at once; may be called from a signal handler while `stop` waits."""
        for child in self.children:
            if child.popen.poll() is None:
                child.popen.kill()

    def _spawn(
        self, name: str, target: str, command: Sequence[str], args: Sequence[str], *, ready: Callable[[], bool]
    ) -> None:
        try:
            popen = subprocess.Popen(
                [*command, *args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_environment(),
                # Ctrl-C in the terminal is for this process alone, which stops its children in order.
                start_new_session=True,
            )
        except OSError as error:
            raise StackError(f"cannot start the {name}: {error}") from error
        child = Child(name, target, popen, ready)
        child.reader = threading.Thread(target=self._read, args=(child,), name=f"{name}-log", daemon=True)
        child.reader.start()
        self.children.append(child)

    def _read(self, child: Child) -> None:
        # Somebody has to read, or a full pipe would stall the process.
        assert child.popen.stdout is not None
        for line in child.popen.stdout:
            child.lines.append(line.rstrip("\n"))
            if self._config.on_log is not None:
                self._config.on_log(child.name, line.rstrip("\n"))


def _terminate(children: Sequence[Child]) -> None:
    for child in children:
        if child.popen.poll() is None:
            child.popen.terminate()


def _wait(children: Sequence[Child], timeout_s: float) -> None:
    """Waits for them all together, and kills those that take longer."""
    deadline = time.monotonic() + timeout_s
    for child in children:
        try:
            child.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.popen.kill()
            child.popen.wait()
        if child.reader is not None:
            child.reader.join(timeout=2)


def _environment() -> dict[str, str]:
    """This process's environment, in which the children find the same modules."""
    # A script's directory or `python -c` may have put entries on sys.path that an environment variable has to carry on.
    paths = [path for path in sys.path if path and os.path.isdir(os.path.join(path, "pagekv"))]
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*paths, *([known] if known else [])]))}


def _serves(target: str) -> bool:
    try:
        return check(target, timeout_s=1.0) == "SERVING"
    except grpc.RpcError:
        return False


def _with_usable_ports(endpoints: KvEventEndpoints, taken: set[int]) -> KvEventEndpoints:
    """With a free port for each that is 0, so that it is known where to subscribe. Raises StackError where one is not
    free.
    """

    def chosen(flag: str, endpoint: str) -> str:
        port = tcp_port(endpoint)
        if port is None:
            return endpoint
        try:
            # On every interface: the host may be a name or * that only ZeroMQ knows.
            found = _usable_port("", port, flag, taken)
        except StackError as error:
            raise StackError(f"--{flag} {endpoint}: this port cannot be had; choose another, or 0 for any") from error
        taken.add(found)
        return f"{endpoint.rpartition(':')[0]}:{found}"

    return KvEventEndpoints(chosen(PUBLISH_FLAG, endpoints.endpoint), chosen(REPLAY_FLAG, endpoints.replay_endpoint))


def _usable_port(host: str, port: int, flag: str, other_than: Collection[int] = ()) -> int:
    """`port` if it is free, else StackError; a free one for 0."""
    if port and port in other_than:
        raise StackError(f"{flag} {port}: two processes cannot have one port; {flag} 0 takes a free one")
    while True:
        with socket.socket() as probe:
            # As gRPC binds: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise StackError(
                    f"port {port} of {host} cannot be used ({error.strerror}): is PageKV running already? "
                    f"Choose another with {flag}, or {flag} 0 for a free one"
                ) from error
            found: int = probe.getsockname()[1]
        if found not in other_than:
            return found
