"""Blocks that requests can come to need, and requests that the pool can never hold."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.engine.engine_harness import Bench, command, described, expect, read, run, until
from support.engine.fake_engine import MODEL
from support.event_loop import run_by

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.capacity import blocks_needed, longest_sequence, total_tokens
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams


@pytest.mark.parametrize(("tokens", "beams", "blocks"), [(1, 0, 0), (5, 0, 1), (6, 0, 2), (9, 0, 2), (6, 3, 6)])
def test_the_last_token_needs_no_slot_and_beams_may_share_nothing(tokens: int, beams: int, blocks: int) -> None:
    assert blocks_needed(tokens, 4, beams) == blocks


def test_resumed_tokens_are_part_of_the_output() -> None:
    """A pool of 10 blocks of 4 holds 41 tokens, prompt and output."""
    whole = command("a", [1] * 11, max_tokens=30)
    assert total_tokens(whole) == longest_sequence(MODEL, 0) == 41
    assert total_tokens(replace(whole, prompt_ids=[1] * 16, resumed_tokens=5)) == 41
    assert total_tokens(replace(whole, prompt_ids=[1] * 12)) == 42


@run_by(run, num_device_blocks=5)
async def test_the_context_may_be_longer_than_what_the_pool_holds(engine: EngineLoop) -> None:
    """Needed and available blocks are named then, here and where the prompt is read."""
    assert engine.model is not None
    assert engine.model.max_model_len == 200
    assert longest_sequence(engine.model, 0) == 5 * 4 + 1
    with pytest.raises(InvalidRequest, match=r"from 1 to 18, got 19: 22 tokens need 6 blocks, the pool has 5"):
        engine.submit(command("x", [1, 2, 3], max_tokens=19))
    assert await read(engine.submit(command("y", [1, 2, 3], max_tokens=18))) == expect([1, 2, 3], 18)


@pytest.mark.parametrize(
    ("returns_with", "field", "words"),
    [
        # A prompt of 9 tokens and all of its output fitted before.
        (
            {"device_kv_bytes": 2},
            "prompt",
            "must have from 1 to 8: 9 tokens need 3 blocks, the pool has 2",
        ),
        ({"max_model_len": 9}, "prompt", "must have from 1 to 8: the context has 9 tokens"),
        ({"device_kv_bytes": 3}, "sampling_params.max_tokens", "from 1 to 4, got 50: 59 tokens need 15 blocks"),
        (
            {"max_model_len": 30},
            "sampling_params.max_tokens",
            "from 1 to 21, got 50: the context has 30 tokens",
        ),
    ],
)
@run_by(run)
async def test_an_executor_that_comes_back_smaller_is_told_with_bounds_that_can_be_kept(
    engine: EngineLoop, bench: Bench, *, returns_with: dict[str, int], field: str, words: str
) -> None:
    """Between the reading of a prompt and its submission another executor may come."""
    bench.description = described(**returns_with)
    assert bench.link is not None
    bench.link.lose()
    await until(lambda: engine.statistics.stats().executor_restarts_total == 1)
    with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
        engine.submit(command("x", [1] * 9, max_tokens=50))
    assert caught.value.field == field


@run_by(run, num_device_blocks=3)
async def test_beams_that_the_pool_cannot_hold_are_refused_by_their_number(engine: EngineLoop) -> None:
    """No prompt would be short enough for them."""
    beams = SamplingParams(max_tokens=2, beam_width=4)
    with pytest.raises(InvalidRequest, match=r"must be from 0 to 3 .*, got 4") as caught:
        engine.submit(GenerateCommand("b", [1], beams))
    assert caught.value.field == "sampling_params.beam_width"
