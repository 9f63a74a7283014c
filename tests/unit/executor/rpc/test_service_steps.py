"""Steps over a real gRPC server in this process: order, refusals, failures, how many are taken in."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from support.event_loop import run_by, until
from support.executor.executor_steps import checksum
from support.executor.expected_tokens import expected_tokens
from support.executor.served_oracle import (
    FAILING,
    PROMPT,
    Code,
    Served,
    detail_of,
    end_of,
    entering,
    field_of,
    read,
    refusal,
    rule_of,
    served,
)

from pagekv.executor.rpc import wire
from pagekv.executor.rpc.service import SERVICE_NAME
from pagekv.executor.session.step import Step
from pagekv.executor.session.step_stream import MAX_IN_FLIGHT
from pagekv.steps.v1 import executor_service_pb2 as pb


@run_by(served)
async def test_steps_run_in_order_and_tokens_are_right(it: Served) -> None:
    epoch = await it.attach()
    call = it.run()
    await call.write(entering(epoch))
    for step in range(2, 11):
        await call.write(pb.StepRequest(epoch=epoch, step=step))
    results = [await read(call) for _ in range(10)]
    assert [(r.epoch, r.step) for r in results] == [(epoch, step) for step in range(1, 11)]
    assert [list(r.sampled_seqs) for r in results] == [[1]] * 10
    assert [r.computed_tokens for r in results] == [len(PROMPT)] + [1] * 9
    tokens = [r.sampled_tokens[0] for r in results]
    assert tokens == expected_tokens(PROMPT, 10, vocab_size=64, eos_token_ids=(0,), ignore_eos=True)
    assert results[0].idle_us == 0
    assert all(r.execute_us > 0 for r in results)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Code.OK


@run_by(served)
async def test_logprobs_cross_the_wire(it: Served) -> None:
    epoch = await it.attach(required_features=[pb.EXECUTOR_FEATURE_LOGPROBS])
    call = it.run()
    request = entering(epoch)
    request.new_seqs[0].sampling.logprobs = 2
    await call.write(request)
    result = await read(call)
    row = result.logprobs[0]
    assert (row.seq_id, row.top_token_ids[0], len(row.top_logprobs)) == (1, result.sampled_tokens[0], 2)
    assert row.chosen == row.top_logprobs[0] <= 0


@run_by(served)
async def test_a_stale_step_in_a_live_stream_is_aborted_and_touches_nothing(it: Served) -> None:
    epoch = await it.attach()
    call = it.run()
    await call.write(entering(epoch))
    await read(call)
    before = checksum(it.backend)
    await call.write(pb.StepRequest(epoch=epoch - 1, step=2))
    assert (await end_of(call))[0] is Code.ABORTED
    assert checksum(it.backend) == before


@run_by(served)
async def test_a_bad_step_ends_the_stream_after_good_results_and_touches_nothing(it: Served) -> None:
    epoch = await it.attach()
    call = it.run()
    it.backend.gate.clear()
    await call.write(entering(epoch))
    bad = entering(epoch, step=2, seq_id=2, first_block=6)
    bad.new_seqs[0].block_ids[5] = 50
    await call.write(bad)
    await call.write(pb.StepRequest(epoch=epoch, step=3))
    it.backend.gate.set()
    assert (await read(call)).step == 1
    before = checksum(it.backend)
    error = await refusal(call.read())
    assert error.code() is Code.INVALID_ARGUMENT
    assert (field_of(error), rule_of(error)) == ("new_seqs[0].block_ids[5]", "R15")
    assert "below 50, got 50 (R15)" in (error.details() or "")
    assert checksum(it.backend) == before
    assert it.backend.journal == ["allocate 50", "step"]  # the step after the bad one never ran
    again = it.run()
    await again.write(pb.StepRequest(epoch=epoch, step=2))
    assert (await end_of(again))[0] is Code.ABORTED  # the epoch is over


@run_by(served)
async def test_a_step_that_fails_inside_is_internal_and_says_why(it: Served) -> None:
    epoch = await it.attach()
    call = it.run()
    await call.write(entering(epoch))
    await read(call)
    request = entering(epoch, 2, seq_id=2)
    request.finished_seqs.append(1)
    # Other tokens than are in its blocks.
    request.new_seqs[0].token_ids.reverse()
    request.new_seqs[0].computed_tokens = 8
    request.scheduled_tokens[0] = 7
    await call.write(request)
    error = await refusal(call.read())
    assert error.code() is Code.INTERNAL
    assert "step 2: SlotError: sequence 2 position 0 (block 0 slot 0)" in (error.details() or "")
    assert detail_of(error, error_details_pb2.ErrorInfo).reason == "COMPUTATION_FAILED"
    assert await it.attach() > epoch


@pytest.mark.parametrize(("bad", "field", "rule"), [(b"\xb8\x3e\x01", "999", "R35"), (b"\xff", "step", "")])
@run_by(served)
async def test_bytes_that_are_no_step_of_this_contract_end_the_stream_after_good_results(
    it: Served, *, bad: bytes, field: str, rule: str
) -> None:
    epoch = await it.attach()
    it.backend.gate.clear()
    # Any: it writes bytes.
    call: Any = it.channel.stream_stream(
        f"/{SERVICE_NAME}/Run", request_serializer=bytes, response_deserializer=pb.StepResult.FromString
    )()
    await call.write(entering(epoch).SerializeToString())
    await call.write(pb.StepRequest(epoch=epoch, step=2).SerializeToString() + bad)
    await asyncio.to_thread(it.backend.begun.wait, 120)
    it.backend.gate.set()
    assert (await read(call)).step == 1
    error = await refusal(call.read())
    assert error.code() is Code.INVALID_ARGUMENT
    assert field_of(error) == field
    assert detail_of(error, error_details_pb2.ErrorInfo).metadata.get("rule", "") == rule
    assert it.backend.journal == ["allocate 50", "step"]
    again = it.run()
    await again.write(pb.StepRequest(epoch=epoch, step=2))
    assert (await end_of(again))[0] is Code.ABORTED  # the epoch is over


@run_by(served)
async def test_a_bug_in_reading_steps_is_internal_with_details(it: Served, *, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes) -> Step:
        raise KeyError("a bug")

    epoch = await it.attach()
    monkeypatch.setattr(wire, "step", broken)
    call = it.run()
    await call.write(entering(epoch))
    error = await refusal(call.read())
    assert error.code() is Code.INTERNAL
    assert "steps cannot be read: KeyError: 'a bug'" in (error.details() or "")
    assert detail_of(error, error_details_pb2.ErrorInfo).reason == "COMPUTATION_FAILED"


@run_by(served)
async def test_a_sequence_that_fails_ends_alone(it: Served) -> None:
    """Its mate goes on as if it had been alone, and the steps sent before the failure was known are good."""
    epoch = await it.attach()
    call = it.run()
    request = entering(epoch)
    bad = entering(epoch, seq_id=2, first_block=6).new_seqs[0]
    bad.token_ids[-1] = FAILING
    request.new_seqs.append(bad)
    request.scheduled_seqs.append(2)
    request.scheduled_tokens.append(len(PROMPT))
    await call.write(request)
    for step in (2, 3):
        await call.write(pb.StepRequest(epoch=epoch, step=step))
    results = [await read(call) for _ in range(3)]
    await call.write(pb.StepRequest(epoch=epoch, step=4, finished_seqs=[2]))
    results.append(await read(call))
    assert [list(result.failed_seqs) for result in results] == [[2], [2], [2], []]
    assert list(results[0].failed_reasons) == [pb.SEQUENCE_FAILURE_NOT_A_NUMBER]
    assert [list(result.sampled_seqs) for result in results] == [[1]] * 4
    tokens = [result.sampled_tokens[0] for result in results]
    assert tokens == expected_tokens(PROMPT, 4, vocab_size=64, eos_token_ids=(0,), ignore_eos=True)


@run_by(served)
async def test_a_half_closed_stream_is_answered_to_its_end(it: Served) -> None:
    epoch = await it.attach()
    call = it.run()
    it.backend.gate.clear()
    await call.write(entering(epoch))
    for step in (2, 3):
        await call.write(pb.StepRequest(epoch=epoch, step=step))
    await call.done_writing()
    await asyncio.to_thread(it.backend.begun.wait, 120)
    it.backend.gate.set()
    assert [(await read(call)).step for _ in range(3)] == [1, 2, 3]
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Code.OK
    again = it.run()
    await again.write(pb.StepRequest(epoch=epoch, step=4))
    assert (await end_of(again))[0] is Code.ABORTED


@run_by(served)
async def test_as_many_steps_as_described_are_taken_in_before_the_first_is_answered(it: Served) -> None:
    epoch = await it.attach()
    call = it.run()
    it.backend.gate.clear()
    await call.write(entering(epoch))
    for step in range(2, MAX_IN_FLIGHT + 1):
        await call.write(pb.StepRequest(epoch=epoch, step=step))
    await asyncio.to_thread(it.backend.begun.wait, 120)
    # One is under way.
    await until(lambda: it.compute._jobs.qsize() == MAX_IN_FLIGHT - 1)


@run_by(served)
async def test_reading_stops_when_too_many_steps_are_in_flight(it: Served) -> None:
    epoch = await it.attach()
    call = it.run()
    it.backend.gate.clear()
    await call.write(entering(epoch))
    for step in range(2, 41):
        await call.write(pb.StepRequest(epoch=epoch, step=step, scheduled_seqs=[1], scheduled_tokens=[0]))
    await asyncio.to_thread(it.backend.begun.wait, 120)
    await asyncio.sleep(0.05)
    assert it.compute._jobs.qsize() < MAX_IN_FLIGHT
    it.backend.gate.set()
    assert [(await read(call)).step for _ in range(40)] == list(range(1, 41))
