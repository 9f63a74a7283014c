"""Greedy output of the CPU backend is token for token that of transformers' own `generate`, however it is computed."""

from __future__ import annotations

import random

import pytest
from support.executor.backend_suite import BackendSuite, Case
from support.executor.cpu_driver import MODELS, Driver, prompts_of, save_model

from pagekv.executor.cpu import attention_plan, gathered_reads
from pagekv.executor.cpu.backend import CpuBackend

# Longer than the window of the windowed models, several blocks, none a multiple of a block.
LENGTHS = [1, 2, 23, 37, 5, 64, 41]
NEW = 12


# Families whose layers are put together like those of another one here.
ALIKE = ("llama-mqa", "qwen2", "qwen3", "mistral")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long if name in ALIKE else ()) for name in MODELS]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, directory)
    # Small work: threads would wait for one another.
    case = Case(directory, model, CpuBackend(directory, request.param, threads=1), LENGTHS, NEW)
    assert len({token for answer in case.answers for token in answer}) > 15, "answers are too much alike"
    return case


@pytest.fixture(autouse=True)
def shared_reads_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models here are so small that sharing reads would never pay; what it computes must be right all the same."""
    for module in (attention_plan, gathered_reads):
        monkeypatch.setattr(module, "CALL_BYTES", 1024)


class TestCpuBackend(BackendSuite):
    HITS = ((40, 1, 40), (40, 30, 40), (24, 30, 24), (16, 9, 16), (39, 0, 32), (24, 0, 16))
    TAILS = (7, 9)


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


@pytest.mark.parametrize("cut", [1, 16, 23])
def test_later_tokens_and_other_blocks_change_no_bit(case: Case, cut: int) -> None:
    """Prompts of one length that part at a token: up to it the same bytes in every layer, wherever their blocks lie."""
    first, other = prompts_of([24, 24], seed=9)
    driver = Driver(case.backend, block_size=8)
    states = [driver.sequence(prompt) for prompt in (first, first[:cut] + other[cut:])]
    for state in states:
        driver.step({state.seq_id: 24}, [state])
    assert set(states[0].block_table).isdisjoint(states[1].block_table)
    # [layers, keys or values, tokens, ...]
    one, unlike = (
        case.backend.cache.device[state.block_table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3) for state in states
    )
    assert one[:, :, :cut].equal(unlike[:, :, :cut])
    assert not one[:, :, cut:].equal(unlike[:, :, cut:])


def test_keys_and_values_of_a_token_are_those_of_everything_before_it(case: Case) -> None:
    """The same tokens at the same positions: after the same beginning the same bytes in every layer, after another one
    other bytes in all layers but the first, which has seen nothing but the token yet.
    """
    first, other = prompts_of([24, 16], seed=9)
    prompts = [first, first, other + first[16:]]
    driver = Driver(case.backend, block_size=8)
    states = [driver.sequence(prompt) for prompt in prompts]
    for state in states:
        driver.step({state.seq_id: 24}, [state])
    one, same, unlike = (case.backend.cache.device[state.block_table[2]] for state in states)
    assert one.equal(same)
    assert one[0].equal(unlike[0])
    for layer in range(1, len(one)):
        differences = (one[layer] != unlike[layer]).flatten(2).any(2)
        assert differences.all(), f"layer {layer}: a token has the keys or values of another context"
