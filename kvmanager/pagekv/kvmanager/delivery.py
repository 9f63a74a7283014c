"""From a committed step to the streams of those who wait for its tokens."""

from __future__ import annotations

from pagekv.kvmanager.sequence import Sequence
from pagekv.kvmanager.step_plan import Committed, StepOutcome


def deliver(committed: Committed, outcome: StepOutcome) -> list[Sequence]:
    """Hands every token to its request's stream; returns the sequences that ended."""
    for sequence, token in zip(committed.sequences, committed.token_ids, strict=True):
        sequence.request.stream.push_token(sequence.index, token, sequence.cached_tokens or 0, sequence.preemptions)
    if outcome.logprobs:
        for sequence, handle in zip(committed.sequences, committed.handles, strict=True):
            logprobs = outcome.logprobs.get(handle)
            if logprobs is not None:
                sequence.request.stream.push_logprobs(sequence.index, logprobs)
    ended = []
    for position, ending in committed.endings.items():
        sequence = committed.sequences[position]
        sequence.request.stream.push_end(sequence.index, ending.reason, ending.stop_token_id)
        ended.append(sequence)
    return ended
