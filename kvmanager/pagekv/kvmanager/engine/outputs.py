"""Pushes the results of a committed step, and the ends of aborted requests, to their streams."""

from __future__ import annotations

from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.request.stream import SequenceDelta
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq, SeqStatus
from pagekv.kvmanager.scheduling.step_plan import Committed, StepResult


def deliver(committed: Committed, result: StepResult) -> list[Seq]:
    """Pushes every token to its request's stream; returns the sequences that ended."""
    for sequence, token in zip(committed.sequences, committed.token_ids, strict=True):
        sequence.request.stream.push_token(sequence.index, token, sequence.cached_tokens or 0, sequence.preemptions)
    if result.logprobs:
        for sequence, seq_id in zip(committed.sequences, committed.seq_ids, strict=True):
            logprobs = result.logprobs.get(seq_id)
            if logprobs is not None:
                sequence.request.stream.push_logprobs(sequence.index, logprobs)
    ended = [request.sequences[0] for request in committed.searched]
    for request in committed.searched:
        _deliver_results(request)
    for position, ending in committed.endings.items():
        sequence = committed.sequences[position]
        sequence.request.stream.push_end(sequence.index, ending.reason, ending.stop_token_id)
        ended.append(sequence)
    return ended


def _deliver_results(request: LiveRequest) -> None:
    """Pushes the results of a finished beam search, best first, each in one delta."""
    assert request.search is not None
    root = request.sequences[0]
    for index, result in enumerate(request.search.results()):
        stopped = result.finish is FinishReason.STOP
        request.stream.push(
            SequenceDelta(
                index,
                list(result.token_ids),
                cached_tokens=root.cached_tokens or 0,
                preemptions=root.preemptions,
                finish=result.finish,
                stop_token_id=result.token_ids[-1] if stopped else None,
                cumulative_logprob=result.logprob,
            )
        )


def deliver_abort(request: LiveRequest) -> None:
    """Pushes the finish ABORT to each output that has not ended; must be called before its sequences are finished."""
    if request.search is not None:
        outputs = dict.fromkeys(range(request.command.n), request.sequences[0])
    else:
        outputs = {s.index: s for s in request.sequences if s.state is not SeqStatus.FINISHED}
    for index, sequence in outputs.items():
        request.stream.push(
            SequenceDelta(
                index,
                cached_tokens=sequence.cached_tokens or 0,
                preemptions=sequence.preemptions,
                finish=FinishReason.ABORT,
            )
        )
