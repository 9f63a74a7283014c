"""The engine loop while two tenants compete, in virtual time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.engine.engine_harness import Bench, read
from support.engine.timed_engine import Step, flood, now_s, run_timed, submit

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.scheduling import scheduler
from pagekv.kvmanager.tenants.accounts import Accounts

PROMPT = [40, *range(30, 45)]


def planned_ahead(steps: list[Step]) -> float:
    """How long steps lay at the executor before they were begun, of all the time that steps took."""
    return sum(step.begun - step.came for step in steps) / sum(step.took for step in steps)


def idle(steps: list[Step]) -> float:
    """How long the executor had nothing to do between these steps, of all their time."""
    gaps = [after.begun - before.begun - before.took for before, after in pairwise(steps)]
    return sum(gaps) / sum(step.took for step in steps)


@pytest.mark.parametrize("flooders", [1, 2])
def test_a_quiet_tenants_first_token_takes_two_steps_beside_floods(
    monkeypatch: pytest.MonkeyPatch, flooders: int
) -> None:
    """The one that runs and its own, both of which are short, whenever the request comes."""
    accounts, waits = Accounts(), list[tuple[int, float]]()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        others = [each for at in range(flooders) for each in flood(engine, accounts, 120, f"flooder{at}")]
        for at in range(30):
            begun, steps = now_s(), len(bench.plans)
            stream = submit(engine, accounts, "quiet", f"q{at}", [at, *PROMPT], 2)
            await stream.take()
            waits.append((len(bench.plans) - steps, now_s() - begun))
            await read(stream)
            engine.release(stream)
        # Nobody was starved for it.
        assert {len((await read(stream))[0]) for stream in others} == {120}

    run_timed(monkeypatch, body, accounts)
    # The first ones came before the times of steps were known.
    assert all(count <= 2 for count, _ in waits[5:])
    # Two steps that decoded every sequence would take 33 ms or 62.
    assert max(s for _, s in waits[5:]) < 0.021


def test_steps_are_planned_late_and_bounded_while_tenants_compete_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "LINGERING_STEPS", 20)
    accounts, marks = Accounts(), list[int]()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        def after(steps: int) -> None:
            marks.append(len(bench.plans) + steps)

        others = flood(engine, accounts, 150)
        for _ in range(30):
            await others[0].take()
        marks.append(len(bench.plans))
        stream = submit(engine, accounts, "quiet", "q", PROMPT, 60)
        await stream.take()
        # Behind the steps from which times are learnt.
        after(15)
        assert len((await read(stream))[0]) == 59
        # Both steps in flight, and those for which they are said to compete.
        after(2 + scheduler.LINGERING_STEPS)
        engine.release(stream)
        for stream in others:
            await read(stream)

    steps = run_timed(monkeypatch, body, accounts)
    alone, settled, over = marks
    before, beside, after = steps[5:alone], steps[settled:over], steps[over:-5]
    assert min(map(len, (before, beside, after))) > 15
    # A whole step ahead.
    assert planned_ahead(before) > 0.95
    assert planned_ahead(after) > 0.95
    assert planned_ahead(beside) < 0.15
    # The executor hardly waits for it.
    assert max(idle(before), idle(after)) < 1e-9
    assert idle(beside) < 0.05
    # And with one tenant nobody is passed over.
    passed = [step.plan.scheduled_tokens.count(0) for step in steps]
    assert not any(passed[:alone])
    assert any(passed[settled:over])
    assert not any(passed[over:])
