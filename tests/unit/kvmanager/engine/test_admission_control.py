"""Requests that are refused when they are submitted, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engine.engine_harness import command, expect, read, run, until
from support.event_loop import run_by

from pagekv.common.errors import AlreadyExists, InvalidRequest, LimitExceeded, Overloaded
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.tenant import Tenant


@run_by(run, max_queue=6)
async def test_the_queue_counts_sequences(engine: EngineLoop) -> None:
    streams = [engine.submit(command("a", [1], n=3)), engine.submit(command("b", [2], n=2))]
    with pytest.raises(AlreadyExists) as used:
        engine.submit(command("a", [1]))
    assert (used.value.kind, used.value.name) == ("request", "a")
    with pytest.raises(Overloaded, match="5 sequences wait, at most 6") as full:
        engine.submit(command("c", [3], n=2))
    assert full.value.metadata == {"limit": "6", "flag": "--max-queue"}
    streams.append(engine.submit(command("c", [3])))
    assert [await read(stream) for stream in streams] == [expect([i]) for i in (1, 2, 3)]
    assert engine.statistics.stats().rejected_requests_total == 1


@run_by(run, max_unread=3)
async def test_answers_that_nobody_takes_are_bounded(engine: EngineLoop) -> None:
    """A reader that takes its answer, or goes without, makes room. Live requests do not count."""

    def idle() -> bool:
        stats = engine.statistics.stats()
        return stats.running_sequences + stats.waiting_sequences == 0

    streams = [engine.submit(command("a", [1], n=2)), engine.submit(command("b", [2]))]
    await until(idle)
    with pytest.raises(Overloaded) as full:
        engine.submit(command("c", [3]))
    assert str(full.value) == (
        "3 sequences have ended that their clients have not read, at most 3: read open streams to their ends, or "
        "cancel them"
    )
    assert full.value.metadata == {"limit": "3"}
    assert await read(streams[0]) == expect([1])
    engine.release(streams[0])
    engine.release(streams[0])
    assert engine.statistics.stats().unread_sequences == 1
    streams.append(engine.submit(command("c", [3])))
    engine.release(streams.pop())
    assert engine.statistics.stats().aborted_requests_total == 1
    streams.append(engine.submit(command("d", [4])))
    streams.append(engine.submit(command("e", [4])))
    await until(idle)
    with pytest.raises(Overloaded, match="3 sequences have ended"):
        engine.submit(command("f", [3]))
    assert engine.statistics.stats().rejected_requests_total == 2


@run_by(run, max_queue=6)
async def test_what_no_deployment_of_this_size_can_ever_take_is_refused_for_good(engine: EngineLoop) -> None:
    """Not as RESOURCE_EXHAUSTED, which says to come back."""
    with pytest.raises(InvalidRequest, match=r"from 1 to 6 \(--max-queue\), got 7") as caught:
        engine.submit(command("a", [1], n=7))
    assert caught.value.field == "sampling_params.n"
    beams = SamplingParams(max_tokens=2, beam_width=33)
    with pytest.raises(InvalidRequest, match=r"from 0 to 8 \(--max-running .*\), got 33"):
        engine.submit(GenerateCommand("b", [1], beams))
    assert engine.statistics.stats().rejected_requests_total == 0


@run_by(run)
async def test_a_request_that_can_never_get_enough_beside_the_floors_of_others_is_refused(engine: EngineLoop) -> None:
    """A request of the same size gets in where the floor is its own tenant's."""
    scheduler = engine._state.serving()
    size, blocks = scheduler.pool.block_size, scheduler.pool.num_blocks
    scheduler.set_tenants({}, {1: blocks - 1})
    prompt = [1] * size
    # A tenant is not told how many blocks the floors of others keep.
    for tenant, words in (
        (0, f"; .* floors of other tenants keep {blocks - 1}$"),
        (2, ", more than .* leave now$"),
    ):
        refused = replace(command("a", prompt, max_tokens=2), tenant=Tenant("", tenant))
        with pytest.raises(LimitExceeded, match=f"need 2 blocks{words}"):
            engine.submit(refused)
    stream = engine.submit(replace(command("a", prompt, max_tokens=2), tenant=Tenant("", 1)))
    assert len((await read(stream))[0]) == 2
