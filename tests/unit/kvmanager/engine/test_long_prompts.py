"""Long prompts on their way into the engine: turns of the event loop between slices, order, and every way out."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import pytest
from support.engine.engine_harness import Bench, command, described, expect, read, run
from support.event_loop import run_by

from pagekv.common.errors import AlreadyExists, Draining, InvalidRequest, Overloaded
from pagekv.kvmanager.engine import executor_wire, loop
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.kvcache.block_hash import chain_digests
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.scheduling import prepared_prompt, publishing
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt
from pagekv.kvmanager.scheduling.sequence import LiveRequest

LONG = [*range(1, 42)]


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slices of two blocks; how many tokens each so far had."""
    done: list[int] = []
    monkeypatch.setattr(prepared_prompt, "SLICE_BLOCKS", 2)

    def pack(token_ids: array[int]) -> bytes:
        done.append(len(token_ids))
        return executor_wire.pack_token_ids(token_ids)

    monkeypatch.setattr(loop, "pack_token_ids", pack)
    return done


@run_by(run)
async def test_others_run_between_the_slices_of_a_long_prompt(
    engine: EngineLoop, *, monkeypatch: pytest.MonkeyPatch, slices: list[int]
) -> None:
    """And nothing of it is left for the step to hash."""
    hashed: list[int] = []

    def look(parent: bytes, tokens: bytes, *others: Any) -> list[bytes]:
        hashed.append(len(tokens) // 4)
        return chain_digests(parent, tokens, *others)

    monkeypatch.setattr(publishing, "chain_digests", look)
    entering = asyncio.create_task(engine.queue(command("long", LONG)))
    seen = []
    while not entering.done():
        await asyncio.sleep(0)
        seen.append(sum(slices))
    assert slices == [8, 8, 8, 8, 8, 1]
    assert {8, 16, 24, 32, 40, 41} <= set(seen)
    assert await read(entering.result()) == expect(LONG)
    # At most the block in which the answer begins.
    assert sum(hashed) <= 4


@run_by(run)
async def test_a_prompt_of_one_slice_waits_for_nothing(engine: EngineLoop, *, slices: list[int]) -> None:
    entering = engine.queue(command("short", LONG[:8]))
    with pytest.raises(StopIteration) as done:
        entering.send(None)
    assert slices == []
    assert await read(done.value.value) == expect(LONG[:8])


class Order(Observer):
    def __init__(self) -> None:
        self.names: list[str] = []

    def submitted(self, request: LiveRequest) -> None:
        self.names.append(request.command.request_id)


def test_requests_are_queued_in_the_order_of_their_calls() -> None:
    """A short one behind a long one does not pass it, also when one between them gives up."""
    order = Order()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        prompts = {"first": LONG, "short": [1, 2], "gone": LONG, "second": LONG[::-1], "last": [3]}
        calls = {name: asyncio.create_task(engine.queue(command(name, prompt))) for name, prompt in prompts.items()}
        await asyncio.sleep(0)
        calls.pop("gone").cancel()
        for name, call in calls.items():
            assert await read(await call) == expect(prompts[name])
        assert order.names == ["first", "short", "second", "last"]

    run(body, [order])


@pytest.mark.parametrize("turns", range(1, 7))
@run_by(run)
async def test_a_call_that_is_cancelled_meanwhile_leaves_nothing(engine: EngineLoop, *, turns: int) -> None:
    entering = asyncio.create_task(engine.queue(command("long", LONG)))
    for _ in range(turns):
        await asyncio.sleep(0)
    assert not engine.abort("long")
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert engine.snapshots.list_requests(9).total == 0
    assert not engine._long_prompts.num_entering
    assert await read(await engine.queue(command("long", LONG))) == expect(LONG)


@run_by(run)
async def test_an_id_that_is_taken_is_refused_before_and_after_the_work(
    engine: EngineLoop, *, slices: list[int]
) -> None:
    stream = engine.submit(command("taken", [1, 2, 3]))
    with pytest.raises(AlreadyExists):
        await engine.queue(command("taken", LONG))
    assert slices == []
    entering = asyncio.create_task(engine.queue(command("other", LONG)))
    await asyncio.sleep(0)
    # Long enough to be there until the other one comes.
    faster = engine.submit(command("other", [4, 5, 6], 40))
    with pytest.raises(AlreadyExists):
        await entering
    assert [await read(each) for each in (stream, faster)] == [expect([1, 2, 3]), expect([4, 5, 6], 40)]


@run_by(run, max_queue=3)
async def test_prompts_on_their_way_into_the_queue_count_as_waiting(engine: EngineLoop) -> None:
    """One is being prepared and others wait for their turn; none of them is refused in the end."""
    first = asyncio.create_task(engine.queue(command("first", LONG, n=2)))
    await asyncio.sleep(0)
    second = asyncio.create_task(engine.queue(command("second", LONG)))
    await asyncio.sleep(0)
    for prompt in (LONG, [1]):
        with pytest.raises(Overloaded, match="the queue is full: 3 sequences wait, at most 3") as refused:
            await engine.queue(command("third", prompt))
        assert (refused.value.limit, refused.value.flag) == (3, "--max-queue")
    with pytest.raises(Overloaded):
        engine.submit(command("fourth", [1]))
    second.cancel()
    await asyncio.sleep(0)
    third = asyncio.create_task(engine.queue(command("third", LONG)))
    for call in (first, third):
        await read(await call)
    assert await read(await engine.queue(command("last", LONG))) == expect(LONG)


@run_by(run)
async def test_a_prompt_that_can_never_fit_is_refused_before_the_work(engine: EngineLoop, *, slices: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        await engine.queue(command("endless", [1] * 10_000))
    assert slices == []


@run_by(run)
async def test_a_manager_that_shuts_down_meanwhile_refuses(engine: EngineLoop) -> None:
    entering = asyncio.create_task(engine.queue(command("long", LONG)))
    await asyncio.sleep(0)
    engine._state.draining = True
    with pytest.raises(Draining):
        await entering
    assert engine.snapshots.list_requests(9).total == 0


@run_by(run)
async def test_another_executor_meanwhile_makes_no_difference(engine: EngineLoop, bench: Bench) -> None:
    """Its pools are empty and smaller, so what was found in the table before is neither there nor a block of it."""
    for name, prompt in (("others", [0] * 100), ("before", LONG)):
        assert await read(engine.submit(command(name, prompt))) == expect(prompt)
    assert bench.link is not None
    bench.description = described(device_kv_bytes=16)
    (found,) = (new.block_ids for plan in bench.plans for new in plan.new if new.token_ids[0] == LONG[0])
    assert max(found) >= 16
    entering = asyncio.create_task(engine.queue(command("long", LONG)))
    for _ in range(3):
        await asyncio.sleep(0)
    bench.link.lose()
    assert await read(await entering) == expect(LONG)
    assert len(bench.attaches) == 2


@run_by(run)
async def test_what_was_prepared_for_another_model_is_not_used(engine: EngineLoop, bench: Bench) -> None:
    wrong = PreparedPrompt(b"another root", [bytes(32)] * 10, packed=b"no field")
    assert await read(engine.submit(command("long", LONG), wrong)) == expect(LONG)
    (digest,) = {plan.new[0].sequence.digests[0] for plan in bench.plans if plan.new}
    assert digest != bytes(32)
    assert not bench.plans[0].new[0].sequence.request.packed_prompt


@run_by(run)
async def test_a_short_prompt_waits_for_no_long_one_of_another_tenant(engine: EngineLoop, *, slices: list[int]) -> None:
    def of(tenant: str, name: str, prompt: list[int]) -> GenerateCommand:
        return replace(command(name, prompt), tenant=engine.accounts.tenant(tenant))

    long = [asyncio.create_task(engine.queue(of("flood", str(at), LONG))) for at in range(3)]
    await asyncio.sleep(0)
    short = await engine.queue(of("quiet", "a", [1, 2]))
    assert not any(task.done() for task in long)
    assert await read(short) == expect([1, 2])
    for task in long:
        assert await read(await task) == expect(LONG)
