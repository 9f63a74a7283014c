"""Live requests, their readers, and what is still to be read."""

from __future__ import annotations

import pytest
from support.engine.engine_harness import Bench, command, described, expect, read, run, until
from support.event_loop import run_by

from pagekv.common.errors import Overloaded, Unavailable
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.tenant import Tenant


@run_by(run, max_unread=2)
async def test_a_sequence_that_ended_before_the_others_counts_as_unread(engine: EngineLoop, bench: Bench) -> None:
    """Such a sequence neither waits nor runs, but its tokens are held."""
    bench.step_s = 0.005
    stream = engine.submit(command("a", [1, 2], n=3, max_tokens=40))
    await until(lambda: engine.statistics.stats().running_sequences == 3)
    engine.finish_sequence(stream, 0)
    engine.finish_sequence(stream, 2)
    assert (engine.statistics.stats().running_sequences, engine.statistics.stats().unread_sequences) == (1, 2)
    with pytest.raises(Overloaded, match="2 sequences have ended that their clients have not read, at most 2"):
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


@run_by(run)
async def test_only_a_requests_own_reader_can_end_it(engine: EngineLoop) -> None:
    """An id is free as soon as its request has ended, and the reader of the ended one may still be at work."""
    first = engine.submit(command("same", [1, 2, 3], n=2))
    await until(lambda: engine._live.get("same") is None)
    second = engine.submit(command("same", [3, 2, 1]))
    engine.release(first)
    engine.finish_sequence(first, 1)
    engine.finish_sequence(first, 0)
    assert await read(second) == expect([3, 2, 1])
    assert engine.statistics.stats().aborted_requests_total == 0
    third = engine.submit(command("same", [3, 2, 1]))
    engine.release(third)
    assert await engine.snapshots.block_tables("same") is None


@run_by(run)
async def test_nothing_is_kept_of_tenants_that_have_nothing_live_and_nothing_unread(engine: EngineLoop) -> None:
    """Each subject of a token may be a tenant of its own, so there is no end of names."""
    for number in range(3):
        tenant = Tenant(f"jwt:{number}", 1)
        read_whole, given_up = (
            engine.submit(GenerateCommand(name, [1, 2], SamplingParams(max_tokens=4), tenant=tenant))
            for name in ("whole", "given up")
        )
        await read(read_whole)
        assert engine._live.num_unread[tenant.name] > 0
        for stream in (read_whole, given_up):
            engine.release(stream)
    live = engine._live
    kept = (live._requests, live._by_stream, live._being_read, live.num_unread, live._readers, live._tenants)
    assert not any(kept)
