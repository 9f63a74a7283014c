"""KV events and recordings (requests, decisions) that the manager writes for other programs while it serves.

An exporter that breaks is logged and closed; serving goes on.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.observe.flags import ObserveConfig
from pagekv.kvmanager.observe.recording.file import RecordingFile
from pagekv.kvmanager.observe.recording.step_recorder import StepRecorder
from pagekv.kvmanager.observe.recording.workload_recorder import WorkloadRecorder

if TYPE_CHECKING:
    from pagekv.kvmanager.observe.kv_events.publisher import KvEventPublisher


class Exporters:
    """States: made → open (`open`) → closed (`close`)."""

    def __init__(self, config: ObserveConfig, planning: EngineConfig) -> None:
        """`planning` is the configuration of the engine whose decisions may be recorded."""
        self._config = config
        self._planning = planning
        self._files: list[RecordingFile] = []
        self._workload: WorkloadRecorder | None = None
        self._publisher: KvEventPublisher | None = None
        self._publishing: asyncio.Task[None] | None = None

    def open(self, engine: EngineLoop) -> None:
        """Adds observers to an engine that does not run yet. Raises OSError if a file or an endpoint cannot be opened,
        and ImportError without ZeroMQ; the caller then calls `discard`.
        """
        config, planning = self._config, self._planning
        if config.kv_events:
            from pagekv.kvmanager.observe.kv_events.publisher import KvEventPublisher

            self._publisher = KvEventPublisher(config.kv_events_endpoint, config.kv_events_replay_endpoint)
            self._publisher.bind()
            engine.observers.add(self._publisher)
            self._publishing = asyncio.create_task(self._publisher.run(engine), name="KV events")
        if config.record:
            self._workload = WorkloadRecorder(self._recording("record", config.record, "requests"))
            engine.observers.add(self._workload)
        if config.record_steps:
            file = self._recording("record-steps", config.record_steps, "steps")
            engine.observers.add(StepRecorder(file, planning))

    def _recording(self, flag: str, path: str, what: str) -> RecordingFile:
        """Raises OSError, which names the flag and the file."""
        try:
            self._files.append(RecordingFile(Path(path), what))
        except OSError as error:
            remedy = "name a file in a folder that is there and may be written to"
            raise OSError(f"--{flag} {path}: cannot be written: {error.strerror}; {remedy}") from error
        return self._files[-1]

    def listening(self) -> dict[str, Any]:
        """Endpoints of KV events and names of recordings, with the keys of `pagekv.common.port_file`."""
        found: dict[str, Any] = {}
        if self._publisher is not None:
            publisher = self._publisher
            found["kv_events"] = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        if self._files:
            found["recordings"] = [str(file.path) for file in self._files]
        return found

    async def discard(self) -> None:
        """As `close` where serving never began: recordings are removed."""
        await self.close()
        for file in self._files:
            file.discard()

    async def close(self) -> None:
        """To be called after the engine has stopped. Idempotent."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait([self._publishing])
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._workload is not None:
            self._workload.flush()
        for file in self._files:
            await asyncio.to_thread(file.close)
