"""The running order: places, entering the executor and the one way out."""

from __future__ import annotations

from support.engine.scheduler_driver import Driver

from pagekv.kvmanager.scheduling.queues import RunningQueue
from pagekv.kvmanager.scheduling.sequence import NO_SEQ_ID, SeqStatus


def test_the_order_is_that_of_the_keys() -> None:
    driver, running = Driver(), RunningQueue(4)
    late, urgent, early = (driver.submit([1], priority=priority) for priority in (1, 0, 1))
    for request in (early, late, urgent):
        running.add(request.sequences[0])
    assert running.order == [urgent.sequences[0], late.sequences[0], early.sequences[0]]
    assert {s.state for s in running.order} == {SeqStatus.RUNNING}
    assert not running.is_alone(urgent)
    for request in (early, late):
        running.remove(request.sequences[0], SeqStatus.FINISHED)
    assert running.is_alone(urgent)
    # Nothing of them was at the executor.
    assert running.take_finished([]) == []


def test_the_executor_drops_a_sequence_once_when_it_leaves() -> None:
    driver, running = Driver(), RunningQueue(4)
    sequences = [driver.submit([1, 2, 3]).sequences[0] for _ in range(3)]
    for sequence in sequences:
        running.add(sequence)
        running.enter(sequence)
    prefilling, decoding, draining = sequences
    seq_ids = [s.seq_id for s in sequences]
    for sequence in (decoding, draining):
        sequence.num_computed = 3
        running.end_prefill(sequence)
    assert running.prefilling == [prefilling]
    running.drain(draining)
    running.remove(prefilling, SeqStatus.WAITING)
    running.remove(decoding, SeqStatus.FINISHED)
    assert running.take_finished([]) == [seq_ids[2], seq_ids[0], seq_ids[1]]
    running.remove(draining, SeqStatus.FINISHED)
    assert running.take_finished([]) == []
    assert running.order == running.prefilling == []
    # Tokens that were promised keep their rows until they have come.
    assert [s.seq_id == NO_SEQ_ID for s in (prefilling, decoding, draining)] == [True, False, False]


def test_a_beam_leaves_the_executor_with_the_step_after_the_one_it_computes_in() -> None:
    running = RunningQueue(4)
    assert running.take_finished([5, 6]) == []
    assert running.take_finished([]) == [5, 6]


def test_a_sequence_that_returns_enters_later() -> None:
    driver, running = Driver(), RunningQueue(4)
    (sequence,) = driver.submit([1, 2, 3]).sequences
    running.add(sequence)
    running.add_returning(sequence)
    assert (running.returning, sequence.seq_id) == ([sequence], NO_SEQ_ID)
    running.enter(sequence)
    assert (running.returning, running.prefilling) == ([], [sequence])
    assert sequence.seq_id != NO_SEQ_ID
