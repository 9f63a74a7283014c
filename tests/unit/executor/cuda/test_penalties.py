"""Tokens counted on the device."""

from __future__ import annotations

from array import array

import pytest
import torch
from support.executor.device_sampler import DeviceSampler, agree

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Sampling, SequenceState
from pagekv.executor.cpu import sampler as cpu_sampler

VOCAB = 40


def test_tokens_the_host_does_not_know_are_counted() -> None:
    """Penalties count tokens that the device sampled, though the host learns of them only later."""
    kinds = [Sampling(frequency_penalty=2.0), Sampling(repetition_penalty=3.0, temperature=1.0, seed=8)]
    device = DeviceSampler(VOCAB)
    known = [SequenceState(n, [1, 4], 1, [], 0, kind) for n, kind in enumerate(kinds)]
    blind = [SequenceState(n, [1, 4], 1, [], 0, kind) for n, kind in enumerate(kinds)]
    generator = torch.Generator().manual_seed(2)
    for _ in range(8):
        logits = torch.randn(2, VOCAB, generator=generator)
        theirs = cpu_sampler.sample(logits, known)
        agree(device.sample(logits, blind), theirs)
        for state, other, chosen in zip(known, blind, theirs, strict=True):
            state.token_ids.append(chosen.token_id)
            other.token_ids.append(UNKNOWN_TOKEN)


def test_the_past_of_sequences_that_begin_together_is_each_its_own() -> None:
    device = DeviceSampler(VOCAB)
    states = [
        SequenceState(0, array("i", [3, 8, 5, 5, 9]), 2, [], 0, Sampling(presence_penalty=1.0)),
        SequenceState(1, array("i", [6]), 1, [], 0, Sampling(repetition_penalty=2.0)),
    ]
    logits = torch.zeros(2, VOCAB)
    logits[:, 11] = 9.0
    device.sample(logits, states)
    rows = [device.live.get(state).penalty_row for state in states]
    assert [device.table.seen[row].nonzero()[:, 0].tolist() for row in rows] == [[3, 5, 8, 9, 11], [6, 11]]
    # Token 11 is what both have just sampled.
    counts = [device.table.outputs[row].tolist() for row in rows]
    assert [{token: n for token, n in enumerate(each) if n} for each in counts] == [{5: 2, 9: 1, 11: 1}, {11: 1}]


def test_a_sequence_begins_with_tokens_that_the_host_knows() -> None:
    state = SequenceState(4, array("i", [3, UNKNOWN_TOKEN]), 1, [], 0, Sampling(presence_penalty=1.0))
    with pytest.raises(RuntimeError, match="sequence 4 entered with a token that is not known yet"):
        DeviceSampler(VOCAB).sample(torch.zeros(1, VOCAB), [state])


def test_a_row_of_the_table_begins_anew_for_the_next_sequence() -> None:
    device, sampling = DeviceSampler(VOCAB), Sampling(frequency_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    for seq_id in range(9):
        state = SequenceState(seq_id, [0], 1, [], 0, sampling)
        # Token 0 of the prompt is no output; then 0 was, and 1 is the first of the best.
        assert [device.sample(logits, [state])[0].token_id for _ in range(2)] == [0, 1]
        device.live.remove([state])
    assert len(device.table.outputs) == 4
