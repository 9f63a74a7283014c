"""A step stays below what an executor takes: sequences whose bytes do not fit enter in the next step."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from support.engine.fake_executor import expected_output
from support.engine.scheduler_driver import VOCAB, Driver, finished, output

from pagekv.common.message_sizes import MAX_RESULT_BYTES, max_step_bytes
from pagekv.kvmanager.engine.executor_wire import step_request
from pagekv.kvmanager.scheduling.sequence import Seq
from pagekv.kvmanager.scheduling.step_builder import COLUMNS_BYTES, ID_BYTES, LISTS_BYTES, SEQUENCE_BYTES
from pagekv.kvmanager.scheduling.step_plan import BlockCopy, CopyKind, CopyList, NewSeq, StepPlan
from pagekv.steps.v1 import executor_service_pb2 as pb

# The largest that the wire has room for.
ID, MANY = 2**31 - 1, 1024
# Flags and executors allow so many.
MAX_RUNNING = 65536


def size(plan: StepPlan) -> int:
    return step_request(plan, 2**64 - 1, 2**64 - 1, range(ID - 960, ID)).ByteSize()


def test_what_is_reckoned_is_never_less_than_what_is_sent() -> None:
    driver = Driver()
    bans = tuple(range(ID - MANY, ID - 960))
    most: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.5,
        "min_p": 0.5,
        "top_k": ID,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.5,
        "logprobs": 20,
        "seed": 2**64 - 1,
        "stop_token_ids": bans,
    }
    biases = dict.fromkeys(range(ID - MANY, ID), 1.5)
    (sequence,) = driver.submit([1], min_tokens=8, logit_bias=biases, **most).sequences
    (message,) = step_request(StepPlan(new=[_new(sequence, 1, 0)]), 1, 1, range(ID - 960, ID)).new_seqs
    assert len(message.sampling.banned_until_min) == len(message.sampling.biases) == MANY
    (plainer,) = driver.submit([1], **most).sequences
    for one, besides in ((sequence, SEQUENCE_BYTES + LISTS_BYTES), (plainer, SEQUENCE_BYTES)):
        for tokens, blocks in ((1, 0), (5000, 5000)):
            assert size(StepPlan(new=[_new(one, tokens, blocks)])) < besides + ID_BYTES * (tokens + blocks)
    copies = CopyList(BlockCopy(CopyKind.SWAP_OUT, ID - index, ID - index) for index in range(5000))
    assert size(StepPlan(copies=copies)) < 2 * ID_BYTES * 5000 + 100


def room_for(entering: int) -> dict[str, Any]:
    """Settings of a driver whose steps have so many bytes for what enters."""
    return {"max_running": 8, "max_step_bytes": entering + COLUMNS_BYTES * 8}


def test_the_longest_sequence_enters_alone_whatever_else_a_step_has() -> None:
    """With a block of its own copied in and another out for every 8 tokens, beside the columns of 65,536 sequences."""
    for length in (2, 2**17, 2**20, 2**22):
        alone = SEQUENCE_BYTES + LISTS_BYTES + ID_BYTES * (length + length // 8) + 2 * 2 * ID_BYTES * (length // 8)
        assert alone + COLUMNS_BYTES * MAX_RUNNING < max_step_bytes(length)
    assert max_step_bytes(2**31 - 1) == 2**28


def _new(sequence: Seq, tokens: int, blocks: int) -> NewSeq:
    return NewSeq(sequence, ID, array("i", [ID] * tokens), array("i", [ID] * blocks), ID)


def test_columns_of_all_sequences_have_room_beside_what_enters() -> None:
    """Each sequence leaves, gets a block, is scheduled, and a copy of its own kind."""
    ids, few = [MAX_RUNNING - 1] * MAX_RUNNING, 64
    kinds = (CopyKind.SWAP_OUT, CopyKind.SWAP_IN)
    copies = CopyList(BlockCopy(kinds[index % 2], ID - index, ID - index) for index in range(few))
    plan = StepPlan(
        finished=ids,
        append_seq_ids=ids,
        append_blocks=[ID] * MAX_RUNNING,
        scheduled_seq_ids=ids,
        scheduled_tokens=ids,
    )
    assert size(plan) + size(StepPlan(copies=copies)) * MAX_RUNNING // few < COLUMNS_BYTES * MAX_RUNNING


def test_the_largest_result_is_taken() -> None:
    row = pb.SampledLogprobs(seq_id=ID, chosen=-1.5, top_token_ids=[ID] * 128, top_logprobs=[-1.5] * 128)
    one = pb.StepResult(sampled_seqs=[ID], sampled_tokens=[ID], logprobs=[row])
    assert one.ByteSize() * MAX_RUNNING < MAX_RESULT_BYTES


@pytest.mark.parametrize("depth", [1, 2])
def test_long_prompts_that_hit_one_prefix_enter_in_several_steps(depth: int) -> None:
    """In order, as many as fit and never more; one alone always."""
    prefix = [index % VOCAB for index in range(80)]
    entry = SEQUENCE_BYTES + ID_BYTES * (81 + 21)
    for most, batches in ((10**9, [7]), (3 * entry, [3, 3, 1]), (3 * entry - 1, [2, 2, 2, 1]), (1, [1] * 7)):
        driver = Driver(num_blocks=256, max_batch_tokens=128, depth=depth, **room_for(most))
        driver.submit(prefix, max_tokens=1)
        driver.drain()
        before = len(driver.plans)
        requests = [driver.submit([*prefix, index], max_tokens=12) for index in range(7)]
        driver.drain()
        entered = [[new.sequence.request for new in plan.new] for plan in driver.plans[before:] if plan.new]
        assert [len(plan) for plan in entered] == batches
        assert [request for plan in entered for request in plan] == requests
        for request in requests:
            assert output(request) == expected_output(request.command.prompt_ids, 12, VOCAB)


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_forks_beams_and_what_returns_enter_one_by_one(host_blocks: int) -> None:
    driver = Driver(host_blocks=host_blocks, preemption="swap" if host_blocks else "recompute", **room_for(1))
    requests = [
        driver.submit(list(range(19)), max_tokens=20, n=4),
        driver.submit(list(range(30, 49)), max_tokens=12, beam_width=3, n=2),
        driver.submit([7, 8, 9], max_tokens=20),
    ]
    for step in range(30):
        if step % 8 == 7:
            driver.scheduler.preempt_all()
        driver.step()
    driver.lose_executor()
    driver.drain()
    assert all(finished(request) for request in requests)
    assert max(len(plan.new) for plan in driver.plans) == 1
    wanted = expected_output(list(range(19)), 20, VOCAB)
    assert [output(requests[0], index) for index in range(4)] == [wanted] * 4


def test_copies_of_the_step_count() -> None:
    """With a host pool, room is kept for blocks that are copied in and out for whoever enters."""
    entered = []
    for host_blocks in (0, 64):
        # Enough for two sequences, or for one and its copies.
        room = room_for(2 * (SEQUENCE_BYTES + ID_BYTES * (81 + 21)))
        driver = Driver(num_blocks=64, host_blocks=host_blocks, preemption="swap", max_batch_tokens=256, **room)
        requests = [driver.submit([index] * 81, max_tokens=6) for index in range(2)]
        driver.drain()
        entered.append(max(len(plan.new) for plan in driver.plans))
        assert all(finished(request) for request in requests)
    assert entered == [2, 1]


@pytest.mark.parametrize("depth", [1, 2])
def test_who_waits_enters_beside_beams_that_come_back_again_and_again(depth: int) -> None:
    """A step has room for two of the longest sequences at least; here for three."""
    prompt = [index % VOCAB for index in range(80)]
    entry = SEQUENCE_BYTES + ID_BYTES * (81 + 21)
    room: dict[str, Any] = {"max_running": 32, "max_step_bytes": 3 * entry + 32 * COLUMNS_BYTES}
    driver = Driver(num_blocks=512, max_batch_tokens=256, depth=depth, **room)
    searches = [driver.submit([first, *prompt], max_tokens=40, n=4, beam_width=4) for first in range(4)]
    while len(driver.plans) < 30:
        driver.step()
    assert not any(map(finished, searches))
    begun = len(driver.plans)
    late = [driver.submit([9, *prompt], max_tokens=1), driver.submit([1, 2, 3], max_tokens=1)]
    while not all(map(finished, late)):
        driver.step()
    assert len(driver.plans) - begun <= 8
    assert not all(map(finished, searches))
    driver.drain()
    alone = Driver(num_blocks=512, max_batch_tokens=256, depth=depth, max_running=32)
    undisturbed = [alone.submit([first, *prompt], max_tokens=40, n=4, beam_width=4) for first in range(4)]
    alone.drain()
    assert [output(search) for search in searches] == [output(search) for search in undisturbed]
