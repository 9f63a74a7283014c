"""An observer that breaks is logged and dropped, and serving goes on for the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

import pytest
from support.engine.engine_harness import Bench, command, expect, read, run

from pagekv.common.errors import Overloaded
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import Observer, Observers
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.listener import SchedulerListener

# `failed` comes with a broken invariant alone, which logs an error of its own.
CALLS = [
    name
    for listener in (SchedulerListener, Observer)
    for name in vars(listener)
    if not name.startswith("_") and name != "failed"
]


class Listing(Observer):
    """Lists its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []
        for name in CALLS:
            setattr(self, name, self._note(name))

    def _note(self, name: str) -> Callable[..., None]:
        return lambda *what: self.told.append(name)


class Broken(Listing):
    """Raises when it is told of `call`."""

    def __init__(self, call: str) -> None:
        super().__init__()
        setattr(self, call, self._break)

    def _break(self, *what: object) -> NoReturn:
        self.told.append("broke")
        raise ZeroDivisionError("out of luck")


async def every_call(engine: EngineLoop, bench: Bench) -> None:
    """Makes the engine call every method of an observer."""
    long = engine.submit(command("a", [1, 2, 3], 40))
    await long.take()
    assert bench.link is not None
    bench.link.lose()
    refused = engine.submit(command("b", [4, 5], n=2))
    with pytest.raises(Overloaded):
        engine.submit(command("c", [6]))
    assert await read(refused) == expect([4, 5])
    while await long.take():
        pass
    prompt = [1, 2, 3, 4, 5]
    assert await read(engine.submit(command("d", prompt))) == expect(prompt)
    engine.queries.cache.unpin(engine.queries.pin_prefix(prompt, CacheIdentity(), 60).pin_id)
    engine.queries.reset_prefix_cache(force=True)
    engine._state.serving().set_tenants({}, {})
    engine._state.serving().set_bound(StepBound(8, 1.0, 8))
    engine.submit(command("e", prompt))
    assert engine.abort("e")


@pytest.mark.parametrize("call", CALLS)
def test_one_that_raises_is_dropped_and_serving_goes_on(call: str, caplog: pytest.LogCaptureFixture) -> None:
    first, broken, last = Listing(), Broken(call), Listing()
    run(every_call, observers=[first, broken, last], max_queue=2)
    assert first.told == last.told
    assert {*first.told} == {*CALLS}
    before = first.told[: first.told.index(call)]
    assert broken.told == [*before, "broke"]
    (record,) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    assert record.exc_info is not None
    assert (vars(record)["fields"], str(record.exc_info[1])) == (
        {"observer": "Broken", "told": call},
        "out of luck",
    )


def test_one_that_is_added_later_is_told_from_then_on() -> None:
    observers, first, second = Observers(), Listing(), Listing()
    observers.rejected()
    observers.add(first)
    observers.rejected()
    observers.add(second)
    observers.detached()
    assert (first.told, second.told) == (["rejected", "detached"], ["detached"])


def test_everything_that_can_be_told_is_passed_on() -> None:
    assert {*CALLS, "failed"} <= {*vars(Observers)}
