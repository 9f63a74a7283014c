"""Real processes for end-to-end tests: the same commands that `pagekv up` and compose run, on free ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients import everything_on, tls_on
from support.clients.gate import Gate
from support.clients.held_port import hold
from support.clients.relay import Relay
from support.waiting import wait_until

from pagekv.common.port_file import read_port_file

ROOT = Path(__file__).resolve().parents[3]
SOURCE_ROOTS = ("proto", "kvmanager", "executor", "kernels", "client")
MANAGER = "pagekv.kvmanager"
EXECUTOR = "pagekv.executor"
# Ranks on this machine alone, started anew however often one ends.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=1000000")
GATED_EXECUTOR = "support.executor.gated_executor"
FAULTY_RANK = "support.executor.faulty_rank"
# Only bounds a hang: on a busy machine to load torch has taken more than two minutes.
START_TIMEOUT_S = 600.0
# The judging backend with the demo model's vocabulary and tokenizer: no torch, full speed.
ORACLE = ("--backend", "oracle", "--model", "demo")
# The demo model in float64, where near-ties all but never tip with the batch; one thread, because the test, the
# manager and the client run on the same few cores, where compute threads that wait for each other take many times as
# long.
CPU = ("--model", "demo", "--dtype", "float64", "--threads", "1", "--kv-memory", "512MiB")


def port_of(listening: Mapping[str, Any]) -> int:
    """The gRPC port of a process that wrote this line."""
    return int(listening["listen"].rpartition(":")[2])


def environment() -> dict[str, str]:
    """The test process's environment with every source root importable, before what the caller has in PYTHONPATH
    (scripts/gpu_site.sh), no PAGEKV_* flag of the caller, and no say in what gRPC's core logs.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PAGEKV_", "GRPC_VERBOSITY"))}
    known = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
    env["PYTHONPATH"] = os.pathsep.join([*(str(ROOT / name) for name in SOURCE_ROOTS), *known])
    return env


