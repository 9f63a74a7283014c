"""Exporters: opened before the engine runs, said where they are, and without a trace where a start fails."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from support.engine.engine_harness import Bench, command, config, read, run
from support.event_loop import in_event_loop

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.observe.exporters import Exporters
from pagekv.kvmanager.observe.flags import ObserveConfig


@in_event_loop
async def test_nothing_is_opened_that_is_not_asked_for() -> None:
    exporters = Exporters(ObserveConfig(), config())
    exporters.open(EngineLoop(config()))
    assert exporters.listening() == {}
    await exporters.close()


def test_endpoints_and_recordings_are_said_and_requests_are_written(tmp_path: Path) -> None:
    file = tmp_path / "requests"
    observe = ObserveConfig(kv_events=True, kv_events_endpoint="tcp://127.0.0.1:0", record=str(file))

    async def body(engine: EngineLoop, bench: Bench) -> None:
        exporters = Exporters(observe, config())
        exporters.open(engine)
        found = exporters.listening()
        assert found["recordings"] == [str(file)]
        assert found["kv_events"]["endpoint"].startswith("tcp://127.0.0.1:")
        assert found["kv_events"]["endpoint"] != observe.kv_events_endpoint
        # The harness has attached already, and the recording has to know the size of blocks.
        assert engine.model is not None
        exporters._workload.attached(engine.model, 1)  # type: ignore[union-attr]  # --record makes it
        await read(engine.submit(command("a", [1, 2, 3])))
        await exporters.close()
        await exporters.close()

    run(body)
    assert file.read_text().count("\n") == 1


def test_a_start_that_fails_leaves_no_file(tmp_path: Path) -> None:
    async def body() -> None:
        exporters = Exporters(
            ObserveConfig(record=str(tmp_path / "requests"), record_steps=str(tmp_path / "no" / "steps")), config()
        )
        with pytest.raises(OSError, match=r"^--record-steps .*/no/steps: cannot be written: No such file .*; name"):
            exporters.open(EngineLoop(config()))
        await exporters.discard()

    asyncio.run(body())
    assert [*tmp_path.iterdir()] == []


def test_a_taken_endpoint_is_named() -> None:
    async def body(address: str) -> None:
        exporters = Exporters(ObserveConfig(kv_events=True, kv_events_endpoint=address), config())
        with pytest.raises(OSError, match=f"--kv-events-endpoint {address}: "):
            exporters.open(EngineLoop(config()))
        await exporters.discard()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(body(f"tcp://127.0.0.1:{taken.getsockname()[1]}"))
