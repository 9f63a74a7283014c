"""The executor process: flags, listening, loading the model, health, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

# gRPC's core logs lines of its own, which may contain any bytes that a peer sent, line ends included.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from pagekv.common.freed_memory import share_heaps
from pagekv.common.logs import Log, setup_logs
from pagekv.common.loopback import is_local
from pagekv.common.phases import phases_told
from pagekv.common.port_file import add_to_port_file, bound_address, tell_cannot_start, write_port_file
from pagekv.common.server import GrpcServer, prepare_to_serve, run_async, stop_event
from pagekv.executor import choose_backend
from pagekv.executor.backend.interface import Backend
from pagekv.executor.config import ExecutorConfig, parse_config
from pagekv.executor.fresh_process import faults_before, start_anew
from pagekv.executor.group import Load, follow, lead, settled
from pagekv.executor.ranks.leader import GroupBackend, Leader
from pagekv.executor.ranks.start_errors import CannotStart, expected_words
from pagekv.executor.ranks.watch import EXIT_LOST, end_torchrun
from pagekv.executor.rpc.only_manager import only_manager
from pagekv.executor.rpc.service import SERVICE_NAME, ExecutorService
from pagekv.executor.session.session import Session
from pagekv.executor.session.worker_thread import WorkerThread
from pagekv.executor.world import ALONE, World, read_world

if TYPE_CHECKING:
    from pagekv.common.tls import Tls

log = Log(__name__)

# Seconds for the last messages of ended streams to reach the manager.
LAST_WORDS_S = 2.0
# Seconds for which a thread keeps the interpreter while another thread waits for it.
SWITCH_INTERVAL_S = 200e-6


def _read_tls(config: ExecutorConfig) -> Tls | None:
    """None without --tls-cert. Raises ImportError without cryptography, ValueError for files that cannot be used."""
    if not config.tls.tls_cert:
        return None
    from pagekv.common.tls import Tls

    return Tls(config.tls)


class Executor:
    """One executor process. States: listening (NOT_SERVING) → serving → draining (NOT_SERVING) → over."""

    def __init__(self, config: ExecutorConfig, load: Callable[[], Backend], tls: Tls | None = None) -> None:
        """`load` makes the backend, on the thread that uses it from then on. `tls`: the certificate of --tls-cert.
        Raises OSError as `GrpcServer`.
        """
        self._config = config
        self._load_backend = load
        self._compute = WorkerThread()
        self.session = Session(self._compute)
        self._tls = tls
        # Set on rank 0 of a group.
        self._leader: Leader | None = None
        self._watching: asyncio.Task[None] | None = None
        self._grpc = GrpcServer(
            config.listen,
            [SERVICE_NAME],
            config.reflection,
            credentials=tls.server_credentials() if tls is not None else None,
            admit=only_manager(config.manager_name) if config.tls.tls_client_ca else None,
        )
        ExecutorService(self.session).add_to(self._grpc.server)
        # The time at which serving began (perf_counter).
        self.serving_since = math.inf

    @property
    def listening(self) -> bool:
        return bool(self._grpc.port)

    @property
    def address(self) -> str:
        """The address to listen on, with the bound port instead of 0."""
        listen = self._config.listen
        return bound_address(listen, self._grpc.port) if self.listening else listen

    async def run(self, stop: asyncio.Event) -> int:
        """Serves until `stop` is set or the device is lost; returns the exit status. Raises errors of loading the
        backend, and OSError if it cannot listen.
        """
        config = self._config
        port = await self._grpc.start()
        if config.port_file:
            write_port_file(Path(config.port_file), {"listen": self.address})
        log.info("listening", address=config.listen, port=port)
        if not is_local(config.listen) and not config.tls.tls_client_ca:
            log.warning("other machines can connect, without TLS or a login (--insecure)", listen=config.listen)
        if self._tls is not None:
            # The reference keeps the task alive, since the event loop does not. The task ends with the process.
            self._watching = asyncio.create_task(self._tls.files.watch(), name="TLS files")
        stopped = asyncio.create_task(stop.wait(), name="stop signal")
        loading = asyncio.create_task(self._load(), name="load")
        await asyncio.wait([stopped, loading], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            prepare_to_serve()
            backend = loading.result()
            self._leader = backend.leader if isinstance(backend, GroupBackend) else None
            self.session.serve(backend, self._leader)
            self._grpc.set_serving(True)
            self.serving_since = time.perf_counter()
            lost = asyncio.create_task(self.session.lost.wait(), name="device lost")
            await asyncio.wait([stopped, lost], return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
        return await self._shut_down(idle=loading.done())

    async def _load(self) -> Backend:
        begin = time.monotonic()
        backend = await self._compute.call(self._load_backend)
        log.info("loaded", backend=type(backend).__name__, seconds=round(time.monotonic() - begin, 3))
        if (prepare := getattr(backend, "prepare", None)) is not None:
            self._compute.when_idle(prepare)
        return backend

    async def _shut_down(self, idle: bool) -> int:
        """Shuts down and returns the exit status. `idle`: the worker thread is not loading a model, so it can be waited
        for.
        """
        grace_s = self._config.grace_s
        log.info("shutting down", grace_s=grace_s)
        self._grpc.set_serving(False)
        try:
            async with asyncio.timeout(grace_s if idle else 0):
                await self.session.shut_down()
        except TimeoutError:
            log.warning("stopped in the middle of work", work="a step" if idle else "loading the model")
            idle = False
        await self._grpc.stop(LAST_WORDS_S)
        if self._leader is not None:
            if idle and not self.session.lost_reason:
                self._leader.stop()
            else:
                # Other ranks may wait for this one in a collective.
                self._leader.watch.end(self.session.lost_reason or "stopped in the middle of work")
        self._compute.stop()
        log.info("stopped")
        if not idle and not self.session.lost_reason:
            # The worker thread may be in native code: an orderly exit of the interpreter would wait for it or crash.
            logging.shutdown()
            os._exit(0)
        return 0


async def serve(config: ExecutorConfig, load: Callable[[], Backend], world: World = ALONE) -> int:
    """Runs an executor with the backend that `load` makes until SIGTERM or SIGINT; returns the exit status. When the
    device is lost, a new process replaces this one; a rank of a group ends instead, and torchrun starts it again. The
    new process tries again after any error, because the process before it was able to serve.
    """
    stop = stop_event()
    try:
        executor = Executor(config, load, _read_tls(config))
    except (ImportError, OSError, ValueError) as error:
        _say_why(error, config.port_file, listening=False)
        if not world.anew:
            end_torchrun(world)
        return 1
    try:
        with phases_told(config.port_file):
            status = await executor.run(stop)
        if not executor.session.lost_reason or stop.is_set():
            return status
        reason = executor.session.lost_reason
        if world.size > 1:
            log.error("this rank ends, so that torchrun restarts it", reason=reason)
            return EXIT_LOST
    except Exception as error:
        known = _say_why(error, config.port_file, listening=executor.listening)
        # Not after a restart of the ranks: a rank that is ending may still hold the address.
        if isinstance(error, CannotStart) or not (executor.listening or world.anew):
            end_torchrun(world)
        if not faults_before():
            if not known:
                raise
            return 1
        reason = f"it could not start: {error}"
    return await start_anew(stop, executor.address, reason, time.perf_counter() - executor.serving_since)


def _say_why(error: Exception, port_file: str, *, listening: bool) -> bool:
    """Logs one line for an expected error that keeps an executor from starting, and writes it to the port file, next to
    the address if the executor is listening. For an unexpected error it does neither and returns False.
    """
    reason = expected_words(error)
    if not reason:
        return False
    log.error("cannot start", reason=reason)
    if listening:
        add_to_port_file(port_file, cannot_start=reason)
    else:
        tell_cannot_start(port_file, reason)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `pagekv-executor`: an executor of one process, or a rank of a group if torchrun started it."""
    try:
        config = parse_config(argv)
    except SystemExit as end:
        # If torchrun starts ranks with wrong flags, they stay wrong at the next start.
        with suppress(ValueError):
            if end.code:
                end_torchrun(read_world(os.environ))
        raise
    if config.backend in ("auto", "cpu"):
        # One heap for all threads: a heap of the worker thread's own would give its buffers back to the kernel after
        # each step.
        share_heaps(1)
    try:
        world = read_world(os.environ)
    except ValueError as error:
        setup_logs("executor", config.log_level, config.log_format)
        _say_why(error, config.port_file, listening=False)
        return 1

    if world.size == 1:
        return _run(config, lambda: choose_backend.load_backend(config))

    config = settled(config, world)

    def load(lost: Callable[[str], None]) -> Backend:
        return choose_backend.load_backend(config, world, lost)

    status = _follow(config, world, load) if world.rank else _run(config, lambda: lead(config, world, load), world)
    # No orderly exit: threads of gloo or of torch's store abort the interpreter in about one of ten exits, and
    # connections of NCCL that graphs hold can keep it from exiting (pytorch issue 115388).
    logging.shutdown()
    os._exit(status)


