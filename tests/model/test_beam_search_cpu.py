"""Beam search over the CPU backend, with forked blocks, finds the results of transformers' own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.fake_executor import beam_search
from support.executor.cpu_driver import Driver, prompts_of, save_model

from pagekv.executor.backend.interface import BlockCopies, CopyDirection, Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.backend import CpuBackend
from pagekv.kvmanager.scheduling.beam_search import BeamSearch, Candidates

WIDTH, RESULTS, NEW = 5, 3, 12


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small work: threads would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference(model: Any, prompt: list[int], end_ids: list[int], length_penalty: float) -> list[list[int]]:
    """Output tokens of transformers' results, best first, without the filling behind the end token."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=WIDTH,
            num_return_sequences=RESULTS,
            length_penalty=length_penalty,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=end_ids,
        )
    rows = out[:, len(prompt) :].tolist()
    return [row[: next((at for at, t in enumerate(row) if t in end_ids), NEW) + 1] for row in rows]


class BeamDriver(Driver):
    """Forks beams as a manager would: full blocks are shared, the partial one is copied, what nobody holds is NaN."""

    def search(self, prompt: list[int], search: BeamSearch) -> None:
        sampling = Sampling(logprobs=search.num_candidates)
        states = [self.sequence(prompt, sampling=sampling)]
        while not search.done:
            continuing = search.advance(self._candidates(states))
            children = [self._fork(states[parent], token_id) for parent, token_id, _ in continuing]
            held = {block for child in children for block in child.block_table}
            dropped = {block for state in states for block in state.block_table} - held
            self.backend.cache.device[list(dropped)] = math.nan
            self.free[:0] = dropped
            states = children

    def _candidates(self, states: list[SequenceState]) -> list[Candidates]:
        """Computes every known token of each state, in one step."""
        scheduled = []
        for state in states:
            while len(state.block_table) * self.block_size < len(state.token_ids):
                state.block_table.append(self.free.pop())
            scheduled.append(Scheduled(state, state.computed_tokens, len(state.token_ids) - state.computed_tokens))
        sampled = self.backend.launch(scheduled).collect()
        for state in states:
            state.computed_tokens = len(state.token_ids)
        return [sampled[state.seq_id].top for state in states]

    def _fork(self, parent: SequenceState, token_id: int) -> SequenceState:
        child = self.sequence([*parent.token_ids, token_id], parent.num_prompt_tokens, parent.sampling)
        full = parent.computed_tokens // self.block_size
        child.block_table = parent.block_table[:full]
        child.computed_tokens = parent.computed_tokens
        for source in parent.block_table[full:]:
            copy = self.free.pop()
            self.backend.copy_blocks(BlockCopies(CopyDirection.COPY, [source], [copy]))
            child.block_table.append(copy)
        return child


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_beams_that_share_blocks_find_what_transformers_finds(name: str, block_size: int, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    backend = CpuBackend(tmp_path, name, threads=1)
    (prompt,) = prompts_of([21], seed=5)
    # Tokens that the best results come upon, so that some of them end early, at least where length counts for nothing.
    free = beam_search(WIDTH, WIDTH, 1.0, False, NEW, frozenset())
    BeamDriver(backend, block_size).search(prompt, free)
    end_ids = sorted({found.token_ids[at] for found in free.results() for at in (5, -2)})
    ended: set[int] = set()
    for length_penalty in (0.0, 1.0):
        search = beam_search(WIDTH, RESULTS, length_penalty, False, NEW, frozenset(end_ids))
        driver = BeamDriver(backend, block_size)
        driver.search(prompt, search)
        found = [list(result.token_ids) for result in search.results()]
        assert found == reference(model, prompt, end_ids, length_penalty)
        assert sorted(driver.free) == list(range(400)), "a block was lost"
        ended.update(tokens[-1] for tokens in found)
    assert ended & set(end_ids)
