"""The oracle with a time for its steps launches them as a device does, and judges them as it always does."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.executor.executor_steps import VOCAB, World, new_sequence
from support.executor.expected_tokens import expected_tokens

from pagekv.executor.backend.interface import Sampling
from pagekv.executor.oracle.backend import OracleBackend, OracleModel, SlotError

PROMPT = list(range(100, 110))


def test_a_step_lasts_for_its_time() -> None:
    slept: list[float] = []
    world = World()
    backend = OracleBackend(OracleModel(), step_time_s=1000.0, sleep=slept.append)
    backend.allocate(4, 32, 0)
    world.epoch.backend = backend
    world.enter(1, PROMPT, [5, 9, 2])
    assert len(slept) == 1
    assert 900.0 < slept[0] <= 1000.0


def test_steps_launched_ahead_follow_each_other_and_know_each_others_tokens() -> None:
    """As on a device: the next step is checked while one runs, begins when that ends, and behind it none waits."""
    slept: list[float] = []
    world = World()
    backend = OracleBackend(OracleModel(vocab_size=VOCAB), step_time_s=100.0, sleep=slept.append)
    backend.allocate(4, 32, 0)
    world.epoch.backend = backend
    enter = world.step(new_seqs=[new_sequence(1, PROMPT, [5, 9, 2, 7])], scheduled_seqs=[1], scheduled_tokens=[10])
    launched = [world.epoch.launch(enter), world.epoch.launch(world.step())]
    assert slept == []
    launched.append(world.epoch.launch(world.step()))
    assert not any(step.ready for step in launched)
    reports = [step.collect() for step in launched]
    # For the second step to begin, and for each to end.
    assert [math.ceil(seconds / 100) for seconds in slept] == [1, 1, 2, 3]
    expected = expected_tokens(PROMPT, 3, vocab_size=VOCAB, eos_token_ids=(0,), ignore_eos=True)
    assert [report.sampled[1].token_id for report in reports] == expected
    assert [report.idle_us for report in reports] == [0, 0, 0]


@pytest.mark.parametrize("columns", [{"logprobs": 2}, {"min_tokens": 9, "banned_until_min": [0]}])
def test_sequences_that_are_sampled_one_by_one_are_known_ahead_too(columns: dict[str, Any]) -> None:
    def generated(*, ahead: bool) -> list[int]:
        world = World()
        model = OracleModel(vocab_size=VOCAB)
        world.epoch.backend = backend = OracleBackend(model, step_time_s=100.0, sleep=lambda _: None)
        backend.allocate(4, 32, 0)
        new = new_sequence(1, PROMPT, [5, 9, 2, 7], sampling=Sampling(**columns))
        launched = [world.epoch.launch(world.step(new_seqs=[new], scheduled_seqs=[1], scheduled_tokens=[10]))]
        for _ in range(4):
            if not ahead:
                launched.pop().collect()
            launched.append(world.epoch.launch(world.step()))
        for step in launched:
            step.collect()
        return list(world.epoch.live[1].token_ids[len(PROMPT) :])

    assert generated(ahead=True) == generated(ahead=False)


def test_a_step_that_is_found_wrong_behind_one_that_runs_leaves_that_one_alone() -> None:
    world = World()
    backend = OracleBackend(OracleModel(vocab_size=VOCAB), step_time_s=100.0, sleep=lambda _: None)
    backend.allocate(4, 32, 0)
    world.epoch.backend = backend
    enter = world.step(new_seqs=[new_sequence(1, PROMPT, [5, 9, 2])], scheduled_seqs=[1], scheduled_tokens=[10])
    running = world.epoch.launch(enter)
    # Claims what another one computed.
    lies = new_sequence(2, PROMPT[::-1], [5, 9, 22], 8)
    with pytest.raises(SlotError):
        world.epoch.launch(world.step(new_seqs=[lies], scheduled_seqs=[1, 2], scheduled_tokens=[0, 2]))
    assert running.collect().sampled[1].token_id == expected_tokens(PROMPT, 1, vocab_size=VOCAB, eos_token_ids=(0,))[0]