def _follow(config: ExecutorConfig, world: World, load: Load) -> int:
    """Runs a rank other than rank 0, without a port and without a port file; returns the exit status."""
    setup_logs(f"rank {world.rank}", config.log_level, config.log_format)
    try:
        return follow(config, world, load)
    except Exception as error:
        if not _say_why(error, "", listening=False):
            raise
        if isinstance(error, CannotStart):
            end_torchrun(world)
        return 1


def serve_backend(load: Callable[[], Backend], listen: str = "127.0.0.1:50052") -> int:
    """Serves any backend as `pagekv-executor` serves its own, until SIGTERM or SIGINT; returns the exit status. Call it
    from the main thread.

    `load`, a class or a function, makes the backend on the thread that calls its methods from then on. `listen` is
    host:port; port 0 takes a free port, which the log names. Exits with status 2 if `listen` is no such address, or if
    other machines can reach it while PAGEKV_INSECURE is not set. Other flags are read from the environment, as
    docs/flags.md describes. When the backend's `is_lost` returns True, the process runs its own command line again,
    with `--listen` and the address appended.
    """
    return _run(parse_config(["--listen", listen]), load)


def _run(config: ExecutorConfig, load: Callable[[], Backend], world: World = ALONE) -> int:
    setup_logs("executor", config.log_level, config.log_format)
    # Results are sent while the worker thread already runs Python code of the next step. With the default of 5 ms, the
    # event loop would wait for the interpreter that long, several times for each result.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return run_async(lambda: serve(config, load, world))


if __name__ == "__main__":
    sys.exit(main())
