"""Counts and tokens of a sequence are right at every moment, and so is where it stands in the order."""

from __future__ import annotations

from array import array

import pytest
from support.engine.cached_prefixes import ROOT
from support.engine.integrity import pending
from support.engine.scheduler_driver import Driver, expect, finished, output

from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.sequence import NO_SEQ_ID, live_request


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_sequence_that_decodes_is_never_stale(block_size: int) -> None:
    """After each step planned and each committed: counts and tokens, of a sequence that is preempted in between too."""
    driver = Driver(num_blocks=64, block_size=block_size, depth=2)
    prompt = [1, 2, 3, 4, 5]
    (sequence,) = driver.submit(prompt, max_tokens=20).sequences
    wanted = [*prompt, *expect(prompt, 20)]
    for turn in range(100):
        while driver.plan() is not None:
            pass
        promised = sum(sequence.seq_id in plan.sampling for plan in driver.in_flight)
        assert pending(sequence) == promised
        if turn == 7:
            driver.scheduler.preempt_all()
            assert sequence.num_computed == 0
        if not driver.complete():
            break
        assert sequence.token_ids.tolist() == wanted[: sequence.num_tokens]
        assert sequence.num_output == sequence.num_tokens - len(prompt)
    assert finished(driver.requests[0])
    assert (sequence.token_ids.tolist(), sequence.seq_id, sequence.batch) == (wanted, NO_SEQ_ID, None)


def test_sequences_that_wait_for_a_fork_have_no_copies_of_the_prompt() -> None:
    driver = Driver()
    prompt = array("I", [1, 2, 3, 4, 5])
    first, *others = live_request(
        GenerateCommand("r", prompt, SamplingParams(max_tokens=2), 64), RequestStream("r", 64), 0, ROOT, 0
    ).sequences
    assert first.token_ids is not prompt
    assert all(each.token_ids is prompt for each in others)
    request = driver.submit(prompt, max_tokens=4, n=3, temperature=1.0, seed=5)
    driver.drain()
    assert finished(request)
    assert prompt.tolist() == [1, 2, 3, 4, 5]


def test_a_branch_has_the_same_past_and_holds_nothing() -> None:
    driver = Driver(depth=1)
    (sequence,) = driver.submit([1, 2, 3, 4, 5], max_tokens=9).sequences
    driver.step()
    sequence.num_charged = 5
    child = sequence.branch(7)
    assert child.num_charged == 5
    assert (child.token_ids, child.digests, child.key[:2]) == (sequence.token_ids, sequence.digests, sequence.key[:2])
    assert (child.index, child.seq_id, child.num_computed, len(child.block_table)) == (7, NO_SEQ_ID, 0, 0)
    child.token_ids.append(1)
    assert len(sequence.token_ids) == len(child.token_ids) - 1


def test_resumed_tokens_count_as_output() -> None:
    prompt = [1, 2, 3]
    whole = expect(prompt, 8)
    driver = Driver()
    request = driver.submit([*prompt, *whole[:5]], max_tokens=8, resumed=5)
    driver.drain()
    assert output(request) == whole[5:]
    assert request.sequences[0].num_output == 8
