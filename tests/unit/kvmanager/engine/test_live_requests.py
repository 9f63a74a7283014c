"""Live requests, their readers, and what is still to be read."""

from __future__ import annotations

import pytest
from support.engine.engine_harness import Bench, command, described, expect, read, run, until

from pagekv.common.errors import Overloaded, Unavailable
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams


def test_a_sequence_that_ended_before_the_others_counts_as_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a sequence neither waits nor runs, but its tokens are held."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.005
        stream = engine.submit(command("a", [1, 2], n=3, max_tokens=40))
        await until(lambda: engine.statistics.stats().running_sequences == 3)
        engine.finish_sequence(stream, 0)
        engine.finish_sequence(stream, 2)
        assert (engine.statistics.stats().running_sequences, engine.statistics.stats().unread_sequences) == (1, 2)
        with pytest.raises(Overloaded, match="2 sequences have ended whose readers have not taken them, at most 2"):
            engine.submit(command("b", [3]))
        engine.release(stream)
        assert engine.statistics.stats().unread_sequences == 0
        searching = SamplingParams(max_tokens=4, beam_width=3)
        search = engine.submit(GenerateCommand("beams", [1, 2], searching, 2))
        await read(search)
        assert engine.statistics.stats().unread_sequences == 2
        engine.release(search)
        failing = engine.submit(command("b", [3], max_tokens=40))
        await until(lambda: engine.statistics.stats().running_sequences == 1)
        bench.description = described(model_fingerprint="07e6")
        assert bench.link is not None
        bench.link.lose()
        with pytest.raises(Unavailable):
            await read(failing)
        assert engine.statistics.stats().unread_sequences == 1
        engine.release(failing)
        assert engine.statistics.stats().unread_sequences == 0

    run(monkeypatch, body, max_unread=2)


def test_only_a_requests_own_reader_can_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id is free as soon as its request has ended, and the reader of the ended one may still be at work."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        first = engine.submit(command("same", [1, 2, 3], n=2))
        await until(lambda: engine.snapshots.block_tables("same") is None)
        second = engine.submit(command("same", [3, 2, 1]))
        engine.release(first)
        engine.finish_sequence(first, 1)
        engine.finish_sequence(first, 0)
        assert await read(second) == expect([3, 2, 1])
        assert engine.statistics.stats().aborted_requests_total == 0
        third = engine.submit(command("same", [3, 2, 1]))
        engine.release(third)
        assert engine.snapshots.block_tables("same") is None

    run(monkeypatch, body)
