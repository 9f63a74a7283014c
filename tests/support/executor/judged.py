"""Executors in this process that the conformance kit judges, sound ones and ones with a planted fault.

The toy is `docs/examples/minimal_executor.py`, and its faults are edits of its text; a backend is served as the
executor's process serves it.
"""

from __future__ import annotations

import asyncio
import inspect
import textwrap
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import grpc

from pagekv.common.server import GrpcServer
from pagekv.conformance import link
from pagekv.conformance.judge import RULES, verdict_of
from pagekv.conformance.kit import Kit
from pagekv.conformance.link import Link
from pagekv.conformance.target import describe
from pagekv.conformance.verdict import Verdict
from pagekv.executor.backend.interface import Backend
from pagekv.executor.ranks.leader import GroupBackend
from pagekv.executor.rpc.service import SERVICE_NAME, ExecutorService
from pagekv.executor.session.session import Session
from pagekv.executor.session.worker_thread import WorkerThread
from pagekv.steps.v1 import executor_service_pb2_grpc as pb_grpc

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
TOY, BACKEND = EXAMPLES / "minimal_executor.py", EXAMPLES / "python_backend.py"

# Options of a server that does not take pings for an attack.
PINGS = (("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.min_ping_interval_without_data_ms", 50))

Edit = tuple[str, str]


@dataclass(frozen=True)
class ToyFault:
    """A fault of the toy and the rule that must notice it. `seconds`: how long a result is waited for, where none is
    to come.
    """

    rule: str
    words: str
    edits: tuple[Edit, ...]
    seconds: float = link.RESULT_S

    def __str__(self) -> str:
        return f"{self.rule}: {self.words}"


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with these edits. Raises ValueError where there is nothing to edit."""
    for old, new in edits:
        if old not in text:
            raise ValueError(f"nothing to replace: {old!r}")
        text = text.replace(old, new)
    return text


@contextmanager
def _served(start: Callable[[], Awaitable[tuple[int, Callable[[], Awaitable[None]]]]]) -> Iterator[str]:
    """The address of a server on an event loop of its own; `start` returns its port and what stops it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def call(function: Callable[[], Awaitable[Any]]) -> Any:
        return await function()

    port, stop = asyncio.run_coroutine_threadsafe(call(start), loop).result(60)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(call(stop), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def toy(*edits: Edit, without: str = "", options: Sequence[tuple[str, Any]] = ()) -> Iterator[str]:
    """The address of the toy with these edits of its text; `without`: a rule that it does not know."""
    module = ModuleType("minimal_executor")
    # Its dataclasses look their module up.
    with mock.patch.dict("sys.modules", {"minimal_executor": module}):
        exec(compile(edited(TOY.read_text(), edits), str(TOY), "exec"), module.__dict__)  # noqa: S102  # our own text
    need = module.need

    def forgetful(holds: object, rule: str, path: str) -> None:
        need(holds or rule == without, rule, path)

    module.need = forgetful  # type: ignore[attr-defined]  # a module is what its text makes of it

    async def start() -> tuple[int, Callable[[], Awaitable[None]]]:
        server = grpc.aio.server(options=options or PINGS)
        pb_grpc.add_ExecutorServiceServicer_to_server(module.Toy(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

        async def stop() -> None:
            await server.stop(0)

        return port, stop

    with _served(start) as address:
        yield address


@contextmanager
def served_backend(backend: Backend) -> Iterator[str]:
    """The address of an executor with this backend."""
    compute = WorkerThread()

    async def start() -> tuple[int, Callable[[], Awaitable[None]]]:
        session = Session(compute)
        server = GrpcServer("127.0.0.1:0", [SERVICE_NAME], reflection=False)
        ExecutorService(session).add_to(server.server)
        port = await server.start()
        session.serve(backend, backend.leader if isinstance(backend, GroupBackend) else None)

        async def stop() -> None:
            await server.stop(0)

        return port, stop

    with _served(start) as address:
        yield address
    compute.stop()


@contextmanager
def kit_of(address: str, features: frozenset[int] | None = None) -> Iterator[Kit]:
    """A kit for an executor."""
    connection = Link(address)
    try:
        yield Kit(describe(connection, features))
    finally:
        connection.close()


def verdicts(address: str, *rules: str) -> dict[str, Verdict]:
    """Verdicts of these rules, of all but P10 if none is named."""
    with kit_of(address) as kit:
        return {rule.number: verdict_of(kit, rule) for rule in RULES if not rules or rule.number in rules}


def broken(found: dict[str, Verdict]) -> dict[str, str]:
    """The rules that failed, and why."""
    return {number: verdict.why for number, verdict in found.items() if verdict.outcome == "failed"}


def assert_noticed(fault: ToyFault) -> None:
    """The rule fails with the fault planted; that it holds without is shown by the test of the sound toy."""
    with mock.patch.object(link, "RESULT_S", fault.seconds), toy(*fault.edits) as address:
        verdict = verdicts(address, fault.rule)[fault.rule]
    assert verdict.outcome == "failed", verdict


def edited_function(function: Callable[..., Any], *edits: Edit) -> Callable[..., Any]:
    """A function of the product with these edits of its text, in its module's names."""
    names: dict[str, Any] = {}
    text = edited(textwrap.dedent(inspect.getsource(function)), edits)
    globals_ = inspect.unwrap(function).__globals__
    exec(compile("from __future__ import annotations\n" + text, "edited", "exec"), globals_, names)  # noqa: S102  # the text is ours
    made: Callable[..., Any] = names[function.__name__]
    return made