@dataclass
class Process:
    """One server process; its log is a file so that a full pipe never stalls it. An executor with a gate waits at it
    before every step.
    """

    module: str
    args: Sequence[str]
    directory: Path
    port: int = 0
    # Address of the HTTP port; empty without one.
    http: str = ""
    popen: subprocess.Popen[bytes] | None = None
    log: Path = field(init=False)
    # Behind `args`, where every process has TLS.
    _tls: list[str] = field(init=False)
    watching: tempfile.TemporaryDirectory[str] | None = None
    gate: Gate | None = None
    # Of this process alone also while it does not run: a test may start it there again.
    held: socket.socket | None = None
    # For a process that serves with TLS.
    credentials: grpc.ChannelCredentials | None = None
    # Of an executor: torchrun starts so many, and starts all anew when one has ended.
    ranks: int = 1
    # Of ranks: between them and rank 0.
    relay: Relay | None = None

    def __post_init__(self) -> None:
        self.log = self.directory / f"{self.module.rpartition('.')[2]}.log"
        self._tls = tls_on.flags(self.args, manager=self.module == MANAGER)

    def start(self, listen_port: int = 0) -> None:
        """Starts it and waits until it listens."""
        if not listen_port:
            self.held = hold()
            listen_port = self.held.getsockname()[1]
        port_file = self.directory / f"{self.module}.port"
        port_file.unlink(missing_ok=True)
        env, module = environment(), self.module
        if self.gate is not None:
            env["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests'}"
            env["GATE"], module = str(self.gate.path), GATED_EXECUTOR
        if self.relay is not None:
            env["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests'}"
            env |= {"RELAY": str(self.relay.port), "OTHER_FLAGS": str(self.other_flags)}
            module = FAULTY_RANK
        launcher = [] if self.ranks == 1 else [*TORCHRUN, f"--nproc-per-node={self.ranks}"]
        command = [sys.executable, *launcher, "-m", module, "--listen", f"127.0.0.1:{listen_port}"]
        command += ["--port-file", str(port_file), *self._watching(), *self.args, *self._tls]
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=self.directory)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            # First: it may listen and end between two looks.
            over = self.popen.poll() is not None or time.monotonic() > deadline
            if "listen" in (listening := read_port_file(port_file)):
                break
            assert not over, f"{self.module} did not start:\n{self.tail()}"
            time.sleep(0.01)
        self.port, self.http = port_of(listening), listening.get("http", "")
        if self._tls:
            self.credentials = tls_on.serves(self.target, manager=self.module == MANAGER)

    def _watching(self) -> list[str]:
        """Flags that switch everything on for a manager, before those that a test gives."""
        if not everything_on.ASKED_FOR or self.module != MANAGER:
            return []
        if self.watching is not None:
            self.watching.cleanup()
        # Not below `directory`: paths of sockets have to be short.
        self.watching = tempfile.TemporaryDirectory()
        return everything_on.flags(Path(self.watching.name), everything_on.spans_url())

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def other_flags(self) -> Path:
        """Of an executor with a relay: a file whose words ranks other than rank 0 have behind their flags."""
        return self.directory / "other_flags"

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def kill(self) -> None:
        """SIGKILL, and wait; ranks too, which torchrun's death does not end at once."""
        assert self.popen is not None
        ranks = self.rank_pids() if self.ranks > 1 else {}
        self.popen.kill()
        self.popen.wait()
        for pid in ranks.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def rank_pids(self) -> dict[int, int]:
        """The processes that torchrun has started, by rank; those that are there already."""
        found = {}
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            with suppress(OSError, KeyError):
                lines = Path(f"/proc/{child}/environ").read_text().split("\0")
                env = dict(line.partition("=")[::2] for line in lines)
                found[int(env["RANK"])] = int(child)
        return found

    def stop(self, timeout: float = 240.0) -> int:
        """SIGTERM, and the exit status."""
        assert self.popen is not None
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.is_file() else ""

    def channel(self) -> grpc.Channel:
        """To this process."""
        if self.credentials is None:
            return grpc.insecure_channel(self.target)
        return grpc.secure_channel(self.target, self.credentials)

    def wait_serving(self) -> None:
        """Waits until the health service says SERVING."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with self.channel() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                assert self.popen is not None
                if self.popen.poll() is not None:
                    raise AssertionError(f"{self.module} ended with {self.popen.returncode}:\n{self.tail()}")
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                except grpc.RpcError:
                    answer = None
                if answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                time.sleep(0.02)
        raise AssertionError(f"{self.module} is not serving after {START_TIMEOUT_S:g} s:\n{self.tail()}")


@dataclass
class Stack:
    """An executor and a manager attached to it."""

    executor: Process
    manager: Process
    # Of callers with every role, and the flags of another manager for this executor; of a stack with TLS.
    callers: grpc.ChannelCredentials | None = None
    secured: Sequence[str] = ()

    @property
    def target(self) -> str:
        return self.manager.target

    @property
    def gate(self) -> Gate:
        """Of a stack that was asked for with one."""
        assert self.executor.gate is not None
        return self.executor.gate


@contextmanager
def running_executor(
    args: Sequence[str] = (),
    directory: Path | None = None,
    *,
    gated: bool = False,
    credentials: grpc.ChannelCredentials | None = None,
    ranks: int = 1,
    relayed: bool = False,
) -> Iterator[Process]:
    """An executor process that serves; `gated`: with a gate before its steps, open for now; `credentials`: for TLS;
    `ranks`: a group of so many, `relayed`: with a relay between them.
    """
    with tempfile.TemporaryDirectory() as temporary:
        gate = Gate(Path(temporary) / "gate") if gated else None
        process = Process(EXECUTOR, args, directory or Path(temporary), gate=gate, credentials=credentials)
        process.ranks = ranks
        process.relay = Relay() if relayed else None
        try:
            process.start()
            process.wait_serving()
            yield process
        finally:
            _end(process)
            if process.relay is not None:
                process.relay.close()


@contextmanager
def running_stand_in(script: str, args: Sequence[str], directory: Path, **variables: str) -> Iterator[Process]:
    """A script of tests/support/executor in an executor's place, listening at a port that it chooses, which the file
    `port` in the directory tells; killed at the end. `variables`: of its environment.
    """
    env = environment() | variables
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(ROOT / "tests"), str(ROOT / "tests" / "kernels")])
    process, port_file = Process(EXECUTOR, [], directory), directory / "port"
    command = [sys.executable, str(ROOT / "tests" / "support" / "executor" / script), *args]
    command += ["--listen", "127.0.0.1:0", "--port-file", str(port_file)]
    with process.log.open("ab") as log:
        process.popen = popen = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=directory)
    try:
        wait_until(lambda: port_file.exists() or popen.poll() is not None, START_TIMEOUT_S, process.tail)
        assert popen.poll() is None, process.tail()
        process.port = port_of(read_port_file(port_file))
        yield process
    finally:
        process.kill()


@contextmanager
def running_stack(
    executor_args: Sequence[str] = (), manager_args: Sequence[str] = (), *, gated: bool = False, ranks: int = 1
) -> Iterator[Stack]:
    """Both processes, serving; killed at the end if they still run. `gated`: the executor has a gate, open for now.
    `ranks`: it is a group of so many.
    """
    with (
        tempfile.TemporaryDirectory() as temporary,
        running_executor(executor_args, Path(temporary), gated=gated, ranks=ranks) as executor,
        running_manager(executor, manager_args) as stack,
    ):
        yield stack


@contextmanager
def running_manager(
    executor: Process, args: Sequence[str] = (), *, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[Stack]:
    """A manager that serves over an executor which no other drives; several may follow each other, each with a log of
    its own. `credentials`: for TLS.
    """
    command = ["--executor", executor.target, *args]
    directory = Path(tempfile.mkdtemp(prefix="manager-", dir=executor.directory))
    manager = Process(MANAGER, command, directory, credentials=credentials)
    try:
        manager.start()
        manager.wait_serving()
        yield Stack(executor, manager)
    finally:
        _end(manager)


def _end(process: Process) -> None:
    if process.held is not None:
        process.held.close()
    if process.popen is not None and process.popen.poll() is None:
        process.popen.terminate()
        try:
            process.popen.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    tls_on.ended(process.target)
