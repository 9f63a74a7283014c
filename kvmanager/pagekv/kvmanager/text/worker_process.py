"""A child process that does one job at a time: work that may need much time or memory and can be stopped at any time.

Encoding megabytes of text is one library call that cannot be interrupted, and a chat template is a program that comes
with the model. In a process of their own both have bounds on time and memory, do not hold the event loop's interpreter
lock, and end at once when their caller has gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO

from pagekv.common.errors import Unavailable
from pagekv.common.logs import Log
from pagekv.kvmanager.access.caller import tenant_of_call
from pagekv.kvmanager.tenants.turns import TenantTurns
from pagekv.kvmanager.text.waiting_jobs import WaitingJobs
from pagekv.kvmanager.text.worker_jobs import ANSWER, DONE, JOB

log = Log(__name__)

# Most jobs, and most bytes of their bodies, that wait or run. A caller holds several times as many bytes: its message,
# and the text in it.
MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 * 2**20
# CPU seconds for the setup, which imports libraries and compiles a template or loads a tokenizer.
SETUP_CPU_S = 10.0
# Seconds that a process may take to end once its pipes are shut.
PATIENCE_S = 5.0
_START = "import sys; sys.path[:] = sys.argv[3:]; from pagekv.kvmanager.text.worker_jobs import main; "
_START += "main(sys.argv[1], int(sys.argv[2]))"


class JobRefused(Exception):
    """The process answered that a job cannot be done; the message says why."""


class WorkerStopped(Exception):
    """The job ended its process; the message says why, as far as that is known."""


@dataclass(slots=True)
class _Ticket:
    """One call of `run`; it keeps no body once its caller has gone."""

    body: bytes
    given_up: bool = False


class WorkerProcess:
    """States: not started ⇄ running → closed. The first job starts the process. It ends with its parent, and with a job
    that takes too long or whose caller has gone; the next job starts it again. A setup that is refused or takes too
    long is not tried again.
    """

    def __init__(
        self, kind: str, setup: Callable[[], bytes], cpu_s: float, memory_bytes: int, max_waiting: int = MAX_WAITING
    ) -> None:
        """`kind`: the kind of jobs, as `worker_jobs` knows it. `setup` gives the body of the first job of each process.
        A job may use `cpu_s` seconds of CPU time. The process may use `memory_bytes` of address space, or less if this
        process's own limit is lower.
        """
        self._kind = kind
        self._setup = setup
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._waiting = WaitingJobs(kind, max_waiting, MAX_WAITING_BYTES)
        # The thread that talks to the process. Jobs of callers that have gone are dropped before their turn.
        self._thread = ThreadPoolExecutor(1, f"{kind} worker")
        # At most one job of each tenant waits for the thread.
        self._turns = TenantTurns()
        # Protects `_closed`, `_current` and `_processes`. Held only for moments, because callers that give up take it
        # on the event loop.
        self._lock = threading.Lock()
        self._closed = False
        self._current: _Ticket | None = None
        # At most one process.
        self._processes: list[subprocess.Popen[bytes]] = []
        # Set if the setup failed for good: makes the error of every later job.
        self._broken: Callable[[], JobRefused | WorkerStopped] | None = None
        weakref.finalize(self, _reap, self._processes)

    async def run(self, job: str, body: bytes) -> bytes:
        """The answer to a job. Cancelling the call ends the job and, if it is running, the process. Raises JobRefused,
        WorkerStopped, Overloaded as `WaitingJobs.enter` does, and Unavailable if the process is closed, was ended from
        outside or cannot be started.
        """
        tenant = tenant_of_call()
        self._waiting.enter(tenant, len(body))
        ticket = _Ticket(body)
        try:
            async with self._turns.of(tenant):
                return await asyncio.wrap_future(self._thread.submit(self._do, ticket, job))
        except asyncio.CancelledError:
            with self._lock:
                ticket.given_up, ticket.body = True, b""
                if self._current is ticket:
                    self._kill()
            raise
        finally:
            self._waiting.leave(tenant, len(body))

    def close(self) -> None:
        """Ends the process for good, even in the middle of a job."""
        with self._lock:
            self._closed = True
            self._kill()
        self._thread.submit(self._reaped)

    def _kill(self) -> None:
        """Kills the process; the thread notices and cleans up."""
        for process in self._processes:
            process.kill()

    def _do(self, ticket: _Ticket, job: str) -> bytes:
        """Does a job, on the thread."""
        body = ticket.body
        if self._broken is not None:
            raise self._broken()
        try:
            if self._ready(ticket):
                return self._ask(job, body, self._cpu_s)
            # The caller has gone, so nobody reads the answer.
            return b""
        except (OSError, EOFError) as error:
            raise self._stopped(self._ended(), self._cpu_s) from error
        finally:
            with self._lock:
                self._current = None
            if ticket.given_up or self._closed:
                self._reaped()

    def _ready(self, ticket: _Ticket) -> bool:
        """Makes this ticket current and sets the process up; whether its caller still waits. Raises Unavailable."""
        if self._processes and self._processes[0].poll() is not None:
            self._reaped()
        with self._lock:
            self._check_open()
            self._current = ticket
        if not self._processes and not ticket.given_up:
            process = self._start()
            with self._lock:
                self._processes.append(process)
                self._check_open()
            if not ticket.given_up:
                self._set_up()
        return not ticket.given_up

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"the process of the {self._kind} is being closed")

    def _set_up(self) -> None:
        try:
            self._ask("setup", self._setup(), SETUP_CPU_S)
        except JobRefused as error:
            self._broken = partial(JobRefused, str(error))
            self._reaped()
            raise
        except (OSError, EOFError) as error:
            status = self._ended()
            if status == -signal.SIGPROF:
                self._broken = partial(WorkerStopped, self._why(status, SETUP_CPU_S))
            raise self._stopped(status, SETUP_CPU_S) from error

    def _start(self) -> subprocess.Popen[bytes]:
        """Raises Unavailable: a lack of descriptors, processes or memory in the manager is no fault of the job."""
        try:
            return subprocess.Popen(
                [sys.executable, "-c", _START, self._kind, str(self._memory_bytes), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            log.warning("cannot start a process", kind=self._kind, reason=error)
            raise Unavailable(
                f"the process of the {self._kind} cannot be started ({error.strerror}); try again"
            ) from error

    def _ask(self, job: str, body: bytes, cpu_s: float) -> bytes:
        (process,) = self._processes
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(JOB.pack(job.encode(), cpu_s, len(body)))
        process.stdin.write(body)
        process.stdin.flush()
        status, size = ANSWER.unpack(_read(process.stdout, ANSWER.size))
        answer = _read(process.stdout, size)
        if status != DONE:
            raise JobRefused(answer.decode())
        return answer

    def _ended(self) -> int:
        """Exit status of a process whose pipes are closed: it ends by itself, and killing it would hide the reason."""
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
        return self._reaped()

    def _reaped(self) -> int:
        """Ends the process, if there is one; returns its exit status."""
        with self._lock:
            processes = self._processes[:]
            self._processes.clear()
        return _reap(processes)

    def _stopped(self, status: int, cpu_s: float) -> WorkerStopped | Unavailable:
        """The error for a running job that got no answer."""
        try:
            self._check_open()
        except Unavailable as error:
            return error
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            return Unavailable(f"the process of the {self._kind} was ended from outside; try again")
        return WorkerStopped(self._why(status, cpu_s))

    def _why(self, status: int, cpu_s: float) -> str:
        if status == -signal.SIGPROF:
            return f"it takes more than {cpu_s:g} s of a processor"
        return f"its process ended with status {status}; it may have {self._memory_bytes >> 20} MiB of memory"


def _read(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _reap(processes: list[subprocess.Popen[bytes]]) -> int:
    """Ends the processes, closes their pipes and empties the list; returns the exit status of the last one."""
    status = 0
    while processes:
        process = processes.pop()
        process.kill()
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            # Closing a pipe flushes it, which fails because nobody reads it.
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
    return status
