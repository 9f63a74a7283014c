"""Streams' readers are woken in order and a few at a time: the engine never waits for more than a few messages."""

from __future__ import annotations

import asyncio

import pytest
from support.engine import engine_harness
from support.event_loop import in_event_loop

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.request.stream import RequestStream, SequenceDelta
from pagekv.kvmanager.request.wakeups import READERS_AT_ONCE, Wakeups


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Readers:
    """Streams that share wake-ups, each with a task that takes all there is; `taken` is what they took, in order."""

    def __init__(self, count: int) -> None:
        wakeups = Wakeups()
        self.streams = [RequestStream(f"r{number}", 1, wakeups) for number in range(count)]
        self.taken: list[tuple[int, list[int]]] = []
        self.tasks = [asyncio.create_task(self._read(number)) for number in range(count)]

    async def _read(self, number: int) -> None:
        while deltas := await self.streams[number].take():
            self.taken += [(number, delta.token_ids) for delta in deltas]

    def push(self, token: int) -> None:
        for stream in self.streams:
            stream.push_token(0, token, 0, 0)

    async def end(self) -> None:
        for stream in self.streams:
            stream.push(SequenceDelta(0, finish=FinishReason.ABORT))
        await asyncio.gather(*self.tasks)


@in_event_loop
async def test_a_few_readers_at_a_time_in_the_order_of_their_news() -> None:
    readers = Readers(50)
    await turns(2)
    readers.push(7)
    most = 0
    while len(readers.taken) < 50:
        before = len(readers.taken)
        await turns(1)
        most = max(most, len(readers.taken) - before)
    assert readers.taken == [(number, [7]) for number in range(50)]
    assert most == READERS_AT_ONCE
    await readers.end()


@in_event_loop
async def test_as_many_turns_go_by_as_readers_are_woken() -> None:
    """gRPC takes one notice of a written message in a turn of the loop."""
    readers = Readers(64)
    await turns(2)
    readers.push(7)
    passed = 0
    while len(readers.taken) < 64:
        await turns(1)
        passed += 1
    assert passed >= 64
    await readers.end()


@in_event_loop
async def test_the_first_reader_waits_for_no_turn_but_its_own() -> None:
    wakeups = Wakeups()
    for _ in range(2):
        reader = wakeups.reader()
        wakeups.add(reader)
        assert not reader.done()
        await turns(1)
        assert reader.done()
        await turns(3)


@in_event_loop
async def test_tokens_that_come_while_a_reader_waits_for_its_turn_are_one_message() -> None:
    readers = Readers(20)
    await turns(2)
    for token in (1, 2, 3):
        readers.push(token)
    await turns(60)
    assert readers.taken == [(number, [1, 2, 3]) for number in range(20)]
    await readers.end()


@in_event_loop
async def test_a_reader_that_is_never_idle_does_not_pass_those_that_wait() -> None:
    """Having more to read when it comes back puts it at the end of the line."""
    readers = Readers(12)
    await turns(2)
    readers.push(1)
    while not readers.taken:
        await turns(1)
    for _ in range(3):
        readers.push(2)
    while len(readers.taken) < 12 + READERS_AT_ONCE:
        await turns(1)
    assert [number for number, _ in readers.taken] == [*range(12), *range(READERS_AT_ONCE)]
    await readers.end()


@in_event_loop
async def test_a_reader_that_has_gone_takes_no_turn() -> None:
    readers = Readers(12)
    await turns(2)
    readers.push(1)
    for task in readers.tasks[:8]:
        task.cancel()
    await turns(2 + READERS_AT_ONCE)
    assert readers.taken == [(number, [1]) for number in range(8, 12)]
    readers.tasks = readers.tasks[8:]
    await readers.end()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_step_is_sent_before_any_reader_runs(depth: int) -> None:
    async def body(engine: EngineLoop, bench: engine_harness.Bench) -> None:
        in_flight: list[int] = []

        async def read(number: int) -> None:
            stream = engine.submit(engine_harness.command(f"r{number}", [number, 1, 2], max_tokens=20))
            tokens = 0
            while deltas := await stream.take():
                tokens += len(deltas[0].token_ids)
                if tokens < 15:
                    in_flight.append(len(bench.plans) - engine.statistics.stats().steps_total)

        await asyncio.gather(*map(read, range(8)))
        assert set(in_flight) == {depth}

    engine_harness.run(body, pipeline_depth=depth)
