"""Greedy output of the CPU backend is token for token that of transformers' own `generate`, however it is computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.executor.cpu_driver import MODELS, Driver, prompts_of, reference, save_model

from pagekv.executor.backend.interface import BlockCopies, CopyDirection
from pagekv.executor.cpu import CpuBackend
from pagekv.executor.cpu import attention_plan as plan_module

# Longer than the window of the windowed models, several blocks, none a multiple of a block.
LENGTHS = [1, 2, 23, 37, 5, 64, 41]
NEW = 12


class Case:
    """A model on both sides and transformers' answers to the prompts of LENGTHS."""

    def __init__(self, name: str, directory: Path) -> None:
        self.model: Any = save_model(name, directory)
        self.backend = CpuBackend(directory, name, threads=1)  # small work: threads would wait for one another
        self.prompts = prompts_of(LENGTHS)
        self.answers = [reference(self.model, prompt, NEW) for prompt in self.prompts]
        assert len({token for answer in self.answers for token in answer}) > 15, "answers are too much alike"


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def shared_reads_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models here are so small that sharing reads would never pay; what it computes must be right all the same."""
    monkeypatch.setattr(plan_module, "CALL_BYTES", 1024)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_cold_alone(case: Case, block_size: int) -> None:
    driver = Driver(case.backend, block_size)
    for prompt, answer in zip(case.prompts, case.answers, strict=True):
        assert driver.generate([driver.sequence(prompt)], NEW) == [answer]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_mixed_lengths_in_one_batch(case: Case, block_size: int) -> None:
    driver = Driver(case.backend, block_size)
    states = [driver.sequence(prompt) for prompt in case.prompts]
    assert driver.generate(states, NEW) == case.answers


@pytest.mark.parametrize("chunk", [1, 3, 16, 33])
def test_chunked_prefill(case: Case, chunk: int) -> None:
    driver = Driver(case.backend, block_size=8)
    states = [driver.sequence(prompt) for prompt in case.prompts]
    assert driver.generate(states, NEW, chunk) == case.answers


def test_prefix_hits(case: Case) -> None:
    """Sequences share leading blocks to different depths, and go on with and without new prompt tokens."""
    base, tail = prompts_of([40, 30], seed=1)
    prompts = [base, base + tail[:1], base + tail, base[:24] + tail, base[:16] + tail[:9], base[:39], base[:24]]
    hits = [0, 40, 40, 24, 16, 32, 16]
    answers = [reference(case.model, prompt, NEW) for prompt in prompts]
    driver = Driver(case.backend, block_size=8)
    owner = driver.sequence(base)
    driver.step({owner.seq_id: 40}, [owner])
    others = [driver.sequence(prompt) for prompt in prompts[1:]]
    for state, hit in zip(others, hits[1:], strict=True):
        driver.share(owner, state, hit)
    assert driver.generate([owner, *others], NEW) == answers


def test_prefix_computed_in_the_same_step(case: Case) -> None:
    """The step that computes a prefix may already read it for others: writes of a layer come before its reads."""
    base, one, two = prompts_of([32, 7, 9], seed=2)
    driver = Driver(case.backend, block_size=4)
    states = [driver.sequence(prompt) for prompt in (base + one, base + two, [*base, 3])]
    states[0].block_table = [driver.free.pop() for _ in range(8)]
    driver.share(states[0], states[1], 32)
    driver.share(states[0], states[2], 32)
    answers = [reference(case.model, list(state.token_ids), NEW) for state in states]
    assert driver.generate(states, NEW) == answers


def test_copy_on_write(case: Case) -> None:
    """A partly equal block is copied, and overwritten from where the sequences part."""
    base, tail = prompts_of([30, 9], seed=3)
    prompt = base[:27] + tail
    driver = Driver(case.backend, block_size=8)
    owner, other = driver.sequence(base), driver.sequence(prompt)
    driver.step({owner.seq_id: 30}, [owner])
    driver.share(owner, other, 24)
    copy = driver.free.pop()
    driver.backend.copy_blocks(BlockCopies(CopyDirection.COPY, [owner.block_table[3]], [copy]))
    other.block_table.append(copy)
    other.computed_tokens = 27
    answers = [reference(case.model, base, NEW), reference(case.model, prompt, NEW)]
    assert driver.generate([owner, other], NEW) == answers


def test_preemption_by_recompute_and_by_swap(case: Case) -> None:
    driver = Driver(case.backend, block_size=4, host_blocks=64)
    states = [driver.sequence(prompt) for prompt in case.prompts]
    driver.generate(states, 4)
    for state in states[::2]:
        driver.preempt(state)
    for state in states[1::2]:
        driver.swap_out_and_in(state)
    driver.generate(states, 8, chunk=11)
    driver.preempt(states[3])
    assert driver.generate(states, NEW) == case.answers


def test_random_schedules(case: Case) -> None:
    """Steps of random sequences and random sizes, with preemption in between."""
    rng = random.Random(4)
    driver = Driver(case.backend, block_size=4)
    states = [driver.sequence(prompt) for prompt in case.prompts]
    while left := [state for state in states if len(driver.output(state)) < NEW]:
        if rng.random() < 0.05:
            driver.preempt(rng.choice(left))
        driver.step({state.seq_id: rng.choice([0, 1, 1, 2, 7, 30]) for state in left}, left)
    assert [driver.output(state) for state in states] == case.answers


def test_unwritten_slots_are_noticed(case: Case) -> None:
    """The judge works: reading a block nobody wrote is an error, not an answer."""
    driver = Driver(case.backend, block_size=4)
    state = driver.sequence(case.prompts[2])
    state.block_table, state.computed_tokens = [driver.free.pop() for _ in range(5)], 20
    with pytest.raises(ArithmeticError, match=rf"sequences \[{state.seq_id}\]"):
        driver.generate([state], 1)
