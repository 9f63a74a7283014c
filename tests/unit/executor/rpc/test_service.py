"""Describe, Attach and Run over a real gRPC server in this process: epochs, fencing, refusals, order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from support.executor.executor_steps import checksum
from support.executor.expected_tokens import expected_tokens

from pagekv.common.server import GrpcServer
from pagekv.common.statuses import STATUS_DETAILS_KEY
from pagekv.executor.backend.interface import LAYOUT, Sampled, Scheduled
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.rpc.service import SERVICE_NAME, ExecutorService
from pagekv.executor.session.session import Session
from pagekv.executor.session.step_stream import MAX_IN_FLIGHT
from pagekv.executor.session.worker_thread import WorkerThread
from pagekv.v1 import executor_service_pb2 as pb
from pagekv.v1 import executor_service_pb2_grpc as pb_grpc

Code = grpc.StatusCode
Call = grpc.aio.StreamStreamCall[pb.StepRequest, pb.StepResult]
MODEL = OracleModel(vocab_size=64, max_model_len=256)
PROMPT = list(range(10, 25))


class HeldOracle(OracleBackend):
    """An oracle whose steps wait while `gate` is cleared, and that notes what it is asked to do."""

    def __init__(self) -> None:
        super().__init__(MODEL, kv_bytes=12 * 16 * 200, max_sequences=8)
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.journal: list[str] = []

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self.journal.append(f"allocate {num_device_blocks}")
        super().allocate(block_size, num_device_blocks, num_host_blocks)

    def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
        self.begun.set()
        assert self.gate.wait(20)
        self.journal.append("step")
        return super().execute(scheduled)


@dataclass
class Served:
    """A server, its backend, and a client of it."""

    backend: HeldOracle
    session: Session
    compute: WorkerThread
    stub: pb_grpc.ExecutorServiceAsyncStub

    async def attach(self, manager_id: str = "a", **fields: Any) -> int:
        values = {"block_size": 4, "num_device_blocks": 50, "layout": LAYOUT, **fields}
        return (await self.stub.Attach(pb.AttachRequest(manager_id=manager_id, **values))).epoch

    def run(self) -> Call:
        return self.stub.Run()


@asynccontextmanager
async def serving(loaded: bool = True) -> AsyncIterator[Served]:
    compute = WorkerThread()
    session = Session(compute)
    server = GrpcServer("127.0.0.1:0", [SERVICE_NAME], reflection=False)
    ExecutorService(session).add_to(server.server)
    port = await server.start()
    backend = HeldOracle()
    if loaded:
        session.serve(backend)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = cast("pb_grpc.ExecutorServiceAsyncStub", pb_grpc.ExecutorServiceStub(channel))
        try:
            yield Served(backend, session, compute, stub)
        finally:
            backend.gate.set()
            await server.stop(0)
            compute.stop()


def served(test: Callable[[Served], Awaitable[None]], loaded: bool = True) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), serving(loaded) as it:
            await test(it)

    asyncio.run(main())


def entering(epoch: int, step: int = 1, seq_id: int = 1, first_block: int = 0) -> pb.StepRequest:
    """A sequence enters and computes its whole prompt; its blocks hold 24 positions."""
    return pb.StepRequest(
        epoch=epoch,
        step=step,
        new_seqs=[
            pb.NewSequence(
                seq_id=seq_id,
                token_ids=PROMPT,
                num_prompt_tokens=len(PROMPT),
                block_ids=range(first_block, first_block + 6),
                sampling=pb.StepSampling(top_p=1.0, repetition_penalty=1.0),
            )
        ],
        scheduled_seqs=[seq_id],
        scheduled_tokens=[len(PROMPT)],
    )


async def read(call: Call) -> pb.StepResult:
    result = await call.read()
    assert isinstance(result, pb.StepResult), "the stream ended"
    return result


async def end_of(call: Call) -> tuple[grpc.StatusCode, str]:
    """Status of a stream that ends by itself; results that come first are dropped."""

    async def drain() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    error = await refusal(drain())
    return error.code(), error.details() or ""


async def refusal(answer: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("did not happen")


def field_of(error: grpc.aio.AioRpcError) -> str:
    """The field that a refusal names in its google.rpc.BadRequest."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(cast("bytes", trailers[STATUS_DETAILS_KEY]))
    violations = error_details_pb2.BadRequest()
    assert any(detail.Unpack(violations) for detail in status.details)
    return str(violations.field_violations[0].field)


