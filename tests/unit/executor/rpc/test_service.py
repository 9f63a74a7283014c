"""Describe, Attach and epochs over a real gRPC server in this process: refusals, fencing, shutting down."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from support.event_loop import run_by, until
from support.executor.executor_steps import checksum
from support.executor.served_oracle import (
    Code,
    Served,
    end_of,
    entering,
    field_of,
    read,
    refusal,
    served,
    unmet,
)

from pagekv.executor.backend.interface import LAYOUT
from pagekv.executor.session.step_stream import MAX_IN_FLIGHT
from pagekv.steps.v1 import executor_service_pb2 as pb


@run_by(served, loaded=False)
async def test_everything_is_unavailable_while_loading(it: Served) -> None:
    error = await refusal(it.stub.Describe(pb.DescribeRequest(block_size=16, token_budget=2048)))
    assert error.code() is Code.UNAVAILABLE
    assert "loading" in (error.details() or "")
    assert (await refusal(it.attach())).code() is Code.UNAVAILABLE
    assert (await end_of(it.run()))[0] is Code.UNAVAILABLE


@run_by(served)
async def test_describe(it: Served) -> None:
    answer = await it.stub.Describe(pb.DescribeRequest(block_size=16, token_budget=2048))
    assert (answer.backend, answer.layout, answer.kv_dtype) == ("oracle", LAYOUT, "digest")
    assert (answer.vocab_size, answer.max_model_len, list(answer.eos_token_ids)) == (64, 256, [0])
    assert (answer.bytes_per_block, answer.device_kv_bytes, answer.max_sequences) == (192, 192 * 200, 8)
    assert len(bytes.fromhex(answer.model_fingerprint)) == 32
    assert (answer.contract_revision, answer.max_steps_in_flight) == (1, MAX_IN_FLIGHT)
    features = [pb.EXECUTOR_FEATURE_HOST_POOL, pb.EXECUTOR_FEATURE_LOGPROBS, pb.EXECUTOR_FEATURE_MIN_TOKENS]
    assert (list(answer.features), answer.max_logprobs, answer.sampler) == (features, 128, "oracle-1")
    assert answer == await it.stub.Describe(pb.DescribeRequest(block_size=16, token_budget=2048, contract_revision=2))


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"block_size": size, "token_budget": 1}, "block_size") for size in (0, 3, 512, 2**32 - 1)]
    + [({"block_size": 1, "token_budget": budget}, "token_budget") for budget in (0, 65537)]
    + [({"block_size": 1, "token_budget": 1, "contract_revision": 65536}, "contract_revision")],
)
@run_by(served)
async def test_describe_refuses(it: Served, *, fields: dict[str, int], field: str) -> None:
    error = await refusal(it.stub.Describe(pb.DescribeRequest(**fields)))
    assert error.code() is Code.INVALID_ARGUMENT
    assert field_of(error) == field


@run_by(served)
async def test_attach_refuses_by_field_and_ends_nothing(it: Served) -> None:
    epoch = await it.attach()
    call = it.run()
    for fields, code, field in (
        ({"manager_id": ""}, Code.INVALID_ARGUMENT, "manager_id"),
        ({"manager_id": "x" * 129}, Code.INVALID_ARGUMENT, "manager_id"),
        ({"block_size": 12}, Code.INVALID_ARGUMENT, "block_size"),
        ({"num_device_blocks": 0}, Code.INVALID_ARGUMENT, "num_device_blocks"),
        ({"num_device_blocks": 2**31}, Code.INVALID_ARGUMENT, "num_device_blocks"),
        ({"num_host_blocks": 2**31}, Code.INVALID_ARGUMENT, "num_host_blocks"),
        ({"num_host_blocks": 1}, Code.INVALID_ARGUMENT, "num_host_blocks"),
        ({"contract_revision": 0}, Code.FAILED_PRECONDITION, "CONTRACT_REVISION 0"),
        ({"contract_revision": 2}, Code.FAILED_PRECONDITION, "CONTRACT_REVISION 2"),
        ({"required_features": [2, 99]}, Code.FAILED_PRECONDITION, "EXECUTOR_FEATURE feature 99"),
        ({"required_features": [5]}, Code.FAILED_PRECONDITION, "EXECUTOR_FEATURE EXECUTOR_FEATURE_PENALTIES"),
        ({"layout": "blocks-last"}, Code.INVALID_ARGUMENT, "layout"),
        ({"num_device_blocks": 801}, Code.RESOURCE_EXHAUSTED, ""),
        ({"num_host_blocks": 801, "required_features": [1]}, Code.RESOURCE_EXHAUSTED, ""),
    ):
        values: dict[str, Any] = {"manager_id": "b", "take_over": True, **fields}
        error = await refusal(it.attach(**values))
        assert error.code() is code, fields
        if code is Code.FAILED_PRECONDITION:
            assert unmet(error) == field
        elif field:
            assert field_of(error) == field
        else:
            assert "at most 800" in (error.details() or "")
    await call.write(entering(epoch))
    assert (await read(call)).step == 1  # the epoch of before goes on


@run_by(served)
async def test_epochs_rise_and_an_unused_one_holds_nothing(it: Served) -> None:
    epochs = [await it.attach(manager) for manager in "abca"]
    assert sorted(set(epochs)) == epochs
    assert epochs[0] > 0
    for epoch in epochs[:-1]:
        call = it.run()
        await call.write(entering(epoch))
        code, details = await end_of(call)
        assert code is Code.ABORTED
        assert f"{epoch} is over" in details
    call = it.run()
    await call.write(entering(epochs[-1]))
    assert (await read(call)).step == 1


@run_by(served)
async def test_another_manager_is_refused_while_a_stream_lives(it: Served) -> None:
    epoch = await it.attach("the-first-one")
    call = it.run(epoch)
    await call.wait_for_connection()
    await until(lambda: len(it.session._streams) == 1)  # headers reach the handler a moment after they leave
    for _ in range(2):  # before the first step, and after it
        error = await refusal(it.attach("second"))
        assert error.code() is Code.FAILED_PRECONDITION
        assert "take_over" in (error.details() or "")
        # With the holder's id or epoch another one could pass for it.
        told = repr((error.details(), error.trailing_metadata()))
        assert "the-first-one" not in told
        assert str(epoch) not in told
        if not it.backend.begun.is_set():
            await call.write(entering(epoch))
            await read(call)
    call.cancel()
    await until(lambda: not it.session._streams)
    assert await it.attach("second") > epoch


@run_by(served)
async def test_streams_of_no_epoch_hold_nothing_however_long_they_stay_open(it: Served) -> None:
    """The holder waits for its first request when it dies, and comes back under another id."""
    epoch = await it.attach("first")
    idle = [it.run() for _ in range(20)]
    holder = it.run(epoch)
    idle += [it.run() for _ in range(20)]
    for call in (holder, *idle):
        await call.wait_for_connection()
    await until(lambda: len(it.session._streams) == 41)
    assert (await refusal(it.attach("second"))).code() is Code.FAILED_PRECONDITION
    holder.cancel()
    await until(lambda: len(it.session._streams) == 40)
    again = await it.attach("first again")
    holder = it.run(again)
    await holder.write(entering(again))
    assert (await read(holder)).step == 1
    assert len(it.session._streams) == 41


@run_by(served)
async def test_a_refused_attach_asks_the_backend_nothing(it: Served) -> None:
    """Nor does it wait: profiling for it would stop the steps of the manager that drives."""
    epoch = await it.attach("first")
    call = it.run(epoch)
    it.backend.gate.clear()
    await call.write(entering(epoch))
    await asyncio.to_thread(it.backend.begun.wait, 120)
    for block_size in (1, 2, 8):
        error = await refusal(it.attach("second", block_size=block_size))
        assert error.code() is Code.FAILED_PRECONDITION
    it.backend.gate.set()
    assert (await read(call)).step == 1
    assert it.backend.described == [4]


@run_by(served)
async def test_a_stream_is_bound_by_its_metadata_before_any_step(it: Served) -> None:
    old, epoch = await it.attach(), await it.attach()
    call = it.run(epoch)
    await call.write(entering(epoch))
    assert (await read(call)).step == 1
    for number, code in ((old, Code.ABORTED), (0, Code.ABORTED), (epoch, Code.FAILED_PRECONDITION)):
        assert (await end_of(it.run(number)))[0] is code
    for text in ("", "x", "-1", "1" * 21, "1 2"):
        error = await refusal(it.run(text).read())
        assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, "pagekv-epoch")
    await call.write(pb.StepRequest(epoch=epoch, step=2))
    assert (await read(call)).step == 2


@pytest.mark.parametrize(("manager", "take_over"), [("first", False), ("second", True)])
@run_by(served)
async def test_taking_over_fences_the_old_epoch(it: Served, *, manager: str, take_over: bool) -> None:
    """The step under way is finished before the pools are replaced, queued ones never run, the old stream ABORTs."""
    old = await it.attach("first")
    call = it.run()
    it.backend.gate.clear()
    await call.write(entering(old))
    for step in (2, 3):
        await call.write(pb.StepRequest(epoch=old, step=step))
    await asyncio.to_thread(it.backend.begun.wait, 120)
    attaching = asyncio.create_task(it.attach(manager, take_over=take_over, num_device_blocks=40))
    assert (await end_of(call))[0] is Code.ABORTED  # at once, though its step is still under way
    assert it.backend.journal == ["allocate 50"]
    assert not attaching.done()
    it.backend.gate.set()
    new = await attaching
    assert new > old
    assert it.backend.journal == ["allocate 50", "step", "allocate 40"]
    fresh = it.run()
    await fresh.write(entering(new))
    assert (await read(fresh)).epoch == new
    assert it.backend.journal == ["allocate 50", "step", "allocate 40", "step"]


@run_by(served)
async def test_one_stream_per_epoch_and_its_end_ends_the_epoch(it: Served) -> None:
    epoch = await it.attach()
    call, second = it.run(), it.run()
    await call.write(entering(epoch))
    await read(call)
    await second.write(pb.StepRequest(epoch=epoch, step=2))
    assert (await end_of(second))[0] is Code.FAILED_PRECONDITION
    await call.write(pb.StepRequest(epoch=epoch, step=2))
    assert (await read(call)).step == 2  # the first stream goes on
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    third = it.run()
    await third.write(pb.StepRequest(epoch=epoch, step=3))
    assert (await end_of(third))[0] is Code.ABORTED


@run_by(served)
async def test_describe_in_an_epoch_changes_nothing(it: Served) -> None:
    epoch = await it.attach()
    call = it.run()
    await call.write(entering(epoch))
    await read(call)
    before = checksum(it.backend)
    for size in (4, 16):
        await it.stub.Describe(pb.DescribeRequest(block_size=size, token_budget=64))
    assert checksum(it.backend) == before
    await call.write(pb.StepRequest(epoch=epoch, step=2))
    assert (await read(call)).step == 2


@run_by(served)
async def test_shut_down_finishes_the_step_and_reports_it(it: Served) -> None:
    epoch = await it.attach()
    call, idle = it.run(), it.run()
    it.backend.gate.clear()
    await call.write(entering(epoch))
    await call.write(pb.StepRequest(epoch=epoch, step=2))
    await asyncio.to_thread(it.backend.begun.wait, 120)
    closing = asyncio.create_task(it.session.shut_down())
    await asyncio.sleep(0.02)
    assert not closing.done()
    it.backend.gate.set()
    await closing
    assert (await read(call)).step == 1
    assert (await end_of(call))[0] is Code.UNAVAILABLE
    assert (await end_of(idle))[0] is Code.UNAVAILABLE
    assert it.backend.journal == ["allocate 50", "step"]
    assert (await refusal(it.attach())).code() is Code.UNAVAILABLE
