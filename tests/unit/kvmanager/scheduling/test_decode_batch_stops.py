"""A sequence ends with its last token, end-of-sequence, or a stop token of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engine.scheduler_driver import Driver, expect, streamed

from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.scheduling.decode_batch import DecodeBatch
from pagekv.kvmanager.scheduling.step_plan import Ending

EOS = 9


@pytest.mark.parametrize(
    ("token", "generated", "fields", "ending"),
    [
        (5, 1, {}, None),
        (5, 3, {}, None),
        (5, 4, {}, Ending(FinishReason.LENGTH)),
        (EOS, 1, {}, Ending(FinishReason.STOP, EOS)),
        (EOS, 4, {}, Ending(FinishReason.STOP, EOS)),
        (EOS, 1, {"ignore_eos": True}, None),
        (EOS, 4, {"ignore_eos": True}, Ending(FinishReason.LENGTH)),
        (EOS, 1, {"min_tokens": 2}, None),
        (EOS, 2, {"min_tokens": 2}, Ending(FinishReason.STOP, EOS)),
        (7, 1, {"stop_token_ids": (7,)}, Ending(FinishReason.STOP, 7)),
        (7, 1, {"stop_token_ids": (7,), "min_tokens": 2}, None),
        (7, 2, {"stop_token_ids": (7,), "min_tokens": 2}, Ending(FinishReason.STOP, 7)),
    ],
)
def test_a_token_ends_its_sequence_or_not(
    token: int, generated: int, fields: dict[str, Any], ending: Ending | None
) -> None:
    """The `generated`th token of four at most, after a prompt of three."""
    (sequence,) = Driver().submit([1, 2, 3], max_tokens=4, **fields).sequences
    sequence.token_ids.extend([5] * (generated - 1))
    batch = DecodeBatch(4)
    batch.open(sequence)
    batch.start_decoding(sequence)
    rows, tokens = np.array([sequence.seq_id]), np.array([token], np.uint32)
    endings = batch.check_stop(rows, tokens, batch.append(rows, tokens), (EOS,))
    assert endings == ({} if ending is None else {0: ending})


def test_one_token_past_a_stop_is_computed_and_dropped() -> None:
    prompt = [1, 2, 3]
    stop = expect(prompt, 4)[3]
    wanted = expect(prompt, 20, (stop,))
    driver = Driver(depth=2)
    request = driver.submit(prompt, max_tokens=20, stop_token_ids=(stop,))
    driver.drain()
    assert streamed(request) == (wanted, FinishReason.STOP)
    assert driver.executor.computed_tokens == 3 + len(wanted)
    assert driver.pool.num_active == 0


def test_stop_tokens_are_ignored_before_min_tokens() -> None:
    prompt = [4, 5, 6]
    stop = expect(prompt, 2)[1]
    driver = Driver()
    request = driver.submit(prompt, max_tokens=6, stop_token_ids=(stop,), min_tokens=3)
    driver.drain()
    tokens, _ = streamed(request)
    assert len(tokens) >= 3


def test_a_token_is_compared_with_no_stop_token_but_itself() -> None:
    """However many a sequence has."""
    looks = 0

    class Watched(int):
        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return int(self) == other

        __hash__ = int.__hash__

    (sequence,) = Driver().submit([1, 2, 3], 4, stop_token_ids=tuple(map(Watched, range(20, 84)))).sequences
    batch = DecodeBatch(4)
    batch.open(sequence)
    batch.start_decoding(sequence)
    rows = np.array([sequence.seq_id])
    for token, ends in ((5, False), (30, True)):
        tokens = np.array([token], np.uint32)
        assert bool(batch.check_stop(rows, tokens, batch.append(rows, tokens), ())) == ends
    assert looks <= 1
