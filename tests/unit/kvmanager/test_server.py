"""The manager's shell: how it starts, what it answers without an executor, how it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.access.calls import Call
from support.clients.held_port import held_port, hold
from support.clients.protected_stack import write_identities
from support.engine.running_manager import (
    NOT_SERVING,
    NOWHERE,
    SERVING,
    Running,
    attach,
    config,
    main,
    model,
    run,
)

from pagekv.common.errors import Unauthenticated
from pagekv.common.port_file import read_port_file
from pagekv.kvmanager import server
from pagekv.kvmanager.access.audit_log import MAX_REFUSALS_A_SECOND
from pagekv.kvmanager.access.opening import open_access
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.observe.exporters import Exporters


def test_without_an_executor_it_listens_says_so_and_stops_cleanly(tmp_path: Path) -> None:
    async def body(running: Running) -> None:
        assert await running.health() == NOT_SERVING
        error = await running.refusal()
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (error.details() or "").startswith("no executor is attached yet: no executor answers at --executor; ")
        assert "127.0.0.1" not in (error.details() or "")

    assert run(config(tmp_path), body) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["port"]


def test_http_says_what_health_says(tmp_path: Path) -> None:
    async def body(running: Running) -> None:
        at = read_port_file(tmp_path / "port")["http"]

        async def ready() -> tuple[int, str]:
            async with aiohttp.ClientSession() as session, session.get(f"http://{at}/ready") as response:
                return response.status, await response.text()

        assert await ready() == (503, "no executor is attached\n")
        attach(running.manager.engine, model(tmp_path))
        await running.until_health(SERVING)
        assert await ready() == (200, "ready\n")
        running.manager.engine._on_attached(False)
        await running.until_health(NOT_SERVING)
        assert await ready() == (503, "no executor is attached\n")

    assert run(config(tmp_path, "--http-listen", "127.0.0.1:0"), body) == 0


def test_ports_that_other_machines_reach_are_warned_of_in_log_page_and_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(running: Running) -> None:
        port = read_port_file(tmp_path / "port")["http"].rpartition(":")[2]
        async with aiohttp.ClientSession() as session:
            for path, words in (
                ("", "Other machines can connect to this manager (--listen 0.0.0.0:0, --http-listen 0.0.0.0:0)"),
                ("metrics", "\npagekv_insecure_listeners 2.0\n"),
            ):
                async with session.get(f"http://127.0.0.1:{port}/{path}") as response:
                    assert words in await response.text()

    with caplog.at_level(logging.WARNING):
        assert run(config(tmp_path, "--listen", "0.0.0.0:0", "--http-listen", "0.0.0.0:0", "--insecure"), body) == 0
    assert "other machines can connect, without TLS or a login (--insecure)" in caplog.text


def test_the_port_file_says_where_everything_listens_and_what_is_recorded(tmp_path: Path) -> None:
    http, events = ["--http-listen", "127.0.0.1:0"], ["--kv-events", "--kv-events-endpoint", "tcp://127.0.0.1:0"]
    (tmp_path / "requests").touch()

    async def body(running: Running) -> None:
        found = read_port_file(tmp_path / "port")
        assert sorted(found) == ["http", "kv_events", "listen", "recordings"]
        assert all(0 < int(found[name].removeprefix("127.0.0.1:")) < 2**16 for name in ("listen", "http"))
        assert found["kv_events"]["endpoint"].startswith("tcp://127.0.0.1:")
        assert not found["kv_events"]["endpoint"].endswith(":0")
        assert found["kv_events"]["replay_endpoint"] == ""
        # One that is there is kept.
        assert found["recordings"] == [f"{tmp_path}/requests.1"]

    assert run(config(tmp_path, *http, *events, "--record", str(tmp_path / "requests")), body) == 0


def test_the_audit_log_ends_with_the_manager(tmp_path: Path) -> None:
    """Behind its last call, with the number of refusals that it left out."""
    identities, audit = tmp_path / "identities.toml", tmp_path / "audit.jsonl"
    write_identities(identities)
    flags = config(tmp_path, f"--identities={identities}", f"--audit-log={audit}")
    others = set(threading.enumerate())
    access = open_access(flags.access)
    assert access.gate is not None
    # All in one second.
    access.gate.audit_log._now = lambda: 1e9  # type: ignore[union-attr]  # there is one

    async def main() -> int:
        stop = asyncio.Event()
        manager = server.Manager(flags, None, access)
        running = asyncio.create_task(manager.run(stop))
        async with asyncio.timeout(120):
            while not manager.started:  # noqa: ASYNC110  # nothing signals it
                await asyncio.sleep(0.005)
        assert access.gate is not None
        for _ in range(MAX_REFUSALS_A_SECOND * 3):
            with pytest.raises(Unauthenticated):
                await access.gate.admit_call("/pagekv.v1.InferenceService/Abort", Call())
        stop.set()
        return await running

    assert asyncio.run(main()) == 0
    assert access.gate is not None
    assert not [thread for thread in threading.enumerate() if thread.name == "audit log" and thread not in others]
    assert "refusals left out: " in audit.read_text().splitlines()[-1]


def with_gateway(folder: Path, listen: str) -> list[str]:
    """Flags of a manager with an address for a gateway."""
    write_identities(folder / "identities.toml", '[gateway]\nroles = ["generate"]\ntenant = "web"\n')
    return [f"--identities={folder / 'identities.toml'}", f"--gateway-listen={listen}"]


async def code_at(address: str, method: str) -> grpc.StatusCode:
    """The status of a call without metadata and fields."""
    async with grpc.aio.insecure_channel(address) as channel:
        # Any: without a serializer the stubs know no type of request.
        begin: Any = channel.unary_unary(method)
        call = begin(b"", timeout=60)
        with suppress(grpc.aio.AioRpcError):
            await call
        found: grpc.StatusCode = await call.code()
        return found


@pytest.mark.parametrize("unix", [False, True])
def test_a_gateway_has_an_address_and_an_identity_of_its_own(tmp_path: Path, unix: bool) -> None:
    with tempfile.TemporaryDirectory() as short:
        listen = f"unix:{short}/gateway" if unix else "127.0.0.1:0"

        async def body(running: Running) -> None:
            found = read_port_file(tmp_path / "port")
            assert found["gateway"].startswith(listen.removesuffix("0"))
            assert found["gateway"] != found["listen"]
            engine, own = "/vllm.grpc.engine.VllmEngine/HealthCheck", "/pagekv.v1.InferenceService/GetModelInfo"
            unknown, unimplemented = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED
            assert await code_at(found["gateway"], engine) == grpc.StatusCode.OK
            # Nothing else is served there, and nothing at the other port to who shows nothing.
            assert await code_at(found["gateway"], own) == unimplemented
            assert await code_at(found["listen"], engine) == unimplemented
            assert await code_at(found["listen"], own) == unknown
            async with grpc.aio.insecure_channel(found["gateway"]) as channel:
                ask = health_pb2_grpc.HealthStub(channel).Check
                assert (await ask(health_pb2.HealthCheckRequest())).status == NOT_SERVING
                attach(running.manager.engine, model(tmp_path))
                await running.until_health(SERVING)
                assert (await ask(health_pb2.HealthCheckRequest())).status == SERVING

        assert run(config(tmp_path, *with_gateway(tmp_path, listen)), body) == 0


def test_calls_at_the_gateways_address_count_for_its_tenant(tmp_path: Path) -> None:
    bounds = tmp_path / "tenants.toml"
    bounds.write_text("[tenants.web]\nmax_calls = 1\n")

    async def body(running: Running) -> None:
        at, method = read_port_file(tmp_path / "port")["gateway"], "/vllm.grpc.engine.VllmEngine/HealthCheck"
        account = running.manager.engine.accounts.of("web")
        for _ in range(2):
            assert await code_at(at, method) == grpc.StatusCode.OK
        account.calls += 1
        assert await code_at(at, method) == grpc.StatusCode.RESOURCE_EXHAUSTED
        account.calls -= 1

    assert run(config(tmp_path, f"--tenants={bounds}", *with_gateway(tmp_path, "127.0.0.1:0")), body) == 0


def test_the_gateways_address_may_be_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with held_port() as port, hold(port) as taken:
        taken.listen()
        flags = with_gateway(tmp_path, f"127.0.0.1:{port}")
        status, words = main(["--listen=127.0.0.1:0", f"--executor={NOWHERE}", *flags], caplog)
    assert status == 1
    assert words == f"cannot start: --gateway-listen: cannot listen on 127.0.0.1:{port}: another process is using it"


def test_it_stops_while_an_executor_keeps_it_waiting(tmp_path: Path) -> None:
    """Describe may take minutes of profiling, which SIGTERM does not wait for."""
    asked = asyncio.Event()

    async def describe(request: bytes, context: object) -> bytes:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def main() -> int:
        silent = grpc.aio.server()
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Describe": grpc.unary_unary_rpc_method_handler(describe)
        }
        silent.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("pagekv.steps.v1.ExecutorService", handlers),)
        )
        port = silent.add_insecure_port("127.0.0.1:0")
        await silent.start()
        stop = asyncio.Event()
        manager = server.Manager(config(tmp_path, "--executor", f"127.0.0.1:{port}"), None)
        task = asyncio.create_task(manager.run(stop))
        await asked.wait()
        stop.set()
        status = await asyncio.wait_for(task, 120)
        await silent.stop(None)
        return status

    assert asyncio.run(main()) == 0


def test_a_broken_engine_ends_the_process_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving, breaking = asyncio.Event(), asyncio.Event()

    async def broken(self: EngineLoop) -> None:
        await serving.wait()
        breaking.set()
        raise RuntimeError("out of luck")

    async def body(running: Running) -> None:
        serving.set()
        await breaking.wait()
        # Turns enough for the manager to see it before it is told to stop.
        for _ in range(100):
            await asyncio.sleep(0)

    monkeypatch.setattr(EngineLoop, "run", broken)
    assert run(config(tmp_path), body) == 1
    assert "out of luck" in caplog.text


def test_an_engine_that_breaks_while_requests_finish_is_told_and_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: EngineLoop) -> None:
        # Until the manager shuts down, in the middle of a request.
        self._live.idle.clear()
        while not self._state.draining:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0)
        raise RuntimeError("out of luck")

    async def body(running: Running) -> None:
        pass

    monkeypatch.setattr(EngineLoop, "run", broken)
    # The grace time is longer than the test may take.
    assert run(config(tmp_path, "--grace-s", "3600"), body) == 1
    assert "out of luck" in caplog.text


def test_an_error_while_closing_hides_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []

    async def broken(self: EngineLoop) -> None:
        raise RuntimeError("out of luck")

    stop = server.Manager._stop_listening

    async def stop_listening(self: server.Manager, grace_s: float) -> None:
        await stop(self, grace_s)
        raise OSError("cannot be closed")

    async def close(self: Exporters) -> None:
        closed.append("exporters")

    async def body(running: Running) -> None:
        pass

    monkeypatch.setattr(EngineLoop, "run", broken)
    monkeypatch.setattr(server.Manager, "_stop_listening", stop_listening)
    monkeypatch.setattr(Exporters, "close", close)
    with pytest.raises(OSError, match="cannot be closed"):
        run(config(tmp_path), body)
    assert "out of luck" in caplog.text
    assert closed == ["exporters"]


def test_a_taken_port_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, words = main(["--listen", f"127.0.0.1:{port}", "--executor", NOWHERE], caplog)
    assert (status, words) == (
        1,
        f"cannot start: cannot listen on 127.0.0.1:{port}: another process is using it",
    )


async def nothing_listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False


def test_an_error_while_closing_is_not_told_as_one_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = server.Manager._start

    async def start(self: server.Manager) -> None:
        await started(self)
        os.kill(os.getpid(), signal.SIGTERM)

    async def close(self: Exporters) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(server.Manager, "_start", start)
    monkeypatch.setattr(Exporters, "close", close)
    port_file = tmp_path / "port"
    status, words = main(["--listen", "127.0.0.1:0", "--executor", NOWHERE, "--port-file", str(port_file)], caplog)
    assert (status, words.partition(":")[0]) == (1, "stopped by an error")
    assert read_port_file(port_file).keys() == {"listen"}


@pytest.mark.parametrize("flag", ["--listen", "--http-listen", "--kv-events-endpoint", "--record-steps", "--port-file"])
def test_a_start_that_fails_leaves_nothing_and_says_one_thing(
    flag: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every part that was open already is closed, without a trace in the log or in files but the reason."""
    with socket.create_server(("127.0.0.1", 0)) as taken, held_port() as port:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = {
            "--listen": f"127.0.0.1:{port}",
            "--http-listen": "127.0.0.1:0",
            "--kv-events-endpoint": "tcp://127.0.0.1:0",
            "--record": str(tmp_path / "trace"),
            "--record-steps": str(tmp_path / "steps"),
            "--otlp-endpoint": "http://127.0.0.1:9",
            "--port-file": str(tmp_path / "port"),
            "--executor": NOWHERE,
        }
        wrong = {"--kv-events-endpoint": f"tcp://{address}"}
        wrong |= dict.fromkeys(("--record-steps", "--port-file"), str(tmp_path / "none" / "such"))
        flags[flag] = wrong.get(flag, address)
        argv = [word for item in flags.items() for word in item]
        status, words = main(["--kv-events", *argv], caplog)
        gc.collect()
        assert status == 1
        assert words.startswith("cannot start: ")
        assert (str(tmp_path / "none") if flag in ("--record-steps", "--port-file") else address) in words
        assert asyncio.run(nothing_listens(port))
    told = read_port_file(tmp_path / "port")
    if flag != "--port-file":
        assert f"cannot start: {told['cannot_start']}" == words
        (tmp_path / "port").unlink()
    assert [path.name for path in tmp_path.iterdir()] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == ["cannot start"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_start_without_an_extra_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing package ends the start after the port for clients was opened, without another trace either."""
    monkeypatch.setitem(sys.modules, "pagekv.kvmanager.observe.http_server", None)
    record, port_file = str(tmp_path / "trace"), str(tmp_path / "port")
    flags = ["--listen", "127.0.0.1:0", "--executor", NOWHERE, "--record", record, "--port-file", port_file]
    status, words = main([*flags, "--http-listen", "127.0.0.1:0"], caplog)
    assert (status, [path.name for path in tmp_path.iterdir()]) == (1, ["port"])
    assert words.startswith("cannot start: --http-listen needs ")
    assert f"cannot start: {read_port_file(tmp_path / 'port')['cannot_start']}" == words
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == ["cannot start"]
