"""Tests of both model backends: greedy output is token for token that of transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.executor.cpu_driver import Driven, Driver, prompts_of, reference

from pagekv.executor.backend.interface import NOT_A_NUMBER, BlockCopies, CopyDirection


class Case:
    """A model on both sides and transformers' answers, of `new` tokens, to prompts of these lengths."""

    def __init__(self, directory: Path, model: Any, backend: Driven, lengths: list[int], new: int) -> None:
        self.directory, self.model, self.backend, self.new = directory, model, backend, new
        self.prompts = prompts_of(lengths)
        self.answers = [self.answer(prompt) for prompt in self.prompts]

    def answer(self, prompt: list[int]) -> list[int]:
        return reference(self.model, prompt, self.new)


class BackendSuite:
    """A subclass says which prefixes are hit; its module has a fixture `case`."""

    # Of the prompts beside a first one of 40 tokens: tokens of that one, tokens of another text, and tokens hit.
    HITS: tuple[tuple[int, int, int], ...]
    # Tokens behind a prefix of 32 that the same step computes, one sequence each.
    TAILS: tuple[int, ...]

    def test_prefix_hits(self, case: Case) -> None:
        """Sequences share leading blocks to different depths, and go on with and without new prompt tokens."""
        base, tail = prompts_of([40, max(other for _, other, _ in self.HITS)], seed=1)
        prompts = [base, *(base[:kept] + tail[:other] for kept, other, _ in self.HITS)]
        driver = Driver(case.backend, block_size=8)
        owner = driver.sequence(base)
        driver.step({owner.seq_id: 40}, [owner])
        others = [driver.sequence(prompt) for prompt in prompts[1:]]
        for state, (_, _, hit) in zip(others, self.HITS, strict=True):
            driver.share(owner, state, hit)
        assert driver.generate([owner, *others], case.new) == [case.answer(prompt) for prompt in prompts]

    def test_pools_begin_as_zeros(self, case: Case) -> None:
        """Contents of an epoch before are gone, whatever memory the new pools get."""
        for _ in range(3):
            case.backend.allocate(4, 48, 32)
            pools = case.backend.cache
            assert not pools.device.any()
            assert not pools.host.any()
            pools.device.fill_(7)
            pools.host.fill_(7)

    def test_prefix_computed_in_the_same_step(self, case: Case) -> None:
        """The step that computes a prefix may already read it for others: writes of a layer come before its reads."""
        base, *tails = prompts_of([32, *self.TAILS], seed=2)
        driver = Driver(case.backend, block_size=4)
        owner, *others = (driver.sequence(base + tail) for tail in [*tails, [3]])
        owner.block_table = [driver.free.pop() for _ in range(8)]
        for state in others:
            driver.share(owner, state, 32)
        answers = [case.answer(list(state.token_ids)) for state in (owner, *others)]
        assert driver.generate([owner, *others], case.new) == answers

    def test_copy_on_write(self, case: Case) -> None:
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
        assert driver.generate([owner, other], case.new) == [case.answer(base), case.answer(prompt)]

    def test_preemption_by_recompute_and_by_swap(self, case: Case) -> None:
        driver = Driver(case.backend, block_size=4, host_blocks=64)
        states = [driver.sequence(prompt) for prompt in case.prompts]
        driver.generate(states, case.new // 3)
        for state in states[::2]:
            driver.preempt(state)
        for state in states[1::2]:
            driver.swap_out_and_in(state)
        driver.generate(states, 2 * case.new // 3, chunk=11)
        driver.preempt(states[3])
        assert driver.generate(states, case.new) == case.answers

    def test_contiguous_memory_behind_the_same_interface(self, case: Case) -> None:
        """Blocks as long as the context, one for each whole sequence, which is what a reservation is: the same answers,
        in one batch, in chunks, recomputed, and swapped out and in.
        """
        driver = Driver(case.backend, block_size=128, num_blocks=16, host_blocks=2)
        states = [driver.sequence(prompt) for prompt in case.prompts]
        driver.generate(states, case.new // 2, chunk=11)
        driver.preempt(states[3])
        driver.swap_out_and_in(states[5])
        assert driver.generate(states, case.new) == case.answers
        assert [len(state.block_table) for state in states] == [1] * len(states)

    def test_unwritten_slots_are_noticed(self, case: Case) -> None:
        """The judge works: a sequence that reads a slot that no step wrote fails, and gets no token."""
        driver = Driver(case.backend, block_size=4)
        state = driver.sequence(next(prompt for prompt in case.prompts if len(prompt) > 20))
        state.block_table, state.computed_tokens = [driver.free.pop() for _ in range(5)], 20
        driver.generate([state], 1)
        assert driver.output(state) == [NOT_A_NUMBER.token_id]