def test_everything_is_unavailable_while_loading() -> None:
    async def test(it: Served) -> None:
        error = await refusal(it.stub.Describe(pb.DescribeRequest(block_size=16, token_budget=2048)))
        assert error.code() is Code.UNAVAILABLE
        assert "loading" in (error.details() or "")
        assert (await refusal(it.attach())).code() is Code.UNAVAILABLE
        assert (await end_of(it.run()))[0] is Code.UNAVAILABLE

    served(test, loaded=False)


def test_describe() -> None:
    async def test(it: Served) -> None:
        answer = await it.stub.Describe(pb.DescribeRequest(block_size=16, token_budget=2048))
        assert (answer.backend, answer.layout, answer.kv_dtype) == ("oracle", LAYOUT, "digest")
        assert (answer.vocab_size, answer.max_model_len, list(answer.eos_token_ids)) == (64, 256, [0])
        assert (answer.bytes_per_block, answer.device_kv_bytes, answer.max_sequences) == (192, 192 * 200, 8)
        assert len(bytes.fromhex(answer.model_fingerprint)) == 32

    served(test)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"block_size": size, "token_budget": 1}, "block_size") for size in (0, 3, 512, 2**32 - 1)]
    + [({"block_size": 1, "token_budget": budget}, "token_budget") for budget in (0, 65537)],
)
def test_describe_refuses(fields: dict[str, int], field: str) -> None:
    async def test(it: Served) -> None:
        error = await refusal(it.stub.Describe(pb.DescribeRequest(**fields)))
        assert error.code() is Code.INVALID_ARGUMENT
        assert field_of(error) == field

    served(test)


def test_attach_refuses_by_field_and_ends_nothing() -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach()
        call = it.run()
        for fields, code, field in (
            ({"manager_id": ""}, Code.INVALID_ARGUMENT, "manager_id"),
            ({"manager_id": "x" * 129}, Code.INVALID_ARGUMENT, "manager_id"),
            ({"block_size": 12}, Code.INVALID_ARGUMENT, "block_size"),
            ({"num_device_blocks": 0}, Code.INVALID_ARGUMENT, "num_device_blocks"),
            ({"num_device_blocks": 2**31}, Code.INVALID_ARGUMENT, "num_device_blocks"),
            ({"num_host_blocks": 2**31}, Code.INVALID_ARGUMENT, "num_host_blocks"),
            ({"layout": "blocks-last"}, Code.INVALID_ARGUMENT, "layout"),
            ({"num_device_blocks": 801}, Code.RESOURCE_EXHAUSTED, ""),
            ({"num_host_blocks": 801}, Code.RESOURCE_EXHAUSTED, ""),
        ):
            values: dict[str, Any] = {"manager_id": "b", "take_over": True, **fields}
            error = await refusal(it.attach(**values))
            assert error.code() is code, fields
            if field:
                assert field_of(error) == field
            else:
                assert "at most 800" in (error.details() or "")
        await call.write(entering(epoch))
        assert (await read(call)).step == 1  # the epoch of before goes on

    served(test)


def test_steps_run_in_order_and_tokens_are_right() -> None:
    async def test(it: Served) -> None:
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

    served(test)


def test_logprobs_cross_the_wire() -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach()
        call = it.run()
        request = entering(epoch)
        request.new_seqs[0].sampling.logprobs = 2
        await call.write(request)
        result = await read(call)
        row = result.logprobs[0]
        assert (row.seq_id, row.top_token_ids[0], len(row.top_logprobs)) == (1, result.sampled_tokens[0], 2)
        assert row.chosen == row.top_logprobs[0] <= 0

    served(test)


