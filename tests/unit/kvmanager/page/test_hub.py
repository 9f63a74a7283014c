"""Viewers have the state of the pools, by a snapshot and differences; and nothing runs while nobody looks."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from pathlib import Path

import pytest
from support.browser.page_reader import PageReader
from support.engine import engine_harness
from support.engine.engine_harness import Bench, command, read, until
from support.event_loop import run_by

from pagekv.common.errors import LimitExceeded, Overloaded
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.observe.metrics.request_metrics import RequestMetrics
from pagekv.kvmanager.page import hub as hub_module
from pagekv.kvmanager.page.block_states import device_bytes, host_bytes
from pagekv.kvmanager.page.hub import MAX_VIEWERS, PageHub, PoolFrame, Viewer, request_rows
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.swapping import SwapPolicy


class Look:
    """A hub that looks when the test says so, at an engine that it observes."""

    def __init__(self, engine: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub_module, "LOOK_S", 3600.0)
        self.now = 0.0
        # The frame that each viewer has.
        self._read: dict[Viewer, PoolFrame] = {}
        self.engine = engine
        self.hub = PageHub(engine, RequestMetrics(), lambda: self.now)
        engine.observers.add(self.hub.feed)

    def look(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.hub.look()

    async def read(self, viewer: Viewer, reader: PageReader) -> None:
        """Gives the reader the message for its viewer, if there is one now."""
        latest = self.hub.frame
        if latest is not None and latest is not self._read.get(viewer):
            reader.take(json.loads(await viewer.next()))
            self._read[viewer] = latest

    def agrees(self, reader: PageReader) -> bool:
        blocks = self.engine.snapshots.block_map()
        assert blocks is not None
        return (
            bytes(reader.device) == device_bytes(blocks.ref_counts, blocks.pins, blocks.published).tobytes()
            and bytes(reader.host) == host_bytes(blocks.host_ref_counts, blocks.host_keyed).tobytes()
            and reader.requests == request_rows(self.engine)[0]
        )


def looking() -> bool:
    """Whether the hub's task runs."""
    return any(task.get_name() == "live page" for task in asyncio.all_tasks())


@pytest.mark.parametrize("seed", range(4))
def test_a_snapshot_and_differences_are_what_the_pools_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)

    async def body(engine: EngineLoop, bench: Bench) -> None:
        look = Look(engine, monkeypatch)
        families = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
        streams: list[asyncio.Task[object]] = []
        viewers: list[tuple[Viewer, PageReader]] = []
        for number in range(60):
            action = rng.randrange(10)
            prompt = [*rng.choice(families)[: rng.randrange(4, 40)], rng.randrange(50)]
            if action < 5 and len(streams) < 40:
                with suppress(LimitExceeded):
                    stream = engine.submit(command(f"r{number}", prompt, rng.randrange(1, 40), n=rng.randrange(1, 3)))
                    streams.append(asyncio.create_task(read(stream)))
            elif action == 5:
                engine.abort(f"r{rng.randrange(60)}")
            elif action == 6:
                with suppress(LimitExceeded):
                    engine.queries.pin_prefix(prompt[:8], CacheIdentity(), 60)
            elif action == 7:
                engine.queries.reset_prefix_cache(rng.random() < 0.5)
            elif action == 8 and number > 30 and bench.link is not None and len(bench.attaches) < 3:
                bench.link.lose()
            elif len(viewers) < 4:
                viewers.append((look.hub.add_viewer(), PageReader()))
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            look.look()
            # Some read seldom.
            for position, (viewer, reader) in enumerate(viewers):
                if rng.randrange(position + 1) == 0:
                    await look.read(viewer, reader)
                    assert look.agrees(reader)
        await asyncio.gather(*streams)
        engine.queries.reset_prefix_cache(True)
        look.look()
        for viewer, reader in viewers:
            await look.read(viewer, reader)
            assert look.agrees(reader)
            assert [point["n"] for point in reader.points] == sorted({point["n"] for point in reader.points})
            assert [event["n"] for event in reader.events] == sorted({event["n"] for event in reader.events})
            look.hub.remove_viewer(viewer)

    monkeypatch.setattr(engine_harness, "DESCRIPTION", engine_harness.described(host_kv_bytes=32))
    limits = SchedulerLimits(64, 32, 0.0, prefix_cache=True, swap=SwapPolicy("swap"), write_back=True)
    engine_harness.run(body, num_device_blocks=40, num_host_blocks=32, limits=limits)


@run_by(engine_harness.run, num_device_blocks=40)
async def test_another_manager_is_told_from_the_one_before(engine: EngineLoop) -> None:
    """Both count epochs and events from 1."""
    told = []
    for hub in [PageHub(engine, RequestMetrics()) for _ in range(2)]:
        for _ in range(2):
            viewer = hub.add_viewer()
            told.append(json.loads(await viewer.next()))
            hub.remove_viewer(viewer)
    assert {message["epoch"] for message in told} == {told[0]["epoch"]}
    first, again, other, other_again = [message["boot"] for message in told]
    assert first == again != other == other_again


