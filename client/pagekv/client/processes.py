"""The two server processes of one machine as children of this one: start, wait until ready, watch, stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc

from pagekv.common.probe import check

EXECUTOR_COMMAND = (sys.executable, "-m", "pagekv.executor.server")
MANAGER_COMMAND = (sys.executable, "-m", "pagekv.kvmanager.server")
# Lines of each child's log that are kept for the report of its death.
KEPT_LINES = 40
_POLL_S = 0.1


class StackError(Exception):
    """The processes could not be started or one of them died; the message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What to start. Arguments are those of the processes' own command lines."""

    host: str = "127.0.0.1"
    # 0 takes a free port.
    port: int = 50051
    executor_port: int = 50052
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
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    reader: threading.Thread | None = None

    def report(self) -> str:
        """How it ended, and its last log lines."""
        status = self.popen.wait()
        if self.reader is not None:
            self.reader.join(timeout=2)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        tail = "".join(f"\n  {line}" for line in self.lines)
        return f"the {self.name} {how}" + (f"; its last lines:{tail}" if tail else " and said nothing")


class Stack:
    """An executor and a manager. States: built → started → stopped. Leaving a `with` statement stops both."""

    def __init__(self, config: StackConfig) -> None:
        """Chooses the ports. Raises StackError when one is taken."""
        self._config = config
        port = _usable_port(config.host, config.port, "--port")
        executor_port = _usable_port(config.host, config.executor_port, "--executor-port", other_than=port)
        self.target = f"{config.host}:{port}"
        self.executor_target = f"{config.host}:{executor_port}"
        # In the order of starting.
        self.children: list[Child] = []

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
        """Starts both processes; the manager waits for the executor by itself. Raises StackError."""
        listen, config = "--listen", self._config
        self._spawn(
            "executor", self.executor_target, [*config.executor_command, listen, self.executor_target],
            config.executor_args,
        )  # fmt: skip
        self._spawn(
            "manager", self.target,
            [*config.manager_command, listen, self.target, "--executor", self.executor_target], config.manager_args,
        )  # fmt: skip

    def wait_ready(
        self, timeout_s: float, stop: threading.Event | None = None, on_wait: Callable[[str, float], None] | None = None
    ) -> bool:
        """Waits until both are healthy. False when `stop` was set first. Raises StackError on a death or the timeout.

        `on_wait` gets the name of the process waited for and the seconds waited.
        """
        begun = time.monotonic()
        for child in self.children:
            while not _serves(child.target):
                waited = time.monotonic() - begun
                self.check()
                if waited > timeout_s:
                    raise StackError(f"the {child.name} was not ready within {timeout_s:g} s; its last lines:"
                                     + "".join(f"\n  {line}" for line in child.lines))  # fmt: skip
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

    def stop(self) -> None:
        """Stops the manager, then the executor; kills what does not stop in time. Idempotent."""
        for child in reversed(self.children):
            if child.popen.poll() is None:
                child.popen.terminate()
                try:
                    child.popen.wait(self._config.stop_timeout_s)
                except subprocess.TimeoutExpired:
                    child.popen.kill()
                    child.popen.wait()
            if child.reader is not None:
                child.reader.join(timeout=2)

    def kill(self) -> None:
        """Kills both at once; may be called from a signal handler while `stop` waits."""
        for child in self.children:
            if child.popen.poll() is None:
                child.popen.kill()

    def _spawn(self, name: str, target: str, command: Sequence[str], args: Sequence[str]) -> None:
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
        child = Child(name, target, popen)
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


def _usable_port(host: str, port: int, flag: str, other_than: int = 0) -> int:
    """`port` if it is free, else StackError; a free one for 0."""
    if port and port == other_than:
        raise StackError(f"{flag} {port}: both processes cannot have one port; {flag} 0 takes a free one")
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
        if found != other_than:
            return found
