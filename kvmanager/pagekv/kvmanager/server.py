"""The manager process: flags, listening, the engine loop, the tokenizer, health, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

# gRPC's core writes log lines of its own, which may contain bytes that a client sent, even line ends.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from pagekv.common.freed_memory import share_heaps
from pagekv.common.logs import Log, setup_logs
from pagekv.common.models import ModelNotFound
from pagekv.common.parent import parent_is_gone
from pagekv.common.phases import phases_told
from pagekv.common.port_file import add_to_port_file, bound_address, tell_cannot_start, write_port_file
from pagekv.common.server import GrpcServer, prepare_to_serve, run_async, stop_event
from pagekv.kvmanager.access.calls import GATEWAY_SERVICE, SERVICES
from pagekv.kvmanager.access.opening import Access, CannotProtect, open_access
from pagekv.kvmanager.access.toml_file import TomlFileError
from pagekv.kvmanager.api.cache_service import CacheService
from pagekv.kvmanager.api.inference_service import InferenceService
from pagekv.kvmanager.api.operator_service import OperatorService
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.config import FROM_EXECUTOR, NO_TOKENIZER, ManagerConfig, parse_config
from pagekv.kvmanager.engine.executor_client import AttachRefused
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.observe.exporters import Exporters
from pagekv.kvmanager.observe.metrics.request_metrics import RequestMetrics
from pagekv.kvmanager.observe.request_log import RequestLog
from pagekv.kvmanager.tenants.accounts import Accounts
from pagekv.kvmanager.tenants.open_calls import count_open_calls
from pagekv.kvmanager.text.served_tokenizer import ServedTokenizer, load_tokenizer
from pagekv.kvmanager.text.tokenizer import Tokenizer, TokenizerError
from pagekv.v1 import cache_service_pb2_grpc, inference_service_pb2_grpc, operator_service_pb2_grpc

if TYPE_CHECKING:
    from aiohttp import web

log = Log(__name__)

# Seconds for the last messages of ended streams to reach their readers.
LAST_WORDS_S = 5.0
# Heaps of the C library: one for the main thread, which does the work, and one for gRPC's threads.
HEAPS = 2
# Most connections to the gateway's own port; their descriptors are among those kept for other things.
GATEWAY_CONNECTIONS = 64


class ExtraMissing(Exception):
    """A flag needs a package that is not installed; the message says which and how to get it."""


@contextmanager
def needs_extra(flag: str, extra: str) -> Iterator[None]:
    """Wraps imports that a flag needs. Raises ExtraMissing."""
    try:
        yield
    except ImportError as error:
        raise ExtraMissing(f"{flag} needs {error.name}: pip install 'pagekv[{extra}]'") from error


class Manager:
    """One manager process. States: starting (NOT_SERVING) → serving ⇄ executor lost (NOT_SERVING) → draining → over."""

    def __init__(self, config: ManagerConfig, tokenizer: Tokenizer | None, access: Access | None = None) -> None:
        """`tokenizer`: the one that --tokenizer names; None if the executor's model decides. `access`: the opened files
        of `config.access`. Raises CannotProtect, ExtraMissing, TomlFileError, and OSError as `GrpcServer`.
        """
        self._config = config
        self._tokenizer = ServedTokenizer(tokenizer, from_executor=config.tokenizer == FROM_EXECUTOR)
        # Whether everything was opened: later errors do not count as a failed start.
        self.started = False
        self._changed = asyncio.Event()
        self._attached = False
        # Whether gRPC's health says SERVING.
        self._serving = False
        self._draining = False
        accounts = Accounts(Path(config.access.tenants) if config.access.tenants else None)
        self._access = replace(access or Access(), tenants=accounts.files)
        gate = self._access.gate
        self.engine = EngineLoop(
            config.engine, self._on_attached, self._access.executor_credentials, accounts, self._access.secret
        )
        if config.log_level == "debug":
            self.engine.observers.add(RequestLog())
        self._exporters = Exporters(config.observe, config.engine)
        # Closes what `_start` opened besides gRPC and the exporters.
        self._opened = AsyncExitStack()
        # First, so that it is closed last, when no call can be refused any more.
        self._opened.callback(self._access.close)
        self._served_model = ServedModel(self.engine)
        self._grpc = GrpcServer(
            config.listen,
            [*SERVICES, GATEWAY_SERVICE] if config.observe.gateway_api else SERVICES,
            config.reflection,
            credentials=self._access.server_credentials(),
            admit=None if gate is None else count_open_calls(accounts, gate.admit_call),
            refused=None if gate is None else gate.note_refusal,
        )
        # The gateway's own server, if it has one.
        self._gateway_grpc = self._add_gateway()
        served, server = self._served_model, self._grpc.server
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(self.engine, served), server)
        cache_service_pb2_grpc.add_CacheServiceServicer_to_server(CacheService(self.engine, served), server)
        operator_service_pb2_grpc.add_OperatorServiceServicer_to_server(OperatorService(self.engine, served), server)

    def _add_gateway(self) -> GrpcServer | None:
        """Adds a gateway's service, if wanted; returns its own server, if any. Raises CannotProtect, ExtraMissing,
        and OSError as `GrpcServer`.
        """
        at_listen, own_listen = self._config.observe.gateway_api, self._config.access.gateway_listen
        if not at_listen and not own_listen:
            return None
        with needs_extra("--gateway-api" if at_listen else "--gateway-listen", "gateway"):
            from pagekv.kvmanager.gateway.service import VllmEngine
        gateway = VllmEngine(self.engine, self._served_model, lambda: self._attached and not self._draining)
        if at_listen:
            gateway.add_to(self._grpc.server)
        if not own_listen:
            return None
        gate = self._access.gate
        if gate is None:
            raise CannotProtect("--gateway-listen: without --identities it would serve whoever connects")
        own = GrpcServer(
            own_listen,
            [GATEWAY_SERVICE],
            reflection=False,
            admit=count_open_calls(self.engine.accounts, gate.admit_gateway_call),
            refused=gate.note_refusal,
            connections=GATEWAY_CONNECTIONS,
        )
        gateway.add_to(own.server)
        return own

    def _on_attached(self, attached: bool) -> None:
        self._attached = attached
        self._changed.set()

    async def run(self, stop: asyncio.Event) -> int:
        """Serves until `stop` is set; returns the exit status. Raises OSError and ExtraMissing, everything closed."""
        try:
            await self._start()
        except BaseException:
            await self._stop_listening(0)
            await self._exporters.discard()
            raise
        self.started = True
        # No task ends by itself, unless something in it is broken.
        engine = asyncio.create_task(self.engine.run(), name="engine loop")
        health = asyncio.create_task(self._watch_engine(), name="health")
        watching = [asyncio.create_task(files.watch(), name=files.what) for files in self._access.files]
        stopped = asyncio.create_task(stop.wait(), name="stop signal")
        await asyncio.wait([engine, health, stopped], return_when=asyncio.FIRST_COMPLETED)
        # If the parent is gone, the executor has lost it, too, and ends at once, so no request could finish.
        grace_s = 0 if parent_is_gone() else self._config.grace_s
        log.info("shutting down", grace_s=grace_s)
        self._draining = True
        try:
            self._set_serving(False)
            await self._end_requests(engine, 0 if health.done() else grace_s)
            # Ended first, because it may be loading a tokenizer.
            await _end(health)
            await self._stop_listening(LAST_WORDS_S)
        finally:
            # The engine, too, may still be waiting for a slow executor.
            await _end(engine, health, stopped, *watching)
            broken = [task for task in (engine, health) if self._is_broken(task)]
            await self._exporters.close()
        if not broken:
            log.info("stopped")
        return 1 if broken else 0

    async def _end_requests(self, engine: asyncio.Task[None], grace_s: float) -> None:
        """Lets requests finish for up to `grace_s` seconds, unless the engine's task is broken, or breaks meanwhile."""
        ending = asyncio.create_task(self.engine.stop(grace_s), name="end of requests")
        await asyncio.wait([ending, engine], return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            await ending
        else:
            await _end(ending)
            await self.engine.stop(0)

    def _is_broken(self, task: asyncio.Task[None]) -> bool:
        """Whether a task has ended with an error, which is logged then."""
        if task.cancelled() or (error := task.exception()) is None:
            return False
        if isinstance(error, (AttachRefused, TomlFileError)):
            log.error("cannot serve with these flags", reason=error)
            add_to_port_file(self._config.port_file, cannot_start=str(error))
        else:
            log.error("stopped by an error", exc_info=error, task=task.get_name())
        return True

    async def _start(self) -> None:
        """Opens everything except the engine; writes the port file last. Raises OSError and ExtraMissing."""
        port = await self._grpc.start()
        gateway_port = await self._start_gateway()
        self._start_tracing()
        http_port = await self._start_http()
        with needs_extra("--kv-events", "observe"):
            self._exporters.open(self.engine)
        config = self._config
        if config.port_file:
            listening: dict[str, Any] = {"listen": bound_address(config.listen, port)}
            if gateway_port is not None:
                listening["gateway"] = bound_address(config.access.gateway_listen, gateway_port)
            if http_port:
                listening["http"] = bound_address(config.observe.http_listen, http_port)
            write_port_file(Path(config.port_file), listening | self._exporters.listening())
        log.info("listening", address=config.listen, port=port, executor=config.engine.executor)
        if reached := config.open_listeners():
            addresses = " ".join(reached.values())
            log.warning("other machines can connect, without TLS or a login (--insecure)", listen=addresses)
        self._opened.callback(self._tokenizer.close)
        self._opened.enter_context(phases_told(config.port_file))
        if http_port:
            log.info("serving HTTP", address=config.observe.http_listen, port=http_port)
        if gateway_port is not None:
            log.info("serving a gateway", address=config.access.gateway_listen, port=gateway_port)

    async def _stop_listening(self, grace_s: float) -> None:
        """Closes the ports that were opened; running calls get `grace_s` seconds."""
        await asyncio.gather(*(each.stop(grace_s) for each in self._servers()))
        await self._opened.aclose()

    def _servers(self) -> list[GrpcServer]:
        return [self._grpc, *([self._gateway_grpc] if self._gateway_grpc is not None else [])]

    def _set_serving(self, serving: bool) -> None:
        """Sets what gRPC's health says at every port."""
        for each in self._servers():
            each.set_serving(serving)

    async def _start_gateway(self) -> int | None:
        """Starts the gateway's own server, if any; returns its port (0: a Unix socket) or None. Raises OSError."""
        if self._gateway_grpc is None:
            return None
        try:
            return await self._gateway_grpc.start()
        except OSError as error:
            raise OSError(f"--gateway-listen: {error}") from error

    def _start_tracing(self) -> None:
        """Starts tracing, if wanted. Raises ExtraMissing without OpenTelemetry."""
        if not self._config.observe.otlp_endpoint:
            return
        with needs_extra("--otlp-endpoint", "observe"):
            from pagekv.kvmanager.observe.tracing import Tracing, otlp_processor
        tracing = Tracing(otlp_processor(self._config.observe.otlp_endpoint))
        self._opened.push_async_callback(tracing.close)
        self.engine.observers.add(tracing)
        log.info("sending spans", endpoint=self._config.observe.otlp_endpoint)

    def _page_routes(self, requests: RequestMetrics) -> list[web.AbstractRouteDef]:
        """Routes of the live page, which listens to the engine from now on."""
        from pagekv.kvmanager.page.hub import PageHub
        from pagekv.kvmanager.page.routes import Page

        reached = self._config.open_listeners()
        hub = PageHub(self.engine, requests)
        self.engine.observers.add(hub.feed)
        return Page(
            self.engine, self._served_model, hub, show_text=self._config.observe.page_text, reached=reached
        ).routes()

    def _not_ready(self) -> str:
        """The reason why requests are not served now; empty if they are. It agrees with gRPC's health."""
        if self._draining:
            return "shutting down"
        return "" if self._serving else "no executor is attached"

    async def _start_http(self) -> int:
        """Starts the HTTP server, if any; returns its port, else 0. Raises OSError; ExtraMissing without aiohttp."""
        observe = self._config.observe
        if not observe.http_listen:
            return 0
        with needs_extra("--http-listen", "observe"):
            from pagekv.kvmanager.observe.health_routes import health_routes
            from pagekv.kvmanager.observe.http_server import HttpServer
            from pagekv.kvmanager.observe.metrics.access_metrics import AccessCollector
            from pagekv.kvmanager.observe.metrics.prometheus import EngineCollector, metrics_routes
            from pagekv.kvmanager.observe.metrics.tenant_metrics import TenantCollector
        requests = RequestMetrics()
        self.engine.observers.add(requests)
        prefix_cache = self._config.engine.limits.prefix_cache
        collector = EngineCollector(
            self.engine, requests, prefix_cache=prefix_cache, insecure_listeners=len(self._config.open_listeners())
        )
        tenants = TenantCollector(self.engine.statistics, self.engine.accounts)
        metrics = metrics_routes(collector, AccessCollector(self._access), tenants)
        routes = [*metrics, *health_routes(self._not_ready), *self._page_routes(requests)]
        gate = self._access.gate
        http = HttpServer(
            observe.http_listen,
            routes,
            observe.http_names,
            tls=self._access.http_context(),
            admit=None if gate is None else gate.admit_request,
            refused=None if gate is None else gate.note_refused_request,
        )
        self._opened.push_async_callback(http.stop)
        try:
            return await http.start()
        except OSError as error:
            raise OSError(f"--http-listen {observe.http_listen}: {error}") from error

    async def _watch_engine(self) -> None:
        """Keeps health and tokenizer up to date with the executor that the engine is attached to."""
        loaded: str | None = None
        while True:
            self._changed.clear()
            model = self.engine.model
            if model is not None and model.model_fingerprint != loaded:
                tokenizer = await self._tokenizer.of_model(model.model_id)
                if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
                    log.warning(
                        "the tokenizer has more token ids than the model; text that needs the others is refused",
                        tokenizer=tokenizer.vocab_size,
                        model=model.vocab_size,
                    )
                if loaded is None:
                    prepare_to_serve()
                loaded = model.model_fingerprint
                self._served_model.open(loaded, tokenizer)
                self._tokenizer.keep(tokenizer)
                self._changed.set()  # the executor may have changed again meanwhile
            elif self._attached != self._serving and not self._draining:
                self._serving = self._attached
                self._set_serving(self._serving)
                log.info("serving" if self._serving else "not serving until an executor is attached again")
            await self._changed.wait()


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended; their errors stay in the tasks."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def serve(config: ManagerConfig) -> int:
    """Runs a manager until SIGTERM or SIGINT; returns the exit status."""
    stop = stop_event()
    tokenizer: Tokenizer | None = None
    manager: Manager | None = None
    try:
        if config.tokenizer not in (FROM_EXECUTOR, NO_TOKENIZER):
            tokenizer = await asyncio.to_thread(load_tokenizer, config.tokenizer)
        manager = Manager(config, tokenizer, open_access(config.access))
        return await manager.run(stop)
    except (ModelNotFound, TokenizerError) as error:
        log.error("cannot start: --tokenizer cannot be used", reason=error)
        tell_cannot_start(config.port_file, f"--tokenizer cannot be used: {error}")
    except (OSError, ExtraMissing, CannotProtect, TomlFileError) as error:
        if manager is not None and manager.started:
            log.error("stopped by an error", exc_info=error)
        else:
            log.error("cannot start", reason=error)
            tell_cannot_start(config.port_file, str(error))
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `pagekv-manager`."""
    config = parse_config(argv)
    setup_logs("kvmanager", config.log_level, config.log_format)
    share_heaps(HEAPS)
    return run_async(lambda: serve(config))


if __name__ == "__main__":
    sys.exit(main())
