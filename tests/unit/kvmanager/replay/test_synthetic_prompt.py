"""Token ids that stand for prompts and outputs."""

from __future__ import annotations

import numpy as np

from pagekv.kvmanager.replay.synthetic_prompt import distinct_prefixes, output_tokens, prompt_tokens
from pagekv.kvmanager.replay.trace import TraceRecord

A, B = TraceRecord(0.0, 7, 1, (5, 6)), TraceRecord(0.0, 8, 1, (5, 9))
UNSHARED = TraceRecord(0.0, 3, 1, ())


def ids(record: TraceRecord, index: int, length: int) -> list[int]:
    return list(prompt_tokens(record, index, 4, length).tolist())


def test_prompts_agree_as_far_as_their_hash_ids() -> None:
    assert ids(A, 0, 7) == [5, 5, 5, 5, 6, 6, 6]
    assert ids(B, 1, 8) == [5] * 4 + [9] * 4
    assert ids(A, 0, 10) == [5] * 4 + [6] * 6


def test_prompts_without_ids_and_outputs_share_nothing() -> None:
    tokens = {*ids(A, 0, 7), *ids(UNSHARED, 1, 3), *ids(UNSHARED, 2, 3)}
    assert len(tokens) == 4
    assert tokens.isdisjoint(output_tokens(np.arange(4)).tolist())


def test_prefixes_are_counted_once() -> None:
    assert distinct_prefixes([A, B, A, UNSHARED]) == 3
