"""Blocks that requests can come to need, and requests that the pool can never hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engine.engine_harness import Bench, command, expect, read, run
from support.engine.fake_engine import MODEL

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.capacity import blocks_needed, longest_sequence, total_tokens
from pagekv.kvmanager.engine.loop import EngineLoop


@pytest.mark.parametrize(("tokens", "beams", "blocks"), [(1, 0, 0), (5, 0, 1), (6, 0, 2), (9, 0, 2), (6, 3, 6)])
def test_the_last_token_needs_no_slot_and_beams_may_share_nothing(tokens: int, beams: int, blocks: int) -> None:
    assert blocks_needed(tokens, 4, beams) == blocks


def test_resumed_tokens_are_part_of_the_output() -> None:
    """A pool of 10 blocks of 4 holds 41 tokens, prompt and output."""
    whole = command("a", [1] * 11, max_tokens=30)
    assert total_tokens(whole) == longest_sequence(MODEL, 0) == 41
    assert total_tokens(replace(whole, prompt_ids=[1] * 16, resumed_tokens=5)) == 41
    assert total_tokens(replace(whole, prompt_ids=[1] * 12)) == 42


def test_the_context_may_be_longer_than_what_the_pool_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needed and available blocks are named then, here and where the prompt is read."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        assert engine.model is not None
        assert engine.model.max_model_len == 200
        assert longest_sequence(engine.model, 0) == 5 * 4 + 1
        with pytest.raises(InvalidRequest, match=r"from 1 to 18, got 19: 22 tokens need 6 blocks, the pool has 5"):
            engine.submit(command("x", [1, 2, 3], max_tokens=19))
        assert await read(engine.submit(command("y", [1, 2, 3], max_tokens=18))) == expect([1, 2, 3], 18)

    run(monkeypatch, body, num_device_blocks=5)