def test_epochs_rise_and_an_unused_one_holds_nothing() -> None:
    async def test(it: Served) -> None:
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

    served(test)


def test_another_manager_is_refused_while_a_stream_lives() -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach("first")
        call = it.run()
        await call.wait_for_connection()
        await until(lambda: len(it.session._streams) == 1)  # headers reach the handler a moment after they leave
        for _ in range(2):  # before the first step, and after it
            error = await refusal(it.attach("second"))
            assert error.code() is Code.FAILED_PRECONDITION
            assert f"'first' drives this executor in epoch {epoch}" in (error.details() or "")
            assert "take_over" in (error.details() or "")
            if not it.backend.begun.is_set():
                await call.write(entering(epoch))
                await read(call)
        call.cancel()
        await until(lambda: not it.session._streams)
        assert await it.attach("second") > epoch

    served(test)


@pytest.mark.parametrize(("manager", "take_over"), [("first", False), ("second", True)])
def test_taking_over_fences_the_old_epoch(manager: str, take_over: bool) -> None:
    """The step under way is finished before the pools are replaced, queued ones never run, the old stream ABORTs."""

    async def test(it: Served) -> None:
        old = await it.attach("first")
        call = it.run()
        it.backend.gate.clear()
        await call.write(entering(old))
        for step in (2, 3):
            await call.write(pb.StepRequest(epoch=old, step=step))
        await asyncio.to_thread(it.backend.begun.wait, 10)
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

    served(test)


def test_one_stream_per_epoch_and_its_end_ends_the_epoch() -> None:
    async def test(it: Served) -> None:
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

    served(test)


def test_a_stale_step_in_a_live_stream_is_aborted_and_touches_nothing() -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach()
        call = it.run()
        await call.write(entering(epoch))
        await read(call)
        before = checksum(it.backend)
        await call.write(pb.StepRequest(epoch=epoch - 1, step=2))
        assert (await end_of(call))[0] is Code.ABORTED
        assert checksum(it.backend) == before

    served(test)


def test_a_bad_step_ends_the_stream_after_good_results_and_touches_nothing() -> None:
    async def test(it: Served) -> None:
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
        assert field_of(error) == "new_seqs[0].block_ids[5]"
        assert "below 50, got 50" in (error.details() or "")
        assert checksum(it.backend) == before
        assert it.backend.journal == ["allocate 50", "step"]  # the step after the bad one never ran
        again = it.run()
        await again.write(pb.StepRequest(epoch=epoch, step=2))
        assert (await end_of(again))[0] is Code.ABORTED  # the epoch is over

    served(test)


def test_a_step_that_fails_inside_is_internal_and_says_why() -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach()
        call = it.run()
        request = entering(epoch)
        request.new_seqs[0].computed_tokens = 8
        request.scheduled_tokens[0] = 7
        await call.write(request)
        code, details = await end_of(call)
        assert code is Code.INTERNAL
        assert "step 1: SlotError: sequence 1 position 0 (block 0 slot 0)" in details
        assert await it.attach() > epoch

    served(test)


def test_reading_stops_when_too_many_steps_are_in_flight() -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach()
        call = it.run()
        it.backend.gate.clear()
        await call.write(entering(epoch))
        for step in range(2, 41):
            await call.write(pb.StepRequest(epoch=epoch, step=step, scheduled_seqs=[1], scheduled_tokens=[0]))
        await asyncio.to_thread(it.backend.begun.wait, 10)
        await asyncio.sleep(0.05)
        assert it.compute._jobs.qsize() < MAX_IN_FLIGHT
        it.backend.gate.set()
        assert [(await read(call)).step for _ in range(40)] == list(range(1, 41))

    served(test)


def test_shut_down_finishes_the_step_and_reports_it() -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach()
        call, idle = it.run(), it.run()
        it.backend.gate.clear()
        await call.write(entering(epoch))
        await call.write(pb.StepRequest(epoch=epoch, step=2))
        await asyncio.to_thread(it.backend.begun.wait, 10)
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

    served(test)
