"""Beam search over the block pool: beams fork, share their past, copy the block they write, and are dropped.

Every live beam computes one position a step and reports its likeliest tokens. When all beams of a search have, the
search decides, and the beams of the next step take over the blocks: the first that goes on from a beam keeps its table,
others share its full blocks and get a copy of the one they will write, and a beam that nothing goes on from gives its
private blocks back at once (CHECKLIST J2, J3). The decision needs the step's result, so a search takes part in every
second step when steps are sent ahead.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from pagekv.kvmanager.scheduling.beam_search import BeamSearch, Continuation
from pagekv.kvmanager.scheduling.running_queue import RunningQueue, key
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq, SeqStatus
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult


def begin_search(request: LiveRequest, eos_token_ids: Iterable[int]) -> None:
    """Gives a request that asks for one its search."""
    sampling = request.command.sampling
    request.search = BeamSearch(
        sampling.beam_width,
        request.command.n,
        sampling.length_penalty,
        sampling.early_stopping,
        sampling.max_tokens,
        sampling.end_ids(eos_token_ids),
        sampling.min_tokens,
    )


def give_blocks(running: RunningQueue) -> None:
    """Gives a block to every returning beam whose table is full. To be called before anything is planned: it may
    preempt.
    """
    size = running.pool.block_size
    for sequence in list(running.returning):
        if sequence.num_computed == len(sequence.block_table) * size:
            block = running.block_for(sequence)
            if block >= 0:
                running.tables.publish(sequence)
                sequence.block_table.append(block)


def take_candidates(running: RunningQueue, plan: StepPlan, outcome: StepResult) -> list[LiveRequest]:
    """Takes in what a step's beams reported, and advances the searches that have heard from all of theirs; returns
    those that are done.
    """
    heard: dict[int, LiveRequest] = {}
    for seq_id, sequence in plan.beams.items():
        if sequence.seq_id != seq_id or sequence.state is not SeqStatus.DRAINING:
            continue  # preempted or aborted since
        running.rows.leave(sequence, finished=False)
        sequence.candidates = list(outcome.logprobs[seq_id].top)
        heard[sequence.request.arrival] = sequence.request
    done = []
    for request in heard.values():
        if all(sequence.candidates is not None for sequence in request.sequences) and _advance(running, request):
            done.append(request)
    return done


def _advance(running: RunningQueue, request: LiveRequest) -> bool:
    """One decision; True when it was the last, and every block is back."""
    search, beams = request.search, request.sequences
    assert search is not None
    continuing = search.advance([beam.candidates or [] for beam in beams])
    running.counters.generated_tokens += len(continuing)
    going_on = {continuation.parent for continuation in continuing}
    for index, beam in enumerate(beams):
        if index not in going_on:
            running.release(beam)
    if search.done:
        return True
    _fork(running, request, continuing)
    return False


def _fork(running: RunningQueue, request: LiveRequest, continuing: list[Continuation]) -> None:
    """Makes `request.sequences` the beams that go on, best first, each with its next token."""
    beams = request.sequences
    kept: dict[int, Seq] = {}
    children: list[Seq] = []
    following: list[Seq] = []
    serial = 1 + max(beam.index for beam in beams)
    for continuation in continuing:
        parent = beams[continuation.parent]
        if continuation.parent not in kept:
            kept[continuation.parent] = parent
            following.append(parent)
        else:
            child = parent.branch(serial)
            serial += 1
            children.append(child)
            following.append(child)
    parents = [beams[c.parent] for c, s in zip(continuing, following, strict=True) if s in children]
    while not (forked := running.tables.fork_beams(parents, children)) and running.preempt_behind(beams[0]):
        pass  # Like decodes, a search takes blocks from those behind it.
    for continuation, sequence in zip(continuing, following, strict=True):
        sequence.token_ids.append(continuation.token_id)
        sequence.candidates = None
    request.sequences = following
    if forked:
        for child in children:
            running.hold(child)
        for sequence in following:
            sequence.state = SeqStatus.RUNNING
            insort(running.returning, sequence, key=key)
    else:
        # Refused whole, and nobody is behind: none goes on until all can.
        running.queue(children)
        running.preempt(following[0])
