"""The choice of threads and waiting, on machines whose steps take what a table says."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest

from pagekv.executor.cpu.threads import SmallSteps, Way, WayChooser, ways

SPIN, SLEEP, ONE = Way(2, True), Way(2, False), Way(1, True)
# Seconds of a step of 32 sequences, as measured: alone, and beside one and two processes that spin.
QUIET = {SPIN: 0.018, SLEEP: 0.020, ONE: 0.031}
NEIGHBOUR = {SPIN: 0.045, SLEEP: 0.030, ONE: 0.033}
NEIGHBOURS = {SPIN: 0.136, SLEEP: 0.050, ONE: 0.045}
Table = dict[Way, float]


class Step(NamedTuple):
    at: float
    way: Way
    seconds: float


def run(
    chooser: WayChooser,
    table: Callable[[float], Table],
    until: float,
    noise: float = 0.0,
    seed: int = 0,
    tokens: int = 32,
    context: int = 4000,
) -> list[Step]:
    """Steps until so many seconds of them have passed; `noise`: standard deviation of the logarithm of their times."""
    rng, now, steps = random.Random(seed), 0.0, list[Step]()
    while now < until:
        way = chooser.choose(tokens, context)
        seconds = table(now)[way] * math.exp(rng.gauss(0, noise))
        # One step of a hundred is interrupted.
        seconds *= 3 if noise and rng.random() < 0.01 else 1
        chooser.took(seconds)
        steps.append(Step(now, way, seconds))
        now += seconds
    return steps


def lost(steps: list[Step], table: Table) -> float:
    """The share of the time that other ways than the best one cost."""
    best = min(table.values())
    return sum(table[step.way] - best for step in steps) / sum(table[step.way] for step in steps)


def make(most: int = 2, small: SmallSteps | None = None) -> WayChooser:
    return WayChooser(ways(most, can_sleep=True), small)


@pytest.mark.parametrize(
    ("most", "can_sleep", "expected"),
    [
        (1, True, [ONE]),
        (2, True, [SPIN, SLEEP, ONE]),
        (2, False, [SPIN, ONE]),
        (8, True, [Way(8, True), Way(8, False), Way(7, False), Way(4, False), ONE]),
        (8, False, [Way(8, True), Way(7, True), Way(4, True), ONE]),
    ],
)
def test_ways(most: int, can_sleep: bool, expected: list[Way]) -> None:
    assert ways(most, can_sleep=can_sleep) == expected


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.15])
def test_a_quiet_machine_keeps_all_threads_spinning_and_tries_others_rarely(noise: float) -> None:
    steps = run(make(), lambda _: QUIET, 60, noise)
    assert {step.way for step in steps} == {SPIN, SLEEP, ONE}
    assert lost(steps, QUIET) < 0.02
    assert sum(step.way == SPIN for step in steps) > 0.9 * len(steps)


def test_a_rival_that_loses_clearly_is_tried_less_and_less_while_nothing_disturbs() -> None:
    steps = run(make(), lambda _: QUIET, 8, 0.1)
    assert lost(steps, QUIET) < 0.015
    trials = [number for number, step in enumerate(steps) if step.way == ONE]
    first, second, third, *_ = (later - earlier for earlier, later in pairwise(trials))
    assert second > 1.5 * first
    assert third > 1.5 * second
    # Once it has not lost clearly, it has all its turns again.
    alike = QUIET | {ONE: 0.019}
    steps = run(make(), lambda now: QUIET if now < 20 else alike, 40, 0.1)
    late = [number for number, step in enumerate(steps) if step.at > 30 and step.way == ONE]
    assert max(later - earlier for earlier, later in pairwise(late)) < 100


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("table", [NEIGHBOUR, NEIGHBOURS], ids=["one", "two"])
def test_beside_neighbours_another_way_is_found_within_few_steps(table: Table, seed: int) -> None:
    steps = run(make(), lambda now: table if now > 10 else QUIET, 40, 0.1, seed)
    since = [step for step in steps if step.at > 10]
    # Three slow steps and a few in turns; now and then an interrupted one stands in the way.
    assert sum(step.way == SPIN for step in since[:40]) < 25
    assert sum(step.way != SPIN for step in since[40:]) > 0.9 * len(since[40:])
    assert lost(since, table) < 0.2


@pytest.mark.parametrize("seed", range(4))
def test_when_the_neighbours_have_gone_all_threads_are_back_within_two_seconds(seed: int) -> None:
    steps = run(make(), lambda now: NEIGHBOURS if 10 < now < 20 else QUIET, 40, 0.1, seed)
    since = [step for step in steps if step.at > 22]
    # Sleeping is nearly as good as spinning, and as long as it stays.
    assert lost(since, QUIET) < 0.12
    assert sum(step.way.threads == 2 for step in since) > 0.9 * len(since)


@pytest.mark.parametrize("seed", range(3))
def test_where_threads_cannot_be_made_to_sleep_one_is_left(seed: int) -> None:
    chooser = WayChooser(ways(2, can_sleep=False))
    steps = run(chooser, lambda now: NEIGHBOURS if now < 20 else QUIET, 40, 0.3, seed)
    assert sum(step.way == ONE for step in steps if 5 < step.at < 20) > 0.8 * sum(5 < step.at < 20 for step in steps)
    assert sum(step.way == SPIN for step in steps if step.at > 25) > 0.8 * sum(step.at > 25 for step in steps)


def test_beside_a_neighbour_from_the_start() -> None:
    steps = run(make(), lambda _: NEIGHBOURS, 10, 0.1)
    assert lost(steps, NEIGHBOURS) < 0.25


@pytest.mark.parametrize("seed", range(3))
def test_beside_neighbours_that_hit_only_some_steps(seed: int) -> None:
    """As seen beside many processes: most steps take what they take alone, and some a multiple."""
    chooser, rng, now, steps = make(), random.Random(seed), 0.0, list[Step]()
    alone = {SPIN: 0.015, SLEEP: 0.009, ONE: 0.020}
    hit = {SPIN: 0.4, SLEEP: 0.2, ONE: 0.5}
    while now < 30:
        way = chooser.choose(8, 2000)
        seconds = alone[way] * math.exp(rng.gauss(0, 0.1))
        seconds += rng.expovariate(12) if rng.random() < hit[way] else 0.0
        chooser.took(seconds)
        steps.append(Step(now, way, seconds))
        now += seconds
    # On average 48, 26 and 62 ms.
    assert now / len(steps) < 0.038
    assert sum(step.way == SLEEP for step in steps) > 0.6 * len(steps)


def test_noise_alone_changes_nothing_for_long() -> None:
    same = dict.fromkeys(QUIET, 0.02)
    steps = run(make(), lambda _: same, 60, 0.2)
    assert sum(before.way != after.way for before, after in pairwise(steps)) < len(steps) / 4


def test_what_is_chosen_for_small_steps_does_not_hold_for_large_ones() -> None:
    chooser = make()
    small = {SPIN: 0.009, SLEEP: 0.009, ONE: 0.004}
    assert run(chooser, lambda _: small, 5, tokens=1)[-1].way == ONE
    assert chooser.choose(2048, 2048) == SPIN
    # A size beside one that is known begins as that one.
    assert chooser.choose(1, 4000) == ONE
    assert chooser.choose(2, 4000) == ONE


# A model of 5M weights in float32, with 6 KiB of keys and values for each token: up to 15 tokens are small.
SMALL = SmallSteps(5_000_000, 20_000_000, 6144)
# Seconds of a decode of the demo model while manager and client share two cores with it.
DEMO = {SPIN: 0.002, SLEEP: 0.0022, ONE: 0.0012}


def test_small_steps_begin_on_one_thread_and_hardly_leave_it() -> None:
    steps = run(make(small=SMALL), lambda _: DEMO, 3, 0.2, tokens=1, context=1000)
    assert {step.way for step in steps[:16]} == {ONE}
    assert lost(steps, DEMO) < 0.02
    assert sum(step.way == ONE for step in steps) > 0.97 * len(steps)


def test_small_steps_find_all_threads_where_these_are_faster() -> None:
    steps = run(make(small=SMALL), lambda _: QUIET, 20, 0.1, tokens=8, context=1000)
    assert steps[0].way == ONE
    assert sum(step.way == SPIN for step in steps if step.at > 10) > 0.9 * sum(step.at > 10 for step in steps)


def test_what_small_steps_begin_with_does_not_hold_for_large_ones() -> None:
    chooser = make(small=SMALL)
    assert chooser.choose(15, 1000) == ONE
    chooser.took(0.001)
    # Its size is beside that of a small step.
    assert chooser.choose(16, 1000) == SPIN


@pytest.mark.parametrize("tokens", [(8, 15), (15, 8)])
def test_a_kind_begins_alike_whichever_of_its_steps_comes_first(tokens: tuple[int, int]) -> None:
    """Of this model 12 tokens are small, but not 15, the most of their kind."""
    chooser = make(small=SmallSteps(6_000_000, 24_000_000, 0))
    for each in tokens:
        assert chooser.choose(each, 1000) == SPIN
        chooser.took(0.001)
    assert chooser.choose(3, 1000) == ONE


@pytest.mark.parametrize(
    ("small", "tokens", "context", "holds"),
    [
        (SMALL, 15, 0, True),
        (SMALL, 16, 0, False),
        (SMALL, 1, 1627, True),
        (SMALL, 1, 1628, False),
        (SmallSteps(15_000_000, 30_000_000, 1), 1, 0, True),
        (SmallSteps(15_000_000, 30_000_001, 1), 1, 0, False),
        # The model of `make bench-peers` in bfloat16.
        (SmallSteps(33_600_000, 67_200_000, 8192), 1, 0, False),
    ],
)
def test_small_steps_of_a_model(small: SmallSteps, tokens: int, context: int, holds: bool) -> None:
    assert small.include(tokens, context) is holds


def test_first_steps_of_a_number_of_rows_do_not_count() -> None:
    chooser = make()
    for _ in range(20):
        way = chooser.choose(32, 4000)
        chooser.took(QUIET[way])
    # As if oneDNN compiled: one slow step with each new number of rows.
    for tokens in range(33, 60):
        for attempt in range(4):
            way = chooser.choose(tokens, 4000)
            chooser.took(QUIET[way] if attempt else 1.0)
    assert chooser.choose(59, 4000) == SPIN


def test_steps_that_do_not_count_cost_no_more_than_others() -> None:
    chooser, steps, rng = make(), list[Step](), random.Random(0)
    for _ in range(6000):
        way = chooser.choose(rng.randrange(32, 64), 4000 + rng.randrange(90))
        chooser.took(QUIET[way])
        steps.append(Step(0.0, way, QUIET[way]))
    assert lost(steps, QUIET) < 0.012
    assert {step.way for step in steps} == {SPIN, SLEEP, ONE}


def test_one_way_is_used_whatever_it_takes() -> None:
    chooser = WayChooser([SPIN])
    for seconds in (0.1, 9.0, 0.1, 9.0, 9.0, 9.0, 0.0):
        assert chooser.choose(5, 5) == SPIN
        chooser.took(seconds)


def test_steps_of_no_time_are_no_error() -> None:
    chooser = make()
    for _ in range(200):
        chooser.choose(1, 1)
        chooser.took(0.0)


def test_a_step_that_failed_and_was_not_told_is_forgotten() -> None:
    chooser = make()
    chooser.choose(32, 4000)
    steps = run(chooser, lambda _: QUIET, 5)
    assert sum(step.way == SPIN for step in steps[-20:]) > 10


def test_changes_are_logged_and_not_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run(make(), lambda now: NEIGHBOURS if int(now / 3) % 2 else QUIET, 60)
    lines = [record for record in caplog.records if record.message == "steps are computed in another way"]
    assert 1 < len(lines) <= 7
    first = lines[0].fields  # type: ignore[attr-defined]  # added by Log
    assert (first["threads_before"], first["waiting_before"], first["tokens"]) == (2, "spins", 32)
    assert first["step_ms"] < first["step_ms_before"]
    assert sum(line.fields["changes"] for line in lines) > len(lines)  # type: ignore[attr-defined]  # added by Log
