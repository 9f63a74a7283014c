"""Beam search over the CPU backend, with forked blocks, finds the results of transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.fake_executor import beam_search
from support.executor.beam_driver import BeamDriver, beam_reference
from support.executor.cpu_driver import prompts_of, save_model

from pagekv.executor.cpu.backend import CpuBackend

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, RESULTS, NEW = 5, 3, 12


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
        assert found == beam_reference(
            model, prompt, WIDTH, RESULTS, NEW, length_penalty=length_penalty, end_ids=end_ids
        )
        assert sorted(driver.free) == list(range(400)), "a block was lost"
        ended.update(tokens[-1] for tokens in found)
    assert ended & set(end_ids)
