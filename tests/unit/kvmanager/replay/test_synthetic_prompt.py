"""Token ids that stand for prompts and outputs."""

from __future__ import annotations

import numpy as np

from pagekv.kvmanager.kvcache.block_hash import token_bytes
from pagekv.kvmanager.replay.synthetic_prompt import distinct_prefixes, output_tokens, prompt_bytes, prompt_ids
from pagekv.kvmanager.replay.trace import TraceRecord

A, B = TraceRecord(0.0, 7, 1, (5, 6)), TraceRecord(0.0, 8, 1, (5, 9))
UNSHARED = TraceRecord(0.0, 3, 1, ())


def test_prompts_agree_as_far_as_their_hash_ids() -> None:
    assert prompt_ids(A, 0, 4) == [5, 5, 5, 5, 6, 6, 6]
    assert prompt_ids(B, 1, 4)[:4] == prompt_ids(A, 0, 4)[:4]
    assert prompt_bytes(A, 4, 7) == token_bytes(prompt_ids(A, 0, 4))
    assert prompt_bytes(A, 4, 10) == token_bytes([5] * 4 + [6] * 6)


def test_prompts_without_ids_and_outputs_share_nothing() -> None:
    tokens = {*prompt_ids(A, 0, 4), *prompt_ids(UNSHARED, 1, 4), *prompt_ids(UNSHARED, 2, 4)}
    assert len(tokens) == 4
    assert tokens.isdisjoint(output_tokens(np.arange(4)).tolist())


def test_prefixes_are_counted_once() -> None:
    assert distinct_prefixes([A, B, A, UNSHARED]) == 3