@run_by(engine_harness.run, num_device_blocks=40)
async def test_a_page_keeps_its_charts_when_the_executor_is_lost(
    engine: EngineLoop, bench: Bench, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Look(engine, monkeypatch)
    viewer, reader = look.hub.add_viewer(), PageReader()
    for _ in range(3):
        look.look()
        await look.read(viewer, reader)
    assert bench.link is not None
    bench.link.lose()
    await until(lambda: len(bench.attaches) == 2)
    await engine.wait_ready()
    look.look()
    await look.read(viewer, reader)
    assert reader.snapshots == 2
    assert [point["at"] for point in reader.points] == [1, 2, 3, 4]
    look.hub.remove_viewer(viewer)


@run_by(engine_harness.run, num_device_blocks=40)
async def test_nothing_runs_while_nobody_looks(engine: EngineLoop, *, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Look(engine, monkeypatch)
    await read(engine.submit(command("unseen", [1, 2, 3])))
    assert look.hub.feed.total == 0
    assert not looking()
    viewer, other = look.hub.add_viewer(), look.hub.add_viewer()
    assert looking()
    look.hub.remove_viewer(viewer)
    look.hub.remove_viewer(viewer)
    await asyncio.sleep(0)
    assert looking()
    look.hub.remove_viewer(other)
    await until(lambda: not looking())
    assert look.hub.frame is None


@run_by(engine_harness.run, num_device_blocks=40)
async def test_too_many_viewers_are_refused(engine: EngineLoop, *, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Look(engine, monkeypatch)
    viewers = [look.hub.add_viewer() for _ in range(MAX_VIEWERS)]
    with pytest.raises(Overloaded, match="16 pages are open"):
        look.hub.add_viewer()
    look.hub.remove_viewer(viewers.pop())
    viewers.append(look.hub.add_viewer())
    for viewer in viewers:
        look.hub.remove_viewer(viewer)


@run_by(engine_harness.run, num_device_blocks=40)
async def test_a_viewer_is_woken_by_what_is_new_and_left_alone_otherwise(
    engine: EngineLoop, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Look(engine, monkeypatch)
    viewer = look.hub.add_viewer()
    assert json.loads(await viewer.next())["type"] == "snapshot"
    waiting = asyncio.create_task(viewer.next())
    # Too soon for another point of the charts, and nothing happened.
    look.look(0.1)
    await asyncio.sleep(0)
    assert not waiting.done()
    engine.submit(command("news", [1, 2, 3]))
    await until(lambda: engine.statistics.stats().steps_total > 0)
    look.look(0.1)
    assert json.loads(await waiting)["type"] == "delta"
    look.hub.remove_viewer(viewer)
    await until(lambda: engine.statistics.stats().running_sequences == 0)


@run_by(engine_harness.run, num_device_blocks=40)
async def test_a_look_that_fails_costs_no_engine(engine: EngineLoop, *, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "LOOK_S", 0.001)
    hub = PageHub(engine, RequestMetrics())
    monkeypatch.setattr(hub_module, "request_rows", lambda engine: 1 / 0)
    viewer = hub.add_viewer()
    await asyncio.sleep(0.01)
    monkeypatch.undo()
    assert json.loads(await viewer.next())["type"] == "snapshot"
    hub.remove_viewer(viewer)


@run_by(engine_harness.run)
async def test_charts_have_the_durations_of_requests(engine: EngineLoop) -> None:
    """Each has a tile of its name."""
    script = Path(hub_module.__file__).parent.joinpath("static", "main.js").read_text()
    requests = RequestMetrics(lambda: 0.0)
    now = 0.0
    hub = PageHub(engine, requests, lambda: now)
    hub.look()
    requests.time_to_first_token.observe(0.5)
    requests.inter_token_latency.observe(0.02, 10)
    requests.queue_time.observe(0.1)
    now = 1.0
    hub.look()
    point = hub._rates.since(1)[-1]
    shown = {name: point[name] for name in ("ttft_ms", "inter_token_ms", "queue_ms")}
    assert shown == {"ttft_ms": 500.0, "inter_token_ms": pytest.approx(20.0), "queue_ms": 100.0}
    assert all(f'tile("latencies", "{name}"' in script for name in shown)


@run_by(engine_harness.run)
async def test_the_work_of_ranks_is_among_the_totals(engine: EngineLoop) -> None:
    now = 0.0
    hub = PageHub(engine, RequestMetrics(), lambda: now)
    hub.look()
    assert hub.frame is not None
    assert hub.frame.fields["totals"]["executor_rank_us"] == []
    engine._state.totals.executor_rank_us[:] = [7, 9]
    now = 1.0
    hub.look()
    assert hub.frame.fields["totals"]["executor_rank_us"] == [7, 9]
    assert json.dumps(hub.frame.fields["totals"])
